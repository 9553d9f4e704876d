"""Inputs for the test matrix: configurations that cover all pairs of settings, routings, payloads.

Everything here is deterministic: the same arguments give the same arrays.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np

from jax_ep.testing import oracle

RANKS = (1, 2, 3, 4, 8)
CAPACITIES = ("worst", "tight", "zero", "roomy")
ALIGNMENTS = (1, 8, 128)
ROUTINGS = ("uniform", "one_expert", "unrouted", "all_unrouted", "empty_rank", "duplicates")

FLOAT_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of prepare; hashable, so that compiled programs can be kept by it."""

    num_ranks: int = 2
    experts_per_rank: int = 2
    num_topk: int = 2
    num_tokens: int = 5
    layout: str = "expert"
    capacity: int | None = None
    expert_alignment: int = 1
    # Larger than num_tokens, so that a mix-up of the two shows in row_source.
    spare_tokens: int = 3

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.experts_per_rank

    @property
    def max_tokens_per_rank(self) -> int:
        return self.num_tokens + self.spare_tokens

    @property
    def oracle_config(self) -> oracle.Config:
        return oracle.Config(
            num_experts=self.num_experts, max_tokens_per_rank=self.max_tokens_per_rank,
            layout=self.layout, capacity=self.capacity, expert_alignment=self.expert_alignment)

    @property
    def row_dims(self) -> tuple[int, ...]:
        """The leading dimensions of rows on one rank."""
        config = self.oracle_config
        capacity = config.capacity
        if capacity is None:
            capacity = oracle.worst_case_capacity(
                config, self.num_ranks, self.num_tokens, self.num_topk)
        return (self.experts_per_rank, capacity) if self.layout == "padded" else (capacity,)

    def with_capacity(self, kind: str) -> Case:
        """The case with a capacity of a kind of CAPACITIES; "tight" drops under most routings."""
        worst = oracle.worst_case_capacity(
            self.oracle_config, self.num_ranks, self.num_tokens, self.num_topk)
        pairs = self.num_tokens * self.num_topk
        tight = {
            "expert": pairs + self.expert_alignment // 2,
            "rank": max(1, worst // 2),
            "padded": max(1, pairs // self.experts_per_rank),
        }[self.layout]
        capacity = {"worst": None, "tight": tight, "zero": 0, "roomy": worst + 5}[kind]
        return dataclasses.replace(self, capacity=capacity)

    def __str__(self) -> str:
        capacity = "worst" if self.capacity is None else self.capacity
        return (f"R{self.num_ranks}-E{self.experts_per_rank}-K{self.num_topk}-T{self.num_tokens}"
                f"-{self.layout}-cap_{capacity}-align{self.expert_alignment}")


def covering(factors: Mapping[str, Sequence], strength: int = 2) -> list[dict]:
    """A small list of settings in which every `strength` values of different factors meet.

    Greedy: of all combinations take the one with most pairs still uncovered.
    """
    names = list(factors)
    combinations = [dict(zip(names, values)) for values in itertools.product(*factors.values())]

    def tuples(setting: dict) -> set:
        return {tuple((name, setting[name]) for name in chosen)
                for chosen in itertools.combinations(names, strength)}

    uncovered = set().union(*(tuples(c) for c in combinations))
    chosen = []
    while uncovered:
        best = max(combinations, key=lambda c: len(tuples(c) & uncovered))
        uncovered -= tuples(best)
        chosen.append(best)
    return chosen


def matrix() -> list[Case]:
    """Cases in which all pairs of (ranks, layout, capacity, alignment) and of the sizes meet."""
    settings = covering({"num_ranks": RANKS, "layout": oracle.LAYOUTS, "capacity": CAPACITIES,
                         "expert_alignment": ALIGNMENTS})
    sizes = itertools.cycle([(2, 2, 5), (1, 3, 4), (3, 1, 7), (2, 4, 1), (1, 2, 6)])
    cases = []
    for setting, (experts_per_rank, num_topk, num_tokens) in zip(settings, sizes):
        kind = setting.pop("capacity")
        cases.append(Case(experts_per_rank=experts_per_rank, num_topk=num_topk,
                          num_tokens=num_tokens, **setting).with_capacity(kind))
    return cases


def quick_matrix() -> list[Case]:
    """A few cases of the matrix that between them see each layout, capacity and alignment."""
    return [
        Case(num_ranks=4, experts_per_rank=2, num_topk=3).with_capacity("tight"),
        Case(num_ranks=2, expert_alignment=8),
        Case(num_ranks=2, layout="rank", num_topk=3).with_capacity("tight"),
        Case(num_ranks=3, layout="padded", experts_per_rank=1).with_capacity("tight"),
        Case(num_ranks=2, layout="padded"),
        Case(num_ranks=1, layout="expert", expert_alignment=128).with_capacity("zero"),
    ]


def odd_sizes() -> list[Case]:
    """Sizes that broke other libraries: no tokens, one token, many choices, one expert each."""
    return [
        Case(num_ranks=2, num_tokens=0, expert_alignment=8),
        Case(num_ranks=2, num_tokens=0, layout="rank"),
        Case(num_ranks=2, num_tokens=0, layout="padded"),
        Case(num_ranks=4, num_tokens=1, num_topk=1, experts_per_rank=1, spare_tokens=0),
        Case(num_ranks=1, experts_per_rank=20, num_topk=33, num_tokens=1),
        Case(num_ranks=2, experts_per_rank=5, num_topk=10, num_tokens=2, layout="rank"),
        Case(num_ranks=1, experts_per_rank=5, num_topk=16, num_tokens=3, layout="padded"),
    ]


def routing(kind: str, case: Case, seed: int = 0) -> np.ndarray:
    """topk_idx int32 [R, T, K] of one of ROUTINGS."""
    rng = np.random.default_rng([seed, ROUTINGS.index(kind)])
    shape = (case.num_ranks, case.num_tokens, case.num_topk)
    num_experts = case.num_experts
    if kind == "one_expert":
        topk_idx = np.full(shape, num_experts // 2)
    elif kind == "all_unrouted":
        topk_idx = np.full(shape, -1)
    elif kind == "duplicates":
        # Every choice of a token is one of two experts.
        both = rng.integers(0, num_experts, (*shape[:2], 2))
        topk_idx = np.take_along_axis(both, rng.integers(0, 2, shape), axis=2)
    else:
        # Distinct experts while there are enough.
        topk_idx = rng.random((*shape[:2], num_experts)).argsort(axis=2)
        topk_idx = np.resize(topk_idx, shape) if case.num_topk > num_experts else (
            topk_idx[..., :case.num_topk])
        if kind == "unrouted":
            topk_idx = np.where(rng.random(shape) < 0.4, -1, topk_idx)
        elif kind == "empty_rank":
            # The first rank receives nothing, and the last one sends nothing.
            topk_idx = np.where(topk_idx < case.experts_per_rank, -1, topk_idx)
            topk_idx[-1] = -1
    return topk_idx.astype(np.int32)


def routings(case: Case, seed: int = 0) -> Iterable[tuple[str, np.ndarray]]:
    """All kinds of routing of one case; they share its compiled program."""
    return [(kind, routing(kind, case, seed)) for kind in ROUTINGS]


def floats(dtype: np.dtype, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Normally distributed values of varied magnitude, so that the order of a sum shows."""
    rng = np.random.default_rng([seed, 1])
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-3, 4, shape))
    return values.astype(np.float32).astype(dtype)


def any_bits(dtype: np.dtype, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Arbitrary bit patterns: NaNs with payloads, infinities, subnormals, both zeros."""
    rng = np.random.default_rng([seed, 2])
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype)[..., 0]


def payload(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """A pytree [R, T, ...] of many dtypes and ranks, with row bytes that divide nothing."""
    lead = (case.num_ranks, case.num_tokens)
    leaves = {
        "f32": (np.float32, (4,)),
        "bf16": (ml_dtypes.bfloat16, (2, 3)),
        "f16": (np.float16, (5,)),
        "fp8": (ml_dtypes.float8_e4m3fn, (8,)),
        "scales": (np.float32, (1,)),
        "e5m2": (ml_dtypes.float8_e5m2, (3,)),
        "ids": (np.int32, ()),
        "bytes": (np.uint8, (7,)),
        "mask": (np.bool_, (3,)),
        "complex": (np.complex64, (1,)),
    }
    return {name: any_bits(dtype, (*lead, *dims), seed + i)
            for i, (name, (dtype, dims)) in enumerate(leaves.items())}
