"""Which operations take the low-latency (LL) path, whose kernels are made for few tokens.

The results are the same bits on either path, so a choice changes nothing but the time. All ranks
choose alike, since a choice depends on the group and on the program only.
"""

from collections.abc import Sequence

import jax

from jax_ep.group import MAX_LOW_LATENCY_TOKENS, Group

# Groups of at most so many tokens per rank take the LL path where a call leaves the choice open:
# it was faster for 1 to 512 tokens (2 x H200, docs/performance.md).
AUTOMATIC_TOKENS = MAX_LOW_LATENCY_TOKENS
MODES = ("ll", "ht")
_MAX_LEAVES = 8  # kMaxLeaves in csrc/cuda/workspace.h


def choose(
    op: str,
    mode: str | None,
    group: Group,
    layout: str,
    leaves: Sequence[jax.Array],
    *,
    sums: bool = False,
) -> bool:
    """Whether a call takes the LL path.

    Args:
      op: the call, for errors.
      mode: "ll", "ht" (high throughput: the ordinary path), or None for the faster one.
      group, layout, leaves: of the call.
      sums: whether the call sums its leaves, as combine does.

    Raises:
      ValueError: an unknown mode, or "ll" where that is not possible; says why.
    """
    if mode is None:
        small = group.max_tokens_per_rank <= AUTOMATIC_TOKENS
        return small and _obstacle(group, layout, leaves, sums) is None
    if mode not in MODES:
        raise ValueError(f"mode must be None or one of {MODES}, got {mode!r}")
    if mode == "ll":
        check(f'{op} with mode="ll"', group, layout, leaves, sums=sums)
    return mode == "ll"


def check(
    what: str, group: Group, layout: str, leaves: Sequence[jax.Array], *, sums: bool = False
) -> None:
    """Raises ValueError where `what`, in words, cannot take the LL path."""
    obstacle = _obstacle(group, layout, leaves, sums)
    if obstacle is not None:
        raise ValueError(f"{what} {obstacle}")


def _obstacle(
    group: Group, layout: str, leaves: Sequence[jax.Array], sums: bool
) -> str | None:
    if not group.low_latency:
        return (
            f"needs a Group with low_latency=True, which needs max_tokens_per_rank of at most "
            f"{MAX_LOW_LATENCY_TOKENS}; this one has {group.max_tokens_per_rank}"
        )
    if layout == "rank":
        return 'is for the layouts expert and padded, not for "rank"'
    if not 1 <= len(leaves) <= _MAX_LEAVES:
        return f"takes a pytree of 1 to {_MAX_LEAVES} leaves, got {len(leaves)}"
    dtypes = sorted({leaf.dtype.name for leaf in leaves})
    if sums and len(dtypes) > 1:
        return f"takes leaves of one dtype, got {', '.join(dtypes)}"
    return None
