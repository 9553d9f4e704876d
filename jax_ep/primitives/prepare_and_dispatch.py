"""`prepare_and_dispatch`: the two in one, and for few tokens in one kernel."""

import functools
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive

from jax_ep import low_latency
from jax_ep.group import Group
from jax_ep.handle import Handle, HandleSpec
from jax_ep.primitives import common, lowering
from jax_ep.primitives.dispatch import (
    check_payload,
    dispatch,
    dispatch_p,
    join_scales,
    move_tangents_straight_through,
    row_avals,
    unflatten_rows,
)
from jax_ep.primitives.prepare import check_routing, plan_avals, prepare, prepare_p

# Operands: topk_idx, then the payload as of dispatch_p. Results: the handle's arrays but topk_idx
# and row_topk_idx (not for layout rank), in their order, then those of dispatch_p. Only bound
# inside `bind`, which has its derivatives.
prepare_and_dispatch_p = Primitive("jax_ep_prepare_and_dispatch")
prepare_and_dispatch_p.multiple_results = True

NUM_PLAN = 7


def prepare_and_dispatch(
    group: Group,
    x: Any,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None = None,
    *,
    layout: str = "expert",
    capacity: int | None = None,
    expert_alignment: int = 1,
    quantize: str | None = None,
    mode: str | None = None,
) -> tuple[Any, jax.Array | None, Handle]:
    """`prepare` and `dispatch` in one; the same bits as one after the other.

    For few tokens, as in decoding, it is one kernel on the low-latency path
    (docs/low_latency.md), as DeepEP's `low_latency_dispatch`. Derivatives as of `dispatch`.
    Collective over the group; call it inside `shard_map`.

    Args:
      group: the EP group, with K = `group.num_topk` and E = `group.num_experts`.
      x: a pytree of arrays [T, ...], as for `dispatch`.
      topk_idx: integers [T, K] in [0, E), or -1, as for `prepare`.
      topk_weights: floats [T, K], or None.
      layout, capacity, expert_alignment: as for `prepare`.
      quantize: as for `dispatch`.
      mode: "ll" for the low-latency path, which is for the layouts "expert" and "padded" and for
        at most 8 leaves; "ht" for `prepare` and `dispatch`; or None for the faster one.

    Returns:
      (rows, row_weights, handle): the first two as of `dispatch`, the handle as of `prepare`.

    Raises:
      ValueError, TypeError: while tracing; an argument is wrong, or mode "ll" is not possible.
      jax.errors.JaxRuntimeError: at run time, as from `prepare` and `dispatch`.
    """
    spec, topk_idx = check_routing(
        "prepare_and_dispatch",
        group,
        topk_idx,
        layout=layout,
        capacity=capacity,
        expert_alignment=expert_alignment,
    )
    leaves, treedef = check_payload(spec, topk_idx, x, topk_weights, quantize)
    has_weights = topk_weights is not None
    moved = leaves[: len(leaves) - has_weights]
    if not low_latency.choose("prepare_and_dispatch", mode, group, layout, moved):
        handle = prepare(
            group, topk_idx, layout=layout, capacity=capacity, expert_alignment=expert_alignment
        )
        return *dispatch(x, handle, topk_weights, quantize=quantize), handle

    topk_idx, *leaves = common.vary(spec, [topk_idx, *leaves])
    plan, rows = _bind(spec, has_weights, quantize or "none", [topk_idx, *leaves])
    return *unflatten_rows(treedef, rows, has_weights), handle_of(spec, topk_idx, plan)


def handle_of(spec: HandleSpec, topk_idx: jax.Array, plan: list[jax.Array]) -> Handle:
    """The handle of the first NUM_PLAN results."""
    slots, row_source, *others = plan
    return Handle(topk_idx, slots, row_source, None, *others, spec=spec)


@prepare_and_dispatch_p.def_abstract_eval
def _abstract_eval(topk_idx, *payload, spec, has_weights, quantize):
    return result_avals(topk_idx, payload, spec, has_weights, quantize)


def result_avals(topk_idx, payload, spec, has_weights, quantize):
    """The abstract values of the plan, the rows, scales and row weights."""
    slots, row_source, _, *others = plan_avals(topk_idx, spec=spec)
    return [slots, row_source, *others, *row_avals(payload, spec, has_weights, quantize)]


def one_after_the_other(topk_idx, *payload, spec, has_weights, quantize):
    """The same results by the two operations, for backends without such a kernel."""
    slots, row_source, row_topk_idx, recv_slots, *counts = prepare_p.bind(topk_idx, spec=spec)
    routing = topk_idx, slots, row_source, row_topk_idx, recv_slots
    rows = dispatch_p.bind(
        *routing, *payload, spec=spec, has_weights=has_weights, quantize=quantize
    )
    return [slots, row_source, recv_slots, *counts, *rows]


# Tangents of the payload move by the ordinary dispatch, with the handle that was made.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _bind(spec, has_weights, quantize, operands):
    """The plan, and the rows with the row weights, a Quantized for a leaf that is cast."""
    results = prepare_and_dispatch_p.bind(
        *operands, spec=spec, has_weights=has_weights, quantize=quantize
    )
    rows = join_scales(results[NUM_PLAN:], operands[1:], has_weights, quantize)
    return results[:NUM_PLAN], rows


@functools.partial(_bind.defjvp, symbolic_zeros=True)
def _jvp(spec, has_weights, quantize, primals, tangents):
    (operands,), (tangents,) = primals, tangents
    plan, rows = _bind(spec, has_weights, quantize, operands)
    routing = common.vary(spec, common.routing_operands(handle_of(spec, operands[0], plan)))
    rows_out = move_tangents_straight_through(rows, routing, tangents[1:], spec, has_weights)
    return (plan, rows), (jax.tree.map(SymbolicZero.from_primal_value, plan), rows_out)


common.register_batching(prepare_and_dispatch_p)
lowering.register(
    prepare_and_dispatch_p, "low_latency_dispatch", one_after_the_other, platforms=("cuda",)
)
