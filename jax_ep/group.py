"""The EP group: the ranks that exchange tokens, and what they agreed on."""

import collections
import itertools
import math
import zlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_ep import backends, bootstrap
from jax_ep.workspace import Workspace

LAYOUTS = ("expert", "rank", "padded")
# The most tokens per rank that the low-latency path is made for.
MAX_LOW_LATENCY_TOKENS = 512
# Pairs of all ranks: their numbers are int32 in the kernels, which reckon up to 128 past the last.
_MAX_PAIRS = 2**31 - 128

# One count per set of processes, so that processes in several groups still agree on a group's id.
_counters = collections.defaultdict(lambda: itertools.count(1))


class Group:
    """An expert-parallel group over one or more axes of a mesh.

    The devices along `axis_name` are the EP ranks; expert e lives on rank
    `e // (num_experts // num_ranks)`. The mesh's other axes give independent groups. Creating a
    Group is collective over all processes of the mesh. It is a context manager.

    Args:
      mesh: the mesh of the program, a `jax.sharding.Mesh`.
      axis_name: a mesh axis or a tuple of axes (flattened row-major).
      num_experts: E, a multiple of the number of ranks.
      num_topk: K, the experts that each token names.
      max_tokens_per_rank: the most tokens that a rank brings to one call.
      max_row_bytes: the most bytes of a token's row, all leaves of the payload together.
      backend: "cuda", "cpu", "xla" (plain JAX, on every platform), or None for the platform's
        native one where it can run and "xla" elsewhere (`backend_reason` says why).
      timeout_s: seconds after which an operation that waits for a missing rank is an error.
      num_sms: backend "cuda": the thread blocks, one an SM, of the kernels that move rows. Results
        do not depend on it. None for what the link needs, as far as the ranks that share a device
        have it.
      overlap: backend "cuda": run the operations asynchronously on the stream of XLA's collectives,
        so that compute that does not depend on them can run at the same time (docs/overlap.md).
      low_latency: whether the Group can take the low-latency path (docs/low_latency.md), for which
        its workspace has buffers of their own. None: if max_tokens_per_rank is at most 512, the
        most that True is possible for.

    Raises:
      ValueError, TypeError: an argument is wrong; it is named.
      RuntimeError: processes disagree about the settings, one did not come, or backend "cuda"
        finds too little memory or a device that cannot reach another one.
    """

    def __init__(
        self,
        mesh: Mesh,
        axis_name: str | Sequence[str],
        *,
        num_experts: int,
        num_topk: int,
        max_tokens_per_rank: int,
        max_row_bytes: int,
        backend: str | None = None,
        timeout_s: float = 100.0,
        num_sms: int | None = None,
        overlap: bool = False,
        low_latency: bool | None = None,
    ):
        if not isinstance(mesh, Mesh):
            raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
        self.mesh = mesh
        self.axis_names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        if not self.axis_names or len(set(self.axis_names)) != len(self.axis_names):
            raise ValueError(f"axis_name must name one or more distinct axes, got {axis_name!r}")
        for name in self.axis_names:
            if name not in mesh.shape:
                raise ValueError(
                    f"axis_name {name!r} is not an axis of the mesh, which has {mesh.axis_names}"
                )
        self.num_ranks = math.prod(mesh.shape[name] for name in self.axis_names)
        self.num_experts = check_int("num_experts", num_experts)
        self.num_topk = check_int("num_topk", num_topk)
        self.max_tokens_per_rank = check_int("max_tokens_per_rank", max_tokens_per_rank)
        self.max_row_bytes = check_int("max_row_bytes", max_row_bytes)
        if self.num_experts % self.num_ranks:
            raise ValueError(
                f"num_experts must be a multiple of the {self.num_ranks} ranks of axis "
                f"{axis_name!r}, got {num_experts}"
            )
        if self.num_ranks * self.max_tokens_per_rank * self.num_topk > _MAX_PAIRS:
            raise ValueError(
                f"num_ranks * max_tokens_per_rank * num_topk must be at most {_MAX_PAIRS}, got "
                f"{self.num_ranks} * {max_tokens_per_rank} * {num_topk}"
            )
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
        self.timeout_s = float(timeout_s)
        self.num_sms = None if num_sms is None else check_int("num_sms", num_sms)
        self.overlap = bool(overlap)
        self.low_latency = _has_low_latency(low_latency, self.max_tokens_per_rank)
        self.backend, self.backend_reason = backends.choose(
            list(mesh.devices.flat), backend
        )
        self.closed = False

        processes = sorted({device.process_index for device in mesh.devices.flat})
        self.id = _next_id(processes)
        if len(processes) > 1:
            self._agree(processes)
        axis = str(axis_name if isinstance(axis_name, str) else self.axis_names)
        sizes = {
            "num_ranks": self.num_ranks,
            "num_experts": self.num_experts,
            "num_topk": self.num_topk,
            "max_tokens_per_rank": self.max_tokens_per_rank,
        }
        self._workspace = None
        if self.backend == "cpu":
            backends.load_cpu().open_group(
                id=self.id, axis=axis, timeout_s=self.timeout_s, **sizes
            )
        elif self.backend == "cuda":
            self._workspace = Workspace(
                self.id,
                mesh,
                self.axis_names,
                axis=axis,
                sizes=sizes
                | {"max_row_bytes": self.max_row_bytes, "low_latency": self.low_latency},
                num_sms=self.num_sms,
                timeout_s=self.timeout_s,
            )
            self.num_sms = self._workspace.num_sms

    @property
    def num_local_experts(self) -> int:
        """Experts of each rank, E_local."""
        return self.num_experts // self.num_ranks

    @property
    def workspace_bytes(self) -> int:
        """Device memory that the Group holds per rank. The cpu and xla backends hold none."""
        return 0 if self._workspace is None else self._workspace.num_bytes

    @property
    def transport(self) -> str:
        """How the ranks reach each other's memory, in words."""
        if self._workspace is not None:
            return self._workspace.transport
        return {"cpu": "host memory", "xla": "XLA's collectives"}[self.backend]

    def worst_case_capacity(
        self, num_tokens: int, *, layout: str = "expert", expert_alignment: int = 1
    ) -> int:
        """The smallest capacity with which `num_tokens` tokens per rank never drop a pair.

        In rows per rank, or for layout "padded" in rows per expert.
        """
        check_layout(layout)
        tokens = self.num_ranks * num_tokens
        if layout == "expert":
            return tokens * self.num_topk + self.num_local_experts * (expert_alignment - 1)
        return tokens

    def capacity(
        self,
        factor: float,
        *,
        num_tokens: int | None = None,
        layout: str = "expert",
        expert_alignment: int = 1,
    ) -> int:
        """A capacity of `factor` times the mean load, and never more than the worst case.

        Args:
          factor: the capacity factor, 1.0 for the load of perfectly balanced routing.
          num_tokens: tokens per rank, `max_tokens_per_rank` if None.
          layout: as for `prepare`; the result is rows per rank, or rows per expert for "padded".
          expert_alignment: as for `prepare`; the padding that it may cost is added.
        """
        if not factor >= 0:
            raise ValueError(f"factor must not be negative, got {factor!r}")
        if num_tokens is None:
            num_tokens = self.max_tokens_per_rank
        worst = self.worst_case_capacity(
            num_tokens, layout=layout, expert_alignment=expert_alignment
        )
        mean = num_tokens * self.num_topk
        if layout == "padded":
            mean = mean * self.num_ranks / self.num_experts
        padding = self.num_local_experts * (expert_alignment - 1) if layout == "expert" else 0
        return min(math.ceil(factor * mean) + padding, worst)

    def check(self) -> None:
        """Raises RuntimeError where the Group cannot be used (any more).

        That is after `close`, and with backend "cuda" after an operation has failed on one of this
        process's devices: its text is raised. Does not wait for operations in flight.
        """
        if self.closed:
            raise RuntimeError(f"{self!r} is closed")
        if self._workspace is not None:
            self._workspace.check()

    def check_context(self, op: str) -> None:
        """Raises unless the trace is inside a `shard_map` over this Group's mesh."""
        self.check()
        context = jax.sharding.get_abstract_mesh()
        manual = {
            name
            for name, kind in zip(context.axis_names, context.axis_types)
            if kind == AxisType.Manual
        }
        if not manual:
            raise ValueError(
                f"{op} must be called inside jax.shard_map over the mesh of {self!r} "
                "(jax_ep.flax has layers that do so themselves)"
            )
        if dict(context.shape) != dict(self.mesh.shape):
            raise ValueError(
                f"{op} runs inside shard_map over a mesh {dict(context.shape)}, and its Group "
                f"was made for the mesh {dict(self.mesh.shape)}"
            )
        # The native backends find their place by the index along every axis.
        needed = self.axis_names if self.backend == "xla" else self.mesh.axis_names
        missing = [name for name in needed if name not in manual]
        if missing:
            raise ValueError(
                f"{op} with backend {self.backend!r} needs the axes {tuple(needed)} manual in "
                f"shard_map, and {missing} are not (see shard_map's axis_names)"
            )

    def close(self) -> None:
        """Frees what the Group holds; using it afterwards is an error. May be called twice.

        Programs that use it should have ended (`jax.block_until_ready`): what they have not begun
        yet would be such a use. With backend "cpu" a rank that waits for others gets an error. With
        backend "cuda" every process should close at the same point of its program, and waits a few
        seconds for the others.
        """
        if self.closed:
            return
        self.closed = True
        if self.backend == "cpu":
            backends.load_cpu().close_group(self.id)
        if self._workspace is not None:
            self._workspace.close()

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Group({dict(self.mesh.shape)}, {self.axis_names}, num_experts={self.num_experts}, "
            f"num_topk={self.num_topk}, backend={self.backend!r})"
        )

    def _agree(self, processes: list[int]) -> None:
        """Checks that all processes made this Group with the same settings."""
        settings = {
            "mesh": list(self.mesh.shape.items()),
            "devices": [device.id for device in self.mesh.devices.flat],
            "axis_name": self.axis_names,
            "num_experts": self.num_experts,
            "num_topk": self.num_topk,
            "max_tokens_per_rank": self.max_tokens_per_rank,
            "max_row_bytes": self.max_row_bytes,
            "backend": self.backend,
            "timeout_s": self.timeout_s,
            "num_sms": self.num_sms,
            "overlap": self.overlap,
            "low_latency": self.low_latency,
        }
        me = jax.process_index()
        everyone = bootstrap.exchange(f"group/{self.id}", settings, me, processes, self.timeout_s)
        mine = everyone[processes.index(me)]
        for process, theirs in zip(processes, everyone):
            for name, value in mine.items():
                if theirs[name] != value:
                    raise RuntimeError(
                        f"the processes disagree about Group {self.id}: {name} is {value} on "
                        f"process {me} and {theirs[name]} on process {process}"
                    )


def check_layout(layout: str) -> None:
    """Raises ValueError for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")


def check_int(name: str, value: int, minimum: int = 1) -> int:
    """`value` as an int; raises TypeError or ValueError, with the name, if it is none or too small."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return int(value)


def _has_low_latency(low_latency: bool | None, max_tokens_per_rank: int) -> bool:
    possible = max_tokens_per_rank <= MAX_LOW_LATENCY_TOKENS
    if low_latency is None:
        return possible
    if not isinstance(low_latency, bool):
        raise TypeError(f"low_latency must be True, False or None, got {low_latency!r}")
    if low_latency and not possible:
        raise ValueError(
            f"low_latency=True needs max_tokens_per_rank of at most {MAX_LOW_LATENCY_TOKENS}, got "
            f"{max_tokens_per_rank}"
        )
    return low_latency


def _next_id(processes: list[int]) -> int:
    count = next(_counters[tuple(processes)])
    if len(processes) == 1:
        return count
    return zlib.crc32(repr(processes).encode()) << 24 | count
