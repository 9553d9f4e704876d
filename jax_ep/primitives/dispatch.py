"""`dispatch`: moves tokens to their experts."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_ep import reference
from jax_ep.handle import Handle
from jax_ep.primitives import common, lowering

# Operands: the routing, then the payload's leaves [T, ...] and, with has_weights, the top-k
# weights [T, K]. Results: the rows of every leaf, then the row weights.
dispatch_p = Primitive("jax_ep_dispatch")
dispatch_p.multiple_results = True


def dispatch(
    x: Any, handle: Handle, topk_weights: jax.Array | None = None
) -> tuple[Any, jax.Array | None]:
    """Moves each token to the rows that `handle` gives it, all leaves in one transfer.

    Linear in `x` and in `topk_weights`; the transpose is `combine`. Collective over the group;
    call it inside `shard_map`.

    Args:
      x: a pytree of arrays [T, ...] of any whole-byte dtype: activations, `(fp8, scales)`, ids.
        A token's bytes in all leaves are at most `group.max_row_bytes`.
      handle: of `prepare`, for the same T tokens.
      topk_weights: floats [T, K], or None.

    Returns:
      rows: the pytree of `x`, leaves [capacity, ...], or [E_local, C, ...] in layout "padded".
        Rows without a source are zero.
      row_weights: the weight of each row's pair, [capacity] or [E_local, C]; in layout "rank"
        [capacity, K], zero where the k-th expert is not on this rank. None without topk_weights.

    Raises:
      ValueError, TypeError: while tracing; an argument is wrong.
      jax.errors.JaxRuntimeError: at run time: a rank did not come within `group.timeout_s`.
    """
    common.check_handle(handle)
    spec = handle.spec
    group = spec.group
    group.check_context("dispatch")
    num_tokens = handle.topk_idx.shape[0]
    leaves, treedef = jax.tree.flatten(x)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    row_bytes = 0
    for leaf in leaves:
        common.check_whole_bytes("x", leaf)
        if leaf.ndim < 1 or leaf.shape[0] != num_tokens:
            raise ValueError(
                f"every leaf of x must have shape [T={num_tokens}, ...], as the handle's "
                f"topk_idx has, got {leaf.shape}"
            )
        row_bytes += common.row_bytes(leaf, 1)
    common.check_row_bytes("x", row_bytes, group)
    if topk_weights is not None:
        topk_weights = jnp.asarray(topk_weights)
        if topk_weights.shape != handle.topk_idx.shape:
            raise ValueError(
                f"topk_weights must have shape [T, K] = {handle.topk_idx.shape}, got "
                f"{topk_weights.shape}"
            )
        if not jnp.issubdtype(topk_weights.dtype, jnp.floating):
            raise TypeError(f"topk_weights must be floats, got {topk_weights.dtype}")
        leaves.append(topk_weights)

    has_weights = topk_weights is not None
    operands = common.vary(spec, [*common.routing_operands(handle), *leaves])
    results = dispatch_p.bind(*operands, spec=spec, has_weights=has_weights)
    row_weights = results.pop() if has_weights else None
    return jax.tree.unflatten(treedef, results), row_weights


@dispatch_p.def_abstract_eval
def _abstract_eval(*avals, spec, has_weights):
    leaves = avals[common.NUM_ROUTING :]
    results = [
        common.result_aval(leaf, spec.row_dims + leaf.shape[1:], leaf.dtype) for leaf in leaves
    ]
    if has_weights:
        results[-1] = common.result_aval(leaves[-1], spec.value_dims, leaves[-1].dtype)
    return results


def _jvp(primals, tangents, *, spec, has_weights):
    results = dispatch_p.bind(*primals, spec=spec, has_weights=has_weights)
    kept, moving = common.pick_nonzero(tangents[common.NUM_ROUTING :])
    tangents_out = [common.zero_tangent(x) for x in results]
    if kept:
        moved = dispatch_p.bind(
            *primals[: common.NUM_ROUTING],
            *moving,
            spec=spec,
            has_weights=has_weights and kept[-1] == len(results) - 1,
        )
        for i, tangent in zip(kept, moved):
            tangents_out[i] = tangent
    return results, tangents_out


def _transpose(cotangents, *operands, spec, has_weights):
    from jax_ep.primitives.combine import combine_p

    kept, moving = common.pick_nonzero(cotangents)
    result = [None] * len(operands)
    if kept:
        returns_weights = has_weights and kept[-1] == len(cotangents) - 1
        moved = combine_p.bind(
            *operands[: common.NUM_ROUTING],
            *moving,
            spec=spec,
            values="returned" if returns_weights else "none",
        )
        for i, cotangent in zip(kept, moved):
            if ad.is_undefined_primal(operands[common.NUM_ROUTING + i]):
                result[common.NUM_ROUTING + i] = cotangent
    return result


ad.primitive_jvps[dispatch_p] = _jvp
ad.primitive_transposes[dispatch_p] = _transpose
common.register_batching(dispatch_p)
lowering.register(dispatch_p, "dispatch", reference.dispatch)
