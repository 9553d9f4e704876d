"""What is timed: sizes, routings, and the inputs that follow from them."""

import dataclasses
import json
from collections.abc import Sequence

import ml_dtypes
import numpy as np

ROUTINGS = ("random", "one-rank", "group-limited")

# Group-limited routing as in DeepSeek-V3: a token's experts are in 4 of 8 groups.
_NUM_GROUPS, _TOPK_GROUPS = 8, 4


@dataclasses.dataclass(frozen=True)
class Setting:
    """The sizes of one MoE layer and its batch, and how tokens choose their experts."""

    num_tokens: int  # per rank
    hidden: int
    num_experts: int
    num_topk: int
    routing: str = "random"


PRESETS = {
    "cpu": Setting(1024, 1024, 32, 4),
    "deepseek": Setting(4096, 7168, 256, 8),
    "one-rank": Setting(4096, 7168, 256, 8, "one-rank"),
    "group-limited": Setting(4096, 7168, 256, 8, "group-limited"),
    "gpt-oss": Setting(4096, 2880, 32, 4),
    "16k": Setting(16384, 7168, 256, 8),
}

# What --mode=ll takes on GPUs.
LOW_LATENCY_TOKENS = (1, 8, 32, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time; JSON-serialisable."""

    mode: str  # "ht", or "ll" for few tokens on the low-latency path
    ranks: int
    ranks_per_gpu: int
    name: str  # of the setting
    setting: Setting
    tokens: Sequence[int]  # per rank; one after the other instead of the setting's in mode "ll"
    dtypes: Sequence[str]
    layouts: Sequence[str]
    sms: Sequence[int | None]  # backend "cuda": of the kernels that move rows; None is the default
    backends: Sequence[str] | None  # None: the native one, and on CPUs also "xla"
    capacity_factor: float
    repeats: int
    peers: bool
    overlap: bool  # backend "cuda": dispatch beside matrix products, once
    json_file: str | None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Options":
        fields = json.loads(text)
        return cls(**(fields | {"setting": Setting(**fields["setting"])}))


def tokens(setting: Setting, num_ranks: int, rank: int, dtype: str) -> np.ndarray:
    """x [T, H] of one rank: normally distributed."""
    # A block of rows again and again: hundreds of MB of random numbers would take seconds.
    rng = np.random.default_rng([rank, num_ranks])
    block = rng.standard_normal((min(setting.num_tokens, 512), setting.hidden), np.float32)
    return np.resize(block.astype(numpy_dtype(dtype)), (setting.num_tokens, setting.hidden))


def numpy_dtype(name: str) -> np.dtype:
    """The dtype of tokens: that of the name, and bfloat16 for "fp8", which is a way to send it."""
    return np.dtype(ml_dtypes.bfloat16 if name == "fp8" else getattr(ml_dtypes, name, name))


def topk(setting: Setting, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """(topk_idx int32 [R, T, K], distinct experts per token; topk_weights float32 [R, T, K])."""
    rng = np.random.default_rng(0)
    shape = (num_ranks, setting.num_tokens)
    num_experts, num_topk = setting.num_experts, setting.num_topk
    scores = rng.random((*shape, num_experts), np.float32)
    if setting.routing == "one-rank":
        scores[..., num_experts // num_ranks :] = 2  # the lowest scores are taken
        most = num_experts // num_ranks
    elif setting.routing == "group-limited":
        group_size = num_experts // _NUM_GROUPS
        closed = rng.random((*shape, _NUM_GROUPS)).argsort(-1).argsort(-1) >= _TOPK_GROUPS
        scores += 2 * np.repeat(closed, group_size, axis=-1)
        most = _TOPK_GROUPS * group_size
    else:
        most = num_experts
    if num_topk > most:
        raise ValueError(f"routing {setting.routing!r} leaves {most} of {num_experts} experts to a "
                         f"token on {num_ranks} ranks, and top-{num_topk} needs more")
    topk_idx = np.argpartition(scores, num_topk - 1, axis=-1)[..., :num_topk]
    return topk_idx.astype(np.int32), rng.random((*shape, num_topk), np.float32)


def needed_capacity(topk_idx: np.ndarray, num_experts: int, layout: str) -> int:
    """The smallest capacity with which this routing drops nothing, as `prepare` counts it."""
    num_ranks = len(topk_idx)
    counts = np.bincount(topk_idx.reshape(-1), minlength=num_experts)
    if layout == "padded":
        return int(counts.max())
    if layout == "rank":
        return int(_pairs(topk_idx, num_experts).sum(axis=0).max())
    return int(counts.reshape(num_ranks, -1).sum(axis=1).max())


def kept_rows(topk_idx: np.ndarray, num_experts: int, layout: str) -> int:
    """Rows that all ranks receive where nothing is dropped."""
    return int(_pairs(topk_idx, num_experts).sum()) if layout == "rank" else topk_idx.size


def link_rows(topk_idx: np.ndarray, num_experts: int) -> int:
    """Rows that cross from one rank to another: one per token and rank, the token's own left out.

    Counted in one direction at the rank that sends or receives most: its link takes longest.

    Args:
      topk_idx: int [R, T, K].
      num_experts: E, which the R ranks share in equal parts.
    """
    rows = crossing_rows(topk_idx, num_experts)
    return int(max(rows.sum(axis=0).max(), rows.sum(axis=1).max()))


def crossing_rows(topk_idx: np.ndarray, num_experts: int) -> np.ndarray:
    """[R, R]: rows that cross from a rank (the row) to another (the column)."""
    rows = _pairs(topk_idx, num_experts)
    np.fill_diagonal(rows, 0)
    return rows


def _pairs(topk_idx: np.ndarray, num_experts: int) -> np.ndarray:
    """[R, R]: how many tokens of a rank (the row) have an expert on a rank (the column)."""
    num_ranks = len(topk_idx)
    target = topk_idx // (num_experts // num_ranks)
    goes = (target[..., None] == np.arange(num_ranks)).any(axis=2)
    return goes.sum(axis=1)
