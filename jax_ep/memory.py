"""Which memory the ranks of a Group with backend "cuda" share: one kind, the same on all ranks.

"ipc" is from cudaMalloc: GPUs of one process reach it by peer access, processes of one host by CUDA
IPC. "fabric" can be exported by fabric handles, which every process of an NVLink domain can open,
also where the domain spans hosts (GB200 NVL72), as far as there is an IMEX channel.
"""

import dataclasses
import itertools
import os
import platform
import types
from collections.abc import Iterable, Iterator, Sequence

KINDS = ("ipc", "fabric")
# Forces a kind; equal in all processes.
VARIABLE = "JAX_EP_MEMORY"
_SHOWN = 8  # rank pairs in an error


@dataclasses.dataclass(frozen=True)
class Reach:
    """What decides how the memory of one rank can be reached.

    Attributes:
      subgroup, rank: which of the mesh's independent EP groups, and which rank there.
      asked: VARIABLE in the rank's process.
      host: names the host uniquely; `hostname` is for people.
      device: the GPU, for people.
      fabric_obstacle: why its memory cannot be exported by a fabric handle; None where it can.
      nvlink_domain: that spans hosts and that the GPU is in, or None and `domain_obstacle`.
    """

    subgroup: int
    rank: int
    asked: str | None
    host: str
    hostname: str
    device: str
    fabric_obstacle: str | None
    nvlink_domain: str | None
    domain_obstacle: str | None


def reach(native: types.ModuleType, device: int, subgroup: int, rank: int) -> Reach:
    """That of a rank on the CUDA device with ordinal `device` of this process.

    Raises:
      RuntimeError: CUDA does not know the device.
    """
    return Reach(subgroup=subgroup, rank=rank, asked=os.environ.get(VARIABLE) or None,
                 hostname=platform.node(), **native.reach(device))


def choose(ranks: Sequence[Reach]) -> tuple[str, str]:
    """The kind of memory for a Group, and the reason in words.

    A function of what all processes know alike, so that they choose alike. On one host it is "ipc",
    which needs nothing of the machine's set-up; between hosts it can only be "fabric".

    Args:
      ranks: all ranks of the mesh.

    Raises:
      RuntimeError: there is no kind that all ranks of a group can reach, or not the one that is
        asked for. The text names the ranks, and what is missing.
    """
    asked = {rank.asked for rank in ranks}
    if len(asked) > 1:
        raise RuntimeError(f"{VARIABLE} differs between processes: " + ", ".join(
            sorted("unset" if kind is None else kind for kind in asked)))
    kind, = asked
    if kind is not None and kind not in KINDS:
        raise RuntimeError(f"{VARIABLE} must be one of {KINDS}, got {kind!r}")
    several_hosts = any(a.host != b.host for a, b in _pairs(ranks))
    if kind is not None:
        reason = f"{VARIABLE}={kind}"
    elif several_hosts:
        kind, reason = "fabric", "the ranks of a group are on several hosts"
    else:
        kind, reason = "ipc", "all ranks of a group are on one host"
    obstacles = list(_obstacles(kind, ranks))
    if obstacles:
        if several_hosts:
            obstacles.append("this version of jax_ep has no RDMA between hosts")
        raise RuntimeError(f"memory {kind!r} ({reason}) does not connect all ranks: "
                           + "; ".join(obstacles))
    return kind, reason


def _obstacles(kind: str, ranks: Sequence[Reach]) -> Iterator[str]:
    """What is in the way, with the ranks that it concerns."""
    if kind == "fabric":
        unable = ((rank.rank, f"{_host(rank)} cannot export memory by fabric handles: "
                   f"{rank.fabric_obstacle}") for rank in ranks if rank.fabric_obstacle is not None)
        for reason, numbers in _by_reason(unable):
            yield f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: {reason}"
    apart = ((f"{a.rank} and {b.rank}", _between_hosts(kind, a, b)) for a, b in _pairs(ranks)
             if a.host != b.host)
    for reason, names in _by_reason(apart):
        if reason is not None:
            more = f" and {len(names) - _SHOWN} more pairs" if len(names) > _SHOWN else ""
            yield f"ranks {', '.join(names[:_SHOWN])}{more}: {reason}"


def _between_hosts(kind: str, a: Reach, b: Reach) -> str | None:
    """Why two ranks on different hosts do not reach each other, or None."""
    hosts = f"{_host(a)} and {_host(b)}"
    if kind == "ipc":
        return f"CUDA IPC does not connect {hosts}"
    for rank in (a, b):
        if rank.nvlink_domain is None:
            return (f"no NVLink domain connects {hosts}: on {_host(rank)}, "
                    f"{rank.domain_obstacle}")
    if a.nvlink_domain != b.nvlink_domain:
        return f"{hosts} are in two NVLink domains, {a.nvlink_domain} and {b.nvlink_domain}"
    return None


def _pairs(ranks: Sequence[Reach]) -> Iterator[tuple[Reach, Reach]]:
    """All pairs of ranks that exchange data."""
    pairs = itertools.combinations(ranks, 2)
    return ((a, b) for a, b in pairs if a.subgroup == b.subgroup)


def _by_reason(items: Iterable[tuple]) -> list[tuple[str | None, list]]:
    """(what, reason) pairs by reason, each with what it concerns, once."""
    result = {}
    for what, reason in items:
        result.setdefault(reason, {})[what] = None
    return [(reason, list(what)) for reason, what in result.items()]


def _host(rank: Reach) -> str:
    """Hostnames alone need not tell hosts apart."""
    return f"host {rank.hostname} ({rank.host[:8]})"
