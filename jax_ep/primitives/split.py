"""`dispatch` and `combine` in two phases: the start pushes and returns, the done waits and unpacks.

Between the two the program computes with all of the device. See docs/low_latency.md.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_ep import low_latency, varying
from jax_ep.group import Group
from jax_ep.handle import Handle, HandleSpec
from jax_ep.primitives import common, lowering
from jax_ep.primitives import prepare_and_dispatch as fused
from jax_ep.primitives.combine import check_rows, combine_p, sum_avals
from jax_ep.primitives.dispatch import check_payload, join_scales, unflatten_rows
from jax_ep.primitives.prepare import check_routing

# Operands of a start: those of the fused operation. Result: the ticket. Operands of a done: the
# ticket, those of the start, and `num_after` arrays that nobody reads. Results: those of the fused
# operation.
dispatch_start_p = Primitive("jax_ep_dispatch_start")
dispatch_done_p = Primitive("jax_ep_dispatch_done")
combine_start_p = Primitive("jax_ep_combine_start")
combine_done_p = Primitive("jax_ep_combine_done")
_NO_TICKET = np.uint32(0xFFFFFFFE)  # no start returns it
for _primitive in (dispatch_start_p, dispatch_done_p, combine_start_p, combine_done_p):
    _primitive.multiple_results = True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchPending:
    """A dispatch that has been started. A pytree, for one `dispatch_done`.

    Attributes:
      ticket: uint32 [2], the buffer, and the number of the operation that the start was.
      operands: topk_idx, the leaves and, with has_weights, the weights.
      spec, treedef, has_weights, quantize: static.
    """

    ticket: jax.Array
    operands: tuple[jax.Array, ...]
    spec: HandleSpec = dataclasses.field(metadata={"static": True})
    treedef: Any = dataclasses.field(metadata={"static": True})
    has_weights: bool = dataclasses.field(metadata={"static": True})
    quantize: str = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CombinePending:
    """A combine that has been started. A pytree, for one `combine_done`.

    Attributes:
      ticket: uint32 [2], the buffer, and the number of the operation that the start was.
      operands: the routing, the leaves and, with values "weights", the weights.
      spec, treedef, values: static.
    """

    ticket: jax.Array
    operands: tuple[jax.Array, ...]
    spec: HandleSpec = dataclasses.field(metadata={"static": True})
    treedef: Any = dataclasses.field(metadata={"static": True})
    values: str = dataclasses.field(metadata={"static": True})


def dispatch_start(
    group: Group,
    x: Any,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None = None,
    *,
    layout: str = "expert",
    capacity: int | None = None,
    expert_alignment: int = 1,
    quantize: str | None = None,
) -> DispatchPending:
    """Sends the tokens; `dispatch_done` receives them.

    Together they are `prepare_and_dispatch(..., mode="ll")`, with the same bits, and without its
    derivatives. Two operations of a group, dispatches and combines together, are in flight at
    once; a start beyond that leaves its work to its done. Every start needs its done. Use `after`
    and `dispatch_done(..., after=)` to have XLA compute between the two. Backends other than cuda
    do all the work in the done.

    Collective over the group; call it inside `shard_map`.

    Args:
      group, x, topk_idx, topk_weights, layout, capacity, expert_alignment, quantize: as for
        `prepare_and_dispatch`. `layout` is "expert" or "padded", and x has at most 8 leaves.

    Returns:
      What `dispatch_done` takes.

    Raises:
      ValueError, TypeError: while tracing; an argument is wrong, or the group has no
        `low_latency`.
      NotImplementedError: while tracing; it is differentiated, or batched by vmap.
      jax.errors.JaxRuntimeError: at run time, as from `prepare` and `dispatch`.
    """
    spec, topk_idx = check_routing(
        "dispatch_start",
        group,
        topk_idx,
        layout=layout,
        capacity=capacity,
        expert_alignment=expert_alignment,
    )
    leaves, treedef = check_payload(spec, topk_idx, x, topk_weights, quantize)
    has_weights = topk_weights is not None
    low_latency.check("dispatch_start", group, layout, leaves[: len(leaves) - has_weights])
    operands = common.vary(spec, [topk_idx, *leaves])
    quantize = quantize or "none"
    (ticket,) = dispatch_start_p.bind(
        *operands, spec=spec, has_weights=has_weights, quantize=quantize
    )
    return DispatchPending(ticket, tuple(operands), spec, treedef, has_weights, quantize)


def dispatch_done(
    pending: DispatchPending, *, after: Any = None
) -> tuple[Any, jax.Array | None, Handle]:
    """Receives the tokens that `dispatch_start` sent.

    Args:
      pending: of `dispatch_start`, in the same run of the program. To be used once.
      after: a pytree of arrays, or another pending operation. The done waits for tokens only after
        these have been computed, or started. Costs nothing.

    Returns:
      (rows, row_weights, handle), as `prepare_and_dispatch`.

    Raises:
      TypeError, ValueError: while tracing; `pending` is something else, or an array of `after` is
        of no whole-byte dtype.
      jax.errors.JaxRuntimeError: at run time, as from `prepare` and `dispatch`; with backend
        "cuda" also where `pending` is not in flight (it was used before, or is of an earlier run).
    """
    _check_pending(pending, DispatchPending, "dispatch_done", "dispatch_start")
    spec, has_weights, quantize = pending.spec, pending.has_weights, pending.quantize
    operands, num_after = _done_operands(pending, after)
    results = dispatch_done_p.bind(
        *operands, spec=spec, has_weights=has_weights, quantize=quantize, num_after=num_after
    )
    topk_idx, *payload = pending.operands
    rows = join_scales(results[fused.NUM_PLAN :], payload, has_weights, quantize)
    handle = fused.handle_of(spec, topk_idx, results[: fused.NUM_PLAN])
    return *unflatten_rows(pending.treedef, rows, has_weights), handle


def combine_start(
    rows: Any, handle: Handle, row_weights: jax.Array | None = None
) -> CombinePending:
    """Sends the partial sums of the experts' rows; `combine_done` receives and sums them.

    Together they are `combine(..., mode="ll")`, with the same bits, and without its derivatives.
    What `dispatch_start` says of operations in flight and of `after` holds here too.

    Collective over the group; call it inside `shard_map`.

    Args:
      rows, handle, row_weights: as for `combine`. The layout is "expert" or "padded", and rows has
        at most 8 leaves, all of one dtype.

    Returns:
      What `combine_done` takes.

    Raises:
      ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError: as `dispatch_start`.
    """
    leaves, treedef, values = check_rows("combine_start", rows, handle, row_weights)
    spec = handle.spec
    summed = leaves[: len(leaves) - (values == "weights")]
    low_latency.check("combine_start", spec.group, spec.layout, summed, sums=True)
    operands = common.vary(spec, [*common.routing_operands(handle), *leaves])
    (ticket,) = combine_start_p.bind(*operands, spec=spec, values=values)
    return CombinePending(ticket, tuple(operands), spec, treedef, values)


def combine_done(pending: CombinePending, *, after: Any = None) -> Any:
    """Receives the partial sums that `combine_start` sent, and sums them.

    Args:
      pending: of `combine_start`, in the same run of the program. To be used once.
      after: as for `dispatch_done`.

    Returns:
      The sums, as `combine`.

    Raises:
      TypeError, ValueError, jax.errors.JaxRuntimeError: as `dispatch_done`.
    """
    _check_pending(pending, CombinePending, "combine_done", "combine_start")
    operands, num_after = _done_operands(pending, after)
    results = combine_done_p.bind(
        *operands, spec=pending.spec, values=pending.values, num_after=num_after
    )
    return jax.tree.unflatten(pending.treedef, results)


def after(pending: DispatchPending | CombinePending, values: Any) -> Any:
    """`values`, for what is to be computed after the start of `pending`.

    XLA orders by dependences alone, and would put a start right before its done. What uses the
    arrays that this returns depends on the start. Takes no kernel of its own where XLA fuses it
    with what makes or what uses the arrays.

    Args:
      pending: of `dispatch_start` or `combine_start`.
      values: a pytree of arrays, of which those that differ between ranks already are best.

    Returns:
      `values`, the same bits, varying over the group's axes.

    Raises:
      TypeError: `pending` is something else.
    """
    if not isinstance(pending, (DispatchPending, CombinePending)):
        raise TypeError(
            f"pending must be of dispatch_start or combine_start, got {type(pending).__name__}"
        )
    # Always true, which XLA cannot know.
    started = pending.ticket[0] != _NO_TICKET
    return jax.tree.map(lambda x: jnp.where(started, x, jnp.zeros_like(x)), values)


def _check_pending(pending, kind, done, start):
    if not isinstance(pending, kind):
        raise TypeError(f"{done} takes what {start} returns, got {type(pending).__name__}")
    pending.spec.group.check_context(done)


def _done_operands(pending, after):
    """The operands of a done, and how many of them are there for the order alone."""
    after = jax.tree.leaves(after)
    for leaf in after:
        common.check_whole_bytes("after", jnp.asarray(leaf))
    operands = common.vary(pending.spec, [pending.ticket, *pending.operands, *after])
    return operands, np.int32(len(after))


def _ticket_aval(topk_idx, *operands, **params):
    del operands, params
    return [common.result_aval(topk_idx, (2,), np.uint32)]


dispatch_start_p.def_abstract_eval(_ticket_aval)
combine_start_p.def_abstract_eval(_ticket_aval)


@dispatch_done_p.def_abstract_eval
def _dispatch_avals(ticket, topk_idx, *payload, num_after, **params):
    del ticket
    return fused.result_avals(topk_idx, payload[: len(payload) - num_after], **params)


@combine_done_p.def_abstract_eval
def _combine_avals(ticket, *operands, num_after, **params):
    del ticket
    return sum_avals(*operands[: len(operands) - num_after], **params)


# Where there are no such kernels, a start does nothing and a done everything.


def _no_ticket(topk_idx, *operands, **params):
    del operands, params
    return [varying.vary_like(jnp.zeros(2, jnp.uint32), topk_idx)]


def _dispatch_all(ticket, *operands, num_after, **params):
    del ticket
    return fused.one_after_the_other(*operands[: len(operands) - num_after], **params)


def _combine_all(ticket, *operands, num_after, **params):
    del ticket
    return combine_p.bind(*operands[: len(operands) - num_after], low_latency=False, **params)


def _register(primitive, op, composite, instead):
    """Lowering rules, and errors in place of a derivative and of batching."""
    name = primitive.name.removeprefix("jax_ep_")

    def refuse_derivative(*args, **params):
        del args, params
        raise NotImplementedError(f"{name} is for inference and has no derivative; use {instead}")

    def refuse_batch(*args, **params):
        del args, params
        raise NotImplementedError(
            f"{name} is not for vmap, which would run all starts before all dones; use "
            f"{instead}"
        )

    ad.primitive_jvps[primitive] = refuse_derivative
    batching.primitive_batchers[primitive] = refuse_batch
    lowering.register(
        primitive, f"low_latency_{op}", composite, platforms=("cuda",), has_side_effect=True
    )


_register(dispatch_start_p, "dispatch_start", _no_ticket, "prepare_and_dispatch")
_register(dispatch_done_p, "dispatch_done", _dispatch_all, "prepare_and_dispatch")
_register(combine_start_p, "combine_start", _no_ticket, "combine")
_register(combine_done_p, "combine_done", _combine_all, "combine")
