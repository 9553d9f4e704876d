"""`dispatch`: moves tokens to their experts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_ep import quantized, reference, varying
from jax_ep.handle import Handle, HandleSpec
from jax_ep.primitives import common, lowering

# Operands: the routing, then the payload's leaves [T, ...] and, with has_weights, the top-k
# weights [T, K]. Results: the rows of every leaf, or values and scales of one that is cast, then
# the row weights. `quantize` is "none" or a kind of cast.
dispatch_p = Primitive("jax_ep_dispatch")
dispatch_p.multiple_results = True


def dispatch(
    x: Any,
    handle: Handle,
    topk_weights: jax.Array | None = None,
    *,
    quantize: str | None = None,
) -> tuple[Any, jax.Array | None]:
    """Moves each token to the rows that `handle` gives it, all leaves in one transfer.

    Linear in `x` and in `topk_weights`; the transpose is `combine`. Collective over the group;
    call it inside `shard_map`.

    With `quantize`, every bfloat16, float16 and float32 leaf [T, ..., H] is cast to float8_e4m3fn
    on the way, with a scale for every 128 columns, and comes out as a `Quantized`. In derivatives
    the cast counts as the identity.

    Args:
      x: a pytree of arrays [T, ...] of any whole-byte dtype: activations, `(fp8, scales)`, ids.
        A token's bytes in all leaves, those of values and scales where it is cast, are at most
        `group.max_row_bytes`.
      handle: of `prepare`, for the same T tokens.
      topk_weights: floats [T, K], or None.
      quantize: None, "fp8" (float32 scales), "fp8_e8m0" (scales that are powers of two, in
        float8_e8m0fnu) or "fp8_round_scale" (those, in float32; DeepEP's `round_scale`).

    Returns:
      rows: the pytree of `x`, leaves [capacity, ...], or [E_local, C, ...] in layout "padded";
        a `Quantized` for a leaf that is cast. Rows without a source are zero.
      row_weights: the weight of each row's pair, [capacity] or [E_local, C]; in layout "rank"
        [capacity, K], zero where the k-th expert is not on this rank. None without topk_weights.

    Raises:
      ValueError, TypeError: while tracing; an argument is wrong.
      jax.errors.JaxRuntimeError: at run time: a rank did not come within `group.timeout_s`.
    """
    common.check_handle(handle)
    spec = handle.spec
    spec.group.check_context("dispatch")
    leaves, treedef = check_payload(spec, handle.topk_idx, x, topk_weights, quantize)
    has_weights = topk_weights is not None
    operands = common.vary(spec, [*common.routing_operands(handle), *leaves])
    if quantize is None:
        rows = dispatch_p.bind(*operands, spec=spec, has_weights=has_weights, quantize="none")
    else:
        rows = _dispatch_quantized(spec, has_weights, quantize, operands)
    return unflatten_rows(treedef, rows, has_weights)


def check_payload(
    spec: HandleSpec,
    topk_idx: jax.Array,
    x: Any,
    topk_weights: jax.Array | None,
    quantize: str | None,
) -> tuple[list[jax.Array], Any]:
    """Checks the payload of a dispatch of topk_idx's tokens.

    Returns:
      The leaves of `x` and, unless they are None, the weights as the last one; the treedef of `x`.
    """
    num_tokens = topk_idx.shape[0]
    leaves, treedef = jax.tree.flatten(x)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    for leaf in leaves:
        common.check_whole_bytes("x", leaf)
        if leaf.ndim < 1 or leaf.shape[0] != num_tokens:
            raise ValueError(
                f"every leaf of x must have shape [T={num_tokens}, ...], as topk_idx has, got "
                f"{leaf.shape}"
            )
    if quantize is not None:
        quantized.check(quantize, leaves)
    check_row_bytes("x", leaves, spec, quantize or "none")
    if topk_weights is not None:
        topk_weights = jnp.asarray(topk_weights)
        if topk_weights.shape != topk_idx.shape:
            raise ValueError(
                f"topk_weights must have shape [T, K] = {topk_idx.shape}, got {topk_weights.shape}"
            )
        if not jnp.issubdtype(topk_weights.dtype, jnp.floating):
            raise TypeError(f"topk_weights must be floats, got {topk_weights.dtype}")
        leaves.append(topk_weights)
    return leaves, treedef


def unflatten_rows(treedef, rows, has_weights):
    """The rows in the tree of x, and the row weights, which are the last of `rows`, or None."""
    rows = list(rows)
    row_weights = rows.pop() if has_weights else None
    return jax.tree.unflatten(treedef, rows), row_weights


def check_row_bytes(name, leaves, spec, quantize):
    parts = [part for leaf in leaves for part in quantized.row_parts(leaf, quantize)]
    total = sum(common.row_bytes(shape, dtype) for shape, dtype in parts)
    common.check_row_bytes(name, total, spec.group)


@dispatch_p.def_abstract_eval
def _abstract_eval(*avals, spec, has_weights, quantize):
    return row_avals(avals[common.NUM_ROUTING :], spec, has_weights, quantize)


def row_avals(payload, spec, has_weights, quantize):
    """The abstract values of a payload's rows, scales and row weights."""
    leaves = list(payload)
    weights = leaves.pop() if has_weights else None
    results = [
        common.result_aval(leaf, spec.row_dims + shape, dtype)
        for leaf in leaves
        for shape, dtype in quantized.row_parts(leaf, quantize)
    ]
    if has_weights:
        results.append(common.result_aval(weights, spec.value_dims, weights.dtype))
    return results


def _jvp(primals, tangents, *, spec, has_weights, quantize):
    assert quantize == "none"  # else it is inside _dispatch_quantized
    results = dispatch_p.bind(*primals, spec=spec, has_weights=has_weights, quantize=quantize)
    tangents_out = [common.zero_tangent(x) for x in results]
    payload = tangents[common.NUM_ROUTING :]
    for i, tangent in _move_tangents(primals[: common.NUM_ROUTING], payload, spec, has_weights):
        tangents_out[i] = tangent
    return results, tangents_out


def _move_tangents(routing, tangents, spec, has_weights):
    """(i, tangent of the rows) for every operand i of the payload that has a tangent."""
    kept, moving = common.pick_nonzero(tangents)
    if not kept:
        return []
    moved = dispatch_p.bind(
        *routing,
        *moving,
        spec=spec,
        has_weights=has_weights and kept[-1] == len(tangents) - 1,
        quantize="none",
    )
    return list(zip(kept, moved))


def _transpose(cotangents, *operands, spec, has_weights, quantize):
    from jax_ep.primitives.combine import combine_p

    assert quantize == "none"
    kept, moving = common.pick_nonzero(cotangents)
    result = [None] * len(operands)
    if kept:
        returns_weights = has_weights and kept[-1] == len(cotangents) - 1
        moved = combine_p.bind(
            *operands[: common.NUM_ROUTING],
            *moving,
            spec=spec,
            values="returned" if returns_weights else "none",
            low_latency=False,
        )
        for i, cotangent in zip(kept, moved):
            if ad.is_undefined_primal(operands[common.NUM_ROUTING + i]):
                result[common.NUM_ROUTING + i] = cotangent
    return result


# The derivative of a cast would be zero almost everywhere; it counts as the identity. So the
# tangents of all operands move unquantised, in one dispatch, and leave by `straight_through`.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _dispatch_quantized(spec, has_weights, quantize, operands):
    """The rows of every leaf, a Quantized where it is cast, then the row weights."""
    results = dispatch_p.bind(*operands, spec=spec, has_weights=has_weights, quantize=quantize)
    return join_scales(results, operands[common.NUM_ROUTING :], has_weights, quantize)


def join_scales(results, payload, has_weights, quantize):
    """The results for a payload, with values and scales of a leaf that is cast in a Quantized."""
    results = iter(results)
    rows = []
    for leaf in payload[: len(payload) - has_weights]:
        row = next(results)
        if quantized.is_cast(leaf, quantize):
            zeros = varying.vary_like(jnp.zeros(row.shape, leaf.dtype), row)
            row = quantized.Quantized(row, next(results), zeros)
        rows.append(row)
    return [*rows, *results]


@functools.partial(_dispatch_quantized.defjvp, symbolic_zeros=True)
def _dispatch_quantized_jvp(spec, has_weights, quantize, primals, tangents):
    (operands,), (tangents,) = primals, tangents
    rows = _dispatch_quantized(spec, has_weights, quantize, operands)
    routing, payload = operands[: common.NUM_ROUTING], tangents[common.NUM_ROUTING :]
    return rows, move_tangents_straight_through(rows, routing, payload, spec, has_weights)


def move_tangents_straight_through(rows, routing, tangents, spec, has_weights):
    """The tangents of `rows`, as join_scales gives them, from those of the payload."""
    # Tangents, and their cotangents, are not cast. They must have room as well.
    _, moving = common.pick_nonzero(tangents[: len(tangents) - has_weights])
    check_row_bytes("the derivative of x", moving, spec, "none")
    tangents_out = jax.tree.map(SymbolicZero.from_primal_value, rows)
    for i, tangent in _move_tangents(routing, tangents, spec, has_weights):
        if isinstance(rows[i], quantized.Quantized):
            tangents_out[i] = dataclasses.replace(tangents_out[i], straight_through=tangent)
        else:
            tangents_out[i] = tangent
    return tangents_out


ad.primitive_jvps[dispatch_p] = _jvp
ad.primitive_transposes[dispatch_p] = _transpose
common.register_batching(dispatch_p)
lowering.register(dispatch_p, "dispatch", reference.dispatch)
