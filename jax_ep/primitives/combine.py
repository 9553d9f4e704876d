"""`combine`: brings the experts' rows back to their tokens and sums them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_ep import low_latency, reference
from jax_ep.handle import Handle
from jax_ep.primitives import common, lowering
from jax_ep.primitives.dispatch import dispatch_p

# Operands: the routing, then the rows of every leaf and, unless `values` is "none", one value a
# pair, arranged as row_weights are. Results: the leaves [T, ...] and, with "returned", the values
# [T, K] moved back to their pairs (the transpose of dispatch's weights). With "weights" the values
# multiply the rows; they are float32, or float64. `low_latency` chooses between two kernels that
# give the same bits; those who bind it for a derivative take the ordinary one.
combine_p = Primitive("jax_ep_combine")
combine_p.multiple_results = True

SUMMED_DTYPES = tuple(
    np.dtype(dtype)
    for dtype in (
        jnp.float32,
        jnp.bfloat16,
        jnp.float16,
        jnp.float64,
        jnp.float8_e4m3fn,
        jnp.float8_e5m2,
    )
)


def combine(
    rows: Any, handle: Handle, row_weights: jax.Array | None = None, *, mode: str | None = None
) -> Any:
    """Sums, for each token, the rows that `handle` gives it.

    Per rank in k order in float32 (float64 for float64 rows), rounded to the rows' dtype; then
    over the ranks in order in float32, rounded once more: equal bit for bit on all backends. With
    row_weights a row enters as `fma(weight, row, partial)`. Dropped and unrouted pairs add zero.

    Linear in `rows`, bilinear with `row_weights`; the transpose is `dispatch`. Collective over the
    group; call it inside `shard_map`.

    Args:
      rows: a pytree of float arrays (float32, bfloat16, float16, float64, float8_e4m3fn,
        float8_e5m2), leaves [capacity, ...], or [E_local, C, ...] in layout "padded". A row's
        bytes in all leaves are at most `group.max_row_bytes`.
      handle: of `prepare`.
      row_weights: floats [capacity] or [E_local, C], of `dispatch`, or None for the plain sum.
        Not for layout "rank", whose rows belong to several pairs.
      mode: "ll" for the low-latency path (docs/low_latency.md), "ht" for the ordinary one, or None
        for the faster one. The results are the same bits.

    Returns:
      The pytree of `rows`, leaves [T, ...], in the rows' dtypes.

    Raises:
      ValueError, TypeError: while tracing; an argument is wrong.
      jax.errors.JaxRuntimeError: at run time: a rank did not come within `group.timeout_s`.
    """
    leaves, treedef, values = check_rows("combine", rows, handle, row_weights)
    spec = handle.spec
    summed = leaves[: len(leaves) - (values == "weights")]
    ll = low_latency.choose("combine", mode, spec.group, spec.layout, summed, sums=True)
    operands = common.vary(spec, [*common.routing_operands(handle), *leaves])
    results = combine_p.bind(*operands, spec=spec, values=values, low_latency=ll)
    return jax.tree.unflatten(treedef, results)


def check_rows(
    op: str, rows: Any, handle: Handle, row_weights: jax.Array | None
) -> tuple[list[jax.Array], Any, str]:
    """Checks the arguments of combine for `op`.

    Returns:
      The leaves of `rows` and, unless they are None, the weights as the last one; the treedef of
      `rows`; what the last operand is, "weights" or "none".
    """
    common.check_handle(handle)
    spec = handle.spec
    spec.group.check_context(op)
    leaves, treedef = jax.tree.flatten(rows)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    row_bytes = 0
    for leaf in leaves:
        if leaf.dtype not in SUMMED_DTYPES:
            raise TypeError(
                f"combine sums rows of dtype {', '.join(d.name for d in SUMMED_DTYPES)}, got "
                f"{leaf.dtype} of shape {leaf.shape}"
            )
        if leaf.shape[: len(spec.row_dims)] != spec.row_dims:
            raise ValueError(
                f"every leaf of rows must have shape [{', '.join(map(str, spec.row_dims))}, ...], "
                f"as the handle's layout {spec.layout!r} has, got {leaf.shape}"
            )
        row_bytes += common.row_bytes(leaf.shape[len(spec.row_dims) :], leaf.dtype)
    common.check_row_bytes("rows", row_bytes, spec.group)
    values = "none"
    if row_weights is not None:
        if spec.layout == "rank":
            raise ValueError("row_weights is for the layouts expert and padded, not for rank")
        row_weights = jnp.asarray(row_weights)
        if row_weights.shape != spec.row_dims:
            raise ValueError(
                f"row_weights must have shape {spec.row_dims}, got {row_weights.shape}"
            )
        if not jnp.issubdtype(row_weights.dtype, jnp.floating):
            raise TypeError(f"row_weights must be floats, got {row_weights.dtype}")
        wide = row_weights.dtype == np.float64
        leaves.append(row_weights if wide else row_weights.astype(jnp.float32))
        values = "weights"
    return leaves, treedef, values


@combine_p.def_abstract_eval
def _abstract_eval(*avals, spec, values, low_latency):
    del low_latency
    return sum_avals(*avals, spec=spec, values=values)


def sum_avals(*avals, spec, values):
    """The abstract values of the results."""
    topk_idx, leaves = avals[0], list(avals[common.NUM_ROUTING :])
    pair_values = leaves.pop() if values != "none" else None
    row_rank = len(spec.row_dims)
    results = [
        common.result_aval(leaf, topk_idx.shape[:1] + leaf.shape[row_rank:], leaf.dtype)
        for leaf in leaves
    ]
    if values == "returned":
        results.append(common.result_aval(pair_values, topk_idx.shape, pair_values.dtype))
    return results


def _jvp(primals, tangents, *, spec, values, low_latency):
    results = combine_p.bind(*primals, spec=spec, values=values, low_latency=low_latency)
    routing, operands = primals[: common.NUM_ROUTING], primals[common.NUM_ROUTING :]
    tangents = list(tangents[common.NUM_ROUTING :])
    tangents_out = [common.zero_tangent(x) for x in results]

    def add(indices, *moving, values):
        moved = combine_p.bind(*routing, *moving, spec=spec, values=values, low_latency=False)
        for i, tangent in zip(indices, moved):
            tangents_out[i] = ad.add_tangents(tangents_out[i], tangent)

    if values != "weights":
        kept, moving = common.pick_nonzero(tangents)
        if kept:
            returned = values == "returned" and kept[-1] == len(operands) - 1
            add(kept, *moving, values="returned" if returned else "none")
        return results, tangents_out

    *rows, weights = operands
    weights_tangent = tangents.pop()
    kept, moving = common.pick_nonzero(tangents)
    if kept:
        add(kept, *moving, weights, values="weights")
    if not common.is_zero(weights_tangent):
        add(range(len(rows)), *rows, weights_tangent, values="weights")
    return results, tangents_out


def _transpose(cotangents, *operands, spec, values, low_latency):
    del low_latency
    routing, payload = operands[: common.NUM_ROUTING], operands[common.NUM_ROUTING :]
    kept, moving = common.pick_nonzero(cotangents)
    if not kept:
        return [None] * len(operands)
    has_weights = values == "returned" and kept[-1] == len(cotangents) - 1
    moved = dispatch_p.bind(
        *routing, *moving, spec=spec, has_weights=has_weights, quantize="none"
    )

    result = [None] * len(payload)
    if values == "weights":
        *rows, weights = payload
        if ad.is_undefined_primal(weights):
            result[-1] = _weights_cotangent([rows[i] for i in kept], moved, weights.aval, routing)
        else:
            moved = [_scale(cotangent, weights, routing) for cotangent in moved]
    for i, cotangent in zip(kept, moved):
        if ad.is_undefined_primal(payload[i]):
            result[i] = cotangent
    return [None] * common.NUM_ROUTING + result


# Rows without a source may hold anything, NaN included, and so may their weights; they must not
# reach a cotangent. Masking one value a row is enough, since dispatched rows are zero there.


def _scale(cotangent, weights, routing):
    """weight * cotangent of every row."""
    wide = reference.accumulator(cotangent.dtype)
    weights = jnp.where(routing[2] >= 0, weights, 0).astype(wide)
    weights = weights.reshape(weights.shape + (1,) * (cotangent.ndim - weights.ndim))
    return (cotangent.astype(wide) * weights).astype(cotangent.dtype)


def _weights_cotangent(rows, cotangents, aval, routing):
    """The inner product of every row with its cotangent, over all leaves."""
    row_source = routing[2]
    total = jnp.zeros(row_source.shape, aval.dtype)
    for row, cotangent in zip(rows, cotangents):
        product = row.astype(aval.dtype) * cotangent.astype(aval.dtype)
        total += product.sum(axis=tuple(range(row_source.ndim, row.ndim)))
    return jnp.where(row_source >= 0, total, 0)


ad.primitive_jvps[combine_p] = _jvp
ad.primitive_transposes[combine_p] = _transpose
common.register_batching(combine_p)
lowering.register(combine_p, "combine", reference.combine)
