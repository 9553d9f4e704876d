"""The handle: where every (token, k) pair of a batch goes, decided once by `prepare`."""

import dataclasses

import jax

from jax_ep.group import Group


@dataclasses.dataclass(frozen=True)
class HandleSpec:
    """What is static about a handle; equal on all ranks."""

    group: Group
    layout: str
    capacity: int
    expert_alignment: int

    @property
    def row_dims(self) -> tuple[int, ...]:
        """The leading dimensions of dispatched rows: (capacity,), or (E_local, C) if padded."""
        if self.layout == "padded":
            return (self.group.num_local_experts, self.capacity)
        return (self.capacity,)

    @property
    def value_dims(self) -> tuple[int, ...]:
        """The dimensions of row_weights: one a row, or K a row in layout rank."""
        return self.row_dims + ((self.group.num_topk,) if self.layout == "rank" else ())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """Where the rows of one routing are. A pytree of int32 arrays, per device.

    It can be used for any number of dispatches and combines, passes through jit, scan and
    checkpoint, and has no tangent.

    Attributes:
      topk_idx: [T, K], the routing that it was made for.
      slots: [T, K], the row of each pair on its expert's rank; -1 if unrouted or dropped. In layout
        padded, `local_expert * C + position`.
      row_source: [capacity], or [E_local, C] if padded: where each row comes from, -1 for none.
        `(source_rank * max_tokens_per_rank + t) * K + k`; in layout rank without `* K + k`.
      row_topk_idx: [capacity, K] in layout rank, local expert ids, -1 elsewhere; else None.
      recv_slots: [R, max_tokens_per_rank, K], the slot of every rank's pair whose expert is on this
        rank; -1 for all others. The receiver's side of `slots`.
      group_sizes: [E_local], rows of each local expert: aligned and clipped at capacity in layout
        expert, at most C in layout padded, kept pairs in layout rank.
      expert_counts: [E_local], pairs routed to each local expert, before dropping.
      num_rows: [], rows in use on this rank.
      num_dropped: [], pairs that this rank had no room for.
      spec: the static part: group, layout, capacity, expert_alignment.
    """

    topk_idx: jax.Array
    slots: jax.Array
    row_source: jax.Array
    row_topk_idx: jax.Array | None
    recv_slots: jax.Array
    group_sizes: jax.Array
    expert_counts: jax.Array
    num_rows: jax.Array
    num_dropped: jax.Array
    spec: HandleSpec = dataclasses.field(metadata={"static": True})

    @property
    def group(self) -> Group:
        return self.spec.group

    @property
    def layout(self) -> str:
        return self.spec.layout

    @property
    def capacity(self) -> int:
        return self.spec.capacity

    @property
    def expert_alignment(self) -> int:
        return self.spec.expert_alignment
