"""The semantics of jax_ep once more, in numpy and plain loops, for all ranks at once.

This is the judge of every test: slow, obvious, free of JAX. It follows docs/semantics.md sentence
by sentence and shares no code with the backends.

Arrays carry a leading axis of length R, the EP rank:

    topk_idx      int   [R, T, K]        in [0, E), or -1
    slots         int32 [R, T, K]        row on the destination rank, -1 unrouted or dropped
    row_source    int32 [R, capacity]    (padded: [R, E_local, C]), -1 where a row has no source
    row_topk_idx  int32 [R, capacity, K] layout rank only
    group_sizes, expert_counts int32 [R, E_local];  num_rows, num_dropped int32 [R]
    x [R, T, ...], rows [R, capacity, ...] or [R, E_local, C, ...]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from jax_ep.testing.rounding import accumulator_dtype, fma, round_to

LAYOUTS = ("expert", "rank", "padded")


@dataclasses.dataclass(frozen=True)
class Config:
    """What fixes a plan besides `topk_idx`. `capacity=None` is the worst case."""

    num_experts: int
    max_tokens_per_rank: int
    layout: str = "expert"
    capacity: int | None = None
    expert_alignment: int = 1


@dataclasses.dataclass
class Plan:
    """A Handle of all R ranks: the same fields, each with a leading rank axis."""

    config: Config
    topk_idx: np.ndarray
    slots: np.ndarray
    row_source: np.ndarray
    row_topk_idx: np.ndarray | None
    group_sizes: np.ndarray
    expert_counts: np.ndarray
    num_rows: np.ndarray
    num_dropped: np.ndarray

    @property
    def num_ranks(self) -> int:
        return self.topk_idx.shape[0]

    @property
    def experts_per_rank(self) -> int:
        return self.config.num_experts // self.num_ranks

    def rank_of(self, expert: int) -> int:
        """The EP rank that owns an expert."""
        return expert // self.experts_per_rank

    def fields(self) -> dict[str, np.ndarray | None]:
        """The arrays that a Handle must equal, by name."""
        names = ("topk_idx", "slots", "row_source", "row_topk_idx", "group_sizes",
                 "expert_counts", "num_rows", "num_dropped")
        return {name: getattr(self, name) for name in names}

    def placed_pairs(self) -> Iterator[tuple[int, int, int, int, tuple[int, ...]]]:
        """Yields (src, t, k, dst, index of the row in rows[dst]) of each pair that has a row."""
        num_ranks, num_tokens, num_topk = self.slots.shape
        for src in range(num_ranks):
            for t in range(num_tokens):
                for k in range(num_topk):
                    slot = int(self.slots[src, t, k])
                    if slot >= 0:
                        dst = self.rank_of(int(self.topk_idx[src, t, k]))
                        yield src, t, k, dst, self.row_index(slot)

    def row_index(self, slot: int) -> tuple[int, ...]:
        """A slot as an index into one rank's rows; layout padded numbers them e_local * C + i."""
        if self.config.layout == "padded":
            return divmod(slot, self.row_source.shape[2])
        return (slot,)


def worst_case_capacity(config: Config, num_ranks: int, num_tokens: int, num_topk: int) -> int:
    """The rows per rank (padded: per expert) with which nothing is ever dropped."""
    if config.layout == "expert":
        experts_per_rank = config.num_experts // num_ranks
        return (num_ranks * num_tokens * num_topk
                + experts_per_rank * (config.expert_alignment - 1))
    return num_ranks * num_tokens


def align_up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def prepare(config: Config, topk_idx: np.ndarray) -> Plan:
    """Fixes the row of every (token, k) pair of all ranks."""
    num_ranks, num_tokens, num_topk = topk_idx.shape
    assert config.layout in LAYOUTS
    assert config.num_experts % num_ranks == 0
    assert num_tokens <= config.max_tokens_per_rank
    assert ((topk_idx >= -1) & (topk_idx < config.num_experts)).all()
    experts_per_rank = config.num_experts // num_ranks
    capacity = config.capacity
    if capacity is None:
        capacity = worst_case_capacity(config, num_ranks, num_tokens, num_topk)
    row_shape = (experts_per_rank, capacity) if config.layout == "padded" else (capacity,)
    plan = Plan(
        config=dataclasses.replace(config, capacity=capacity),
        topk_idx=topk_idx.astype(np.int32),
        slots=np.full((num_ranks, num_tokens, num_topk), -1, np.int32),
        row_source=np.full((num_ranks, *row_shape), -1, np.int32),
        row_topk_idx=(np.full((num_ranks, capacity, num_topk), -1, np.int32)
                      if config.layout == "rank" else None),
        group_sizes=np.zeros((num_ranks, experts_per_rank), np.int32),
        expert_counts=np.zeros((num_ranks, experts_per_rank), np.int32),
        num_rows=np.zeros(num_ranks, np.int32),
        num_dropped=np.zeros(num_ranks, np.int32))
    place = {"expert": _place_expert, "rank": _place_rank, "padded": _place_padded}[config.layout]
    for rank in range(num_ranks):
        for expert in range(experts_per_rank):
            plan.expert_counts[rank, expert] = len(_pairs_of(plan, rank, expert))
        place(plan, rank)
    return plan


def _pairs_of(plan: Plan, rank: int, local_expert: int) -> list[tuple[int, int, int]]:
    """All (src, t, k) that name the expert, by source rank, then t*K + k."""
    expert = rank * plan.experts_per_rank + local_expert
    return [tuple(map(int, pair)) for pair in np.argwhere(plan.topk_idx == expert)]


def _pair_id(plan: Plan, src: int, t: int, k: int) -> int:
    num_topk = plan.topk_idx.shape[2]
    return (src * plan.config.max_tokens_per_rank + t) * num_topk + k


def _place_expert(plan: Plan, rank: int) -> None:
    capacity = plan.config.capacity
    offset = 0
    for expert in range(plan.experts_per_rank):
        pairs = _pairs_of(plan, rank, expert)
        for i, pair in enumerate(pairs):
            row = offset + i
            if row < capacity:
                plan.slots[pair] = row
                plan.row_source[rank, row] = _pair_id(plan, *pair)
            else:
                plan.num_dropped[rank] += 1
        end = offset + align_up(len(pairs), plan.config.expert_alignment)
        plan.group_sizes[rank, expert] = min(end, capacity) - min(offset, capacity)
        offset = end
    plan.num_rows[rank] = plan.group_sizes[rank].sum()


def _place_padded(plan: Plan, rank: int) -> None:
    capacity = plan.config.capacity
    for expert in range(plan.experts_per_rank):
        for i, pair in enumerate(_pairs_of(plan, rank, expert)):
            if i < capacity:
                plan.slots[pair] = expert * capacity + i
                plan.row_source[rank, expert, i] = _pair_id(plan, *pair)
                plan.group_sizes[rank, expert] += 1
            else:
                plan.num_dropped[rank] += 1
    plan.num_rows[rank] = plan.group_sizes[rank].sum()


def _place_rank(plan: Plan, rank: int) -> None:
    num_ranks, num_tokens, num_topk = plan.topk_idx.shape
    first_expert = rank * plan.experts_per_rank
    row = 0
    for src in range(num_ranks):
        for t in range(num_tokens):
            here = {k: int(e) - first_expert for k, e in enumerate(plan.topk_idx[src, t])
                    if e >= 0 and plan.rank_of(int(e)) == rank}
            if not here:
                continue
            if row < plan.config.capacity:
                plan.row_source[rank, row] = src * plan.config.max_tokens_per_rank + t
                for k, local_expert in here.items():
                    plan.slots[src, t, k] = row
                    plan.row_topk_idx[rank, row, k] = local_expert
                    plan.group_sizes[rank, local_expert] += 1
            else:
                plan.num_dropped[rank] += len(here)
            row += 1
    plan.num_rows[rank] = min(row, plan.config.capacity)


def dispatch(plan: Plan, x: np.ndarray) -> np.ndarray:
    """Rows of one leaf x [R, T, ...]: copies of the tokens, zero where a row has no source."""
    row_dims = plan.row_source.shape[1:]
    rows = np.zeros((plan.num_ranks, *row_dims, *x.shape[2:]), x.dtype)
    for src, t, _, dst, row in plan.placed_pairs():
        rows[(dst, *row)] = x[src, t]
    return rows


QUANTIZE = ("fp8", "fp8_e8m0", "fp8_round_scale")
BLOCK = 128


def quantize(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Values float8_e4m3fn [..., H] of one leaf, and scales [..., ceil(H / 128)]."""
    *lead, num_columns = x.shape
    num_blocks = -(-num_columns // BLOCK)
    values = np.zeros(x.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((*lead, num_blocks),
                      ml_dtypes.float8_e8m0fnu if kind == "fp8_e8m0" else np.float32)
    for *row, block in np.ndindex(*lead, num_blocks):
        columns = (*row, slice(block * BLOCK, (block + 1) * BLOCK))
        values[columns], scales[(*row, block)] = _quantize_block(x[columns], kind)
    return values, scales


def _quantize_block(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.generic]:
    x = x.astype(np.float32)
    largest = np.abs(x).max()  # NaN where there is one
    if not np.isfinite(largest):
        return np.full(x.shape, np.nan), np.float32(np.nan)
    largest = np.maximum(largest, np.float32(2**-107))
    if kind == "fp8":
        scale = largest * np.float32(1 / 448)
        inverse = np.float32(448) / largest
    else:
        exponent = -126
        while float(largest) > 448 * 2.0**exponent:
            exponent += 1
        scale, inverse = np.float32(2.0**exponent), np.float32(2.0**-exponent)
    return (x * inverse).astype(ml_dtypes.float8_e4m3fn), scale


def dispatch_weights(plan: Plan, topk_weights: np.ndarray) -> np.ndarray:
    """row_weights of topk_weights [R, T, K]: one per row, in layout rank one per (row, k)."""
    per_row = (topk_weights.shape[2],) if plan.config.layout == "rank" else ()
    row_weights = np.zeros((*plan.row_source.shape, *per_row), topk_weights.dtype)
    for src, t, k, dst, row in plan.placed_pairs():
        where = (dst, *row, k) if plan.config.layout == "rank" else (dst, *row)
        row_weights[where] = topk_weights[src, t, k]
    return row_weights


def combine(plan: Plan, rows: np.ndarray, row_weights: np.ndarray | None = None) -> np.ndarray:
    """y [R, T, ...] of one leaf of rows; the reduction tree of the specification.

    Per token and rank a partial sum in k order in the accumulator type, rounded to the row dtype;
    then the partials in rank order, rounded once more.
    """
    assert row_weights is None or plan.config.layout != "rank"
    dtype, accumulator = rows.dtype, accumulator_dtype(rows.dtype)
    num_ranks, num_tokens, _ = plan.slots.shape
    y = np.zeros((num_ranks, num_tokens, *rows.shape[plan.row_source.ndim:]), dtype)
    for src in range(num_ranks):
        for t in range(num_tokens):
            total = np.zeros(y.shape[2:], accumulator)
            for dst in range(num_ranks):
                partial = np.zeros(y.shape[2:], accumulator)
                for row in _rows_of_token(plan, src, t, dst):
                    value = rows[(dst, *row)].astype(accumulator)
                    if row_weights is None:
                        partial = _add(partial, value)
                    else:
                        weight = row_weights[(dst, *row)].astype(accumulator)
                        partial = fma(weight, value, partial)
                total = _add(total, round_to(partial, dtype).astype(accumulator))
            y[src, t] = round_to(total, dtype)
    return y


def combine_bounds(plan: Plan, rows: np.ndarray,
                   row_weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and greatest weighted combine that a compiler may produce.

    A compiler may fuse each multiply-add or round the product first; where two products meet, it
    may fuse either one. All these steps, and each rounding, are monotone in the running sum, so
    carrying the lower and the upper end of an interval through the tree bounds every mixture of the
    choices exactly. Finite inputs only.
    """
    dtype, accumulator = rows.dtype, accumulator_dtype(rows.dtype)
    num_ranks, num_tokens, _ = plan.slots.shape
    shape = (num_ranks, num_tokens, *rows.shape[plan.row_source.ndim:])
    lower, upper = np.zeros(shape, dtype), np.zeros(shape, dtype)
    for src in range(num_ranks):
        for t in range(num_tokens):
            total = [np.zeros(shape[2:], accumulator)] * 2
            for dst in range(num_ranks):
                terms = [(row_weights[(dst, *row)].astype(accumulator),
                          rows[(dst, *row)].astype(accumulator))
                         for row in _rows_of_token(plan, src, t, dst)]
                partial = _partial_bounds(terms, shape[2:], accumulator)
                total = [_add(s, round_to(p, dtype).astype(accumulator))
                         for s, p in zip(total, partial)]
            lower[src, t], upper[src, t] = (round_to(s, dtype) for s in total)
    return lower, upper


def _partial_bounds(terms: list[tuple[np.ndarray, np.ndarray]], shape: tuple[int, ...],
                    accumulator: np.dtype) -> list[np.ndarray]:
    """Both ends of the sum of weight * value over the terms in order."""
    ends = [np.zeros(shape, accumulator)] * 2
    for i, (weight, value) in enumerate(terms):
        candidates = [step for end in ends
                      for step in (fma(weight, value, end), _add(weight * value, end))]
        if i == 1:
            candidates.append(fma(*terms[0], weight * value))
        ends = [np.minimum.reduce(candidates), np.maximum.reduce(candidates)]
    return ends


def _rows_of_token(plan: Plan, src: int, t: int, dst: int) -> list[tuple[int, ...]]:
    """The rows on rank dst that enter the token's sum, in k order; in layout rank at most one."""
    rows = []
    for k, expert in enumerate(plan.topk_idx[src, t]):
        slot = int(plan.slots[src, t, k])
        if slot >= 0 and plan.rank_of(int(expert)) == dst:
            rows.append(plan.row_index(slot))
    return rows[:1] if plan.config.layout == "rank" else rows


def _add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return a + b
