"""`prepare`: exchanges the counts and fixes the row of every (token, k) pair."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_ep import reference
from jax_ep.group import Group, check_int, check_layout
from jax_ep.handle import Handle, HandleSpec
from jax_ep.primitives import common, lowering

prepare_p = Primitive("jax_ep_prepare")
prepare_p.multiple_results = True


def prepare(
    group: Group,
    topk_idx: jax.Array,
    *,
    layout: str = "expert",
    capacity: int | None = None,
    expert_alignment: int = 1,
) -> Handle:
    """Fixes, deterministically, the row of every (token, k) pair on its expert's rank.

    Collective over the group; call it inside `shard_map`. docs/semantics.md gives the layouts.

    Args:
      group: the EP group, with K = `group.num_topk` and E = `group.num_experts`.
      topk_idx: integers [T, K] in [0, E), or -1 for "not routed"; T at most
        `group.max_tokens_per_rank`, and may be 0. A token may name an expert twice.
      layout: "expert" (rows grouped by local expert, for grouped GEMMs), "rank" (one row per
        token and rank, by source), or "padded" ([E_local, C], for batched GEMMs).
      capacity: rows per rank, or per local expert for "padded". Pairs beyond it are dropped and
        counted. None is the worst case, in which nothing is dropped.
      expert_alignment: in layout "expert", each expert's rows start at a multiple of it. The other
        layouts take no notice of it.

    Returns:
      The handle for `dispatch` and `combine`.

    Raises:
      ValueError, TypeError: while tracing; an argument is wrong.
      jax.errors.JaxRuntimeError: at run time, native backends: a topk_idx is outside [-1, E) (the
        xla backend takes it as -1), or a rank did not come within `group.timeout_s`.
    """
    spec, topk_idx = check_routing(
        "prepare",
        group,
        topk_idx,
        layout=layout,
        capacity=capacity,
        expert_alignment=expert_alignment,
    )
    (topk_idx,) = common.vary(spec, [topk_idx])
    slots, row_source, row_topk_idx, *others = prepare_p.bind(topk_idx, spec=spec)
    return Handle(
        topk_idx, slots, row_source, row_topk_idx if layout == "rank" else None, *others, spec=spec
    )


def check_routing(
    op: str,
    group: Group,
    topk_idx: jax.Array,
    *,
    layout: str,
    capacity: int | None,
    expert_alignment: int,
) -> tuple[HandleSpec, jax.Array]:
    """Checks the arguments of prepare for `op`; returns the spec, and topk_idx in int32."""
    if not isinstance(group, Group):
        raise TypeError(f"group must be a jax_ep.Group, got {group!r}")
    group.check_context(op)
    check_layout(layout)
    topk_idx = jnp.asarray(topk_idx)
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise TypeError(f"topk_idx must be integers, got {topk_idx.dtype}[{topk_idx.shape}]")
    if topk_idx.ndim != 2 or topk_idx.shape[1] != group.num_topk:
        raise ValueError(
            f"topk_idx must have shape [T, num_topk={group.num_topk}], got {topk_idx.shape}"
        )
    num_tokens = topk_idx.shape[0]
    if num_tokens > group.max_tokens_per_rank:
        raise ValueError(
            f"topk_idx has {num_tokens} tokens (shape {topk_idx.shape}), more than the group's "
            f"max_tokens_per_rank={group.max_tokens_per_rank}"
        )
    expert_alignment = check_int("expert_alignment", expert_alignment)
    if capacity is None:
        capacity = group.worst_case_capacity(
            num_tokens, layout=layout, expert_alignment=expert_alignment
        )
    capacity = check_int("capacity", capacity, minimum=0)
    spec = HandleSpec(group, layout, capacity, expert_alignment)
    if int(np.prod(spec.value_dims, dtype=object)) >= 2**31:
        raise ValueError(f"capacity={capacity} gives {spec.value_dims} rows, 2**31 or more")
    return spec, topk_idx.astype(jnp.int32)


@prepare_p.def_abstract_eval
def plan_avals(topk_idx, *, spec):
    """The abstract values of the results."""
    group = spec.group
    shapes = (
        topk_idx.shape,  # slots
        spec.row_dims,  # row_source
        spec.value_dims if spec.layout == "rank" else common.no_row_topk_idx(spec),  # row_topk_idx
        (group.num_ranks, group.max_tokens_per_rank, group.num_topk),  # recv_slots
        (group.num_local_experts,),  # group_sizes
        (group.num_local_experts,),  # expert_counts
        (),  # num_rows
        (),  # num_dropped
    )
    return [common.result_aval(topk_idx, shape, np.int32) for shape in shapes]


def _jvp(primals, tangents, *, spec):
    del tangents  # integers
    results = prepare_p.bind(*primals, spec=spec)
    return results, [common.zero_tangent(x) for x in results]


ad.primitive_jvps[prepare_p] = _jvp
common.register_batching(prepare_p)
lowering.register(prepare_p, "prepare", reference.prepare)
