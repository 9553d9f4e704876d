"""The symmetric memory of a Group with backend "cuda": opened, connected and closed with it."""

import base64
import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ep import backends, bootstrap, memory

_DEFAULT_NUM_SMS = 32  # the link's rate is reached with 24 to 32 (docs/performance.md)
_SMS_OF_COLLECTIVES = 32  # NCCL takes as many at most, unless it is told otherwise
_MAX_BLOCKS = 256  # of a grid: kMaxBlocks of csrc/cuda/workspace.h
_CLOSE_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a device is in a Group: which of the mesh's independent EP groups, which rank there."""

    device: jax.Device
    subgroup: int
    rank: int


def places(mesh: Mesh, axis_names: Sequence[str]) -> list[Place]:
    """Every device of the mesh, as `jax.lax.axis_index` sees it over the group's and other axes."""
    others = [name for name in mesh.axis_names if name not in axis_names]

    def flat_index(index: dict[str, int], names: Sequence[str]) -> int:
        return int(np.ravel_multi_index([index[n] for n in names], [mesh.shape[n] for n in names])
                   if names else 0)

    result = []
    for at in np.ndindex(mesh.devices.shape):
        index = dict(zip(mesh.axis_names, at))
        result.append(Place(mesh.devices[at], flat_index(index, others),
                            flat_index(index, axis_names)))
    return result


def default_num_sms(devices: Sequence[tuple[str, int]]) -> int:
    """Blocks of the kernels that move rows, equal on all ranks.

    Args:
      devices: of every rank of the mesh, its device's identity and number of SMs. The blocks of
        ranks that share a device must be on it at the same time.
    """
    return max(1, min(_DEFAULT_NUM_SMS, max_num_sms(devices)))


def low_latency_sms(devices: Sequence[tuple[str, int]]) -> int:
    """The most blocks of the low-latency kernels: the SMs of a device, shared by its ranks.

    Some are left to XLA's collectives. A kernel of these and one of ours wait for other ranks, each
    of which may run the other one first: if both did not fit, they would wait for each other.
    """
    sms = max_num_sms(devices)
    return max(1, min(_MAX_BLOCKS, max(sms - _SMS_OF_COLLECTIVES, sms // 2)))


def ranks_per_device(devices: Sequence[tuple[str, int]]) -> int:
    """The most ranks of `devices` (see default_num_sms) that share one.

    If it is 1, tokens may be pushed to their ranks; if ranks share a device, its memory is the
    link, and they are pulled.
    """
    return max(_ranks_on(devices).values())


def _ranks_on(devices: Sequence[tuple[str, int]]) -> collections.Counter[str]:
    return collections.Counter(identity for identity, _ in devices)


def max_num_sms(devices: Sequence[tuple[str, int]]) -> int:
    """The most SMs that every rank of `devices` (see default_num_sms) can have to itself."""
    sharing = _ranks_on(devices)
    return min(sms // sharing[identity] for identity, sms in devices)


class Workspace:
    """Symmetric memory on this process's devices of a mesh, connected to that of all others.

    Making it is collective over the processes of the mesh: they choose the kind of memory that all
    ranks can reach, exchange handles, open each other's memory, and go on when all have. Closing it
    is collective as far as the others are there: memory is freed when nobody has it open any more,
    or after a short time.

    Args:
      id: the Group's.
      mesh, axis_names: as of the Group.
      axis: the axis in words, for errors.
      sizes: what the memory is made for: num_ranks, num_experts, num_topk, max_tokens_per_rank,
        max_row_bytes; and low_latency, whether with the buffers of that path.
      num_sms: blocks of the kernels that move rows; None for the default. That of the low-latency
        path, which is bound by latency and not by the link, is all SMs that a rank can have.
      timeout_s: how long to wait for other processes, and kernels for other ranks.

    Raises:
      RuntimeError: there is not enough memory, ranks cannot reach each other, or a process did not
        come. All processes raise, and hold nothing.
      ValueError: num_sms is more than the ranks that share a device have together.
    """

    def __init__(self, id: int, mesh: Mesh, axis_names: Sequence[str], *, axis: str,
                 sizes: dict[str, int | bool], num_sms: int | None, timeout_s: float):
        self._native = backends.load_cuda()
        self.num_bytes = self._native.workspace_bytes(**sizes)
        self._id = id
        self._places = places(mesh, axis_names)
        self._me = jax.process_index()
        self._processes = sorted({place.device.process_index for place in self._places})
        self._timeout_s = timeout_s
        self._closed = False
        try:
            reaches = self._together("search for a way", self._reaches)
            self.memory, _ = memory.choose([memory.Reach(**reach) for reach in reaches])
            ranks = self._together("memory", lambda: self._open(axis, sizes))
            devices = [(rank["device"], rank["num_sms"]) for rank in ranks]
            self.num_sms = self._check_num_sms(num_sms, devices)
            self.low_latency_sms = (low_latency_sms(devices) if num_sms is None
                                    else self.num_sms)
            self.ranks_per_device = ranks_per_device(devices)
            transports = self._together("connection", lambda: self._connect(ranks))
        except BaseException:
            self.close()
            raise
        self.transport = " + ".join(sorted({part for transport in transports
                                            for part in transport["transport"].split(" + ")}))

    def check(self) -> None:
        """Raises RuntimeError where a kernel on one of this process's devices has failed."""
        error = self._native.check_group(self._id)
        if error is not None:
            raise RuntimeError(error)

    def close(self) -> None:
        """Waits for this process's kernels, and frees the memory. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._native.disconnect_group(self._id)
        if len(self._processes) > 1:
            try:
                self._exchange("end", {}, min(self._timeout_s, _CLOSE_TIMEOUT_S))
            except RuntimeError:
                pass  # it has ended, or will not end this Group: its mappings are its own affair
        self._native.close_group(self._id)

    @property
    def _local(self) -> list[Place]:
        return [place for place in self._places if place.device.process_index == self._me]

    def _reaches(self) -> list[dict]:
        return [dataclasses.asdict(memory.reach(self._native, place.device.local_hardware_id,
                                                place.subgroup, place.rank))
                for place in self._local]

    def _open(self, axis: str, sizes: dict[str, int | bool]) -> list[dict]:
        devices = self._native.machine_info()["devices"]
        opened = []
        for place in self._local:
            ordinal = place.device.local_hardware_id
            handle = self._native.open_group(
                id=self._id, device=ordinal, axis=axis, subgroup=place.subgroup, rank=place.rank,
                timeout_s=self._timeout_s, memory=self.memory, **sizes)
            opened.append({"subgroup": place.subgroup, "rank": place.rank,
                           "handle": base64.b64encode(handle).decode(),
                           "device": devices[ordinal]["uuid"],
                           "num_sms": devices[ordinal]["num_sms"]})
        return opened

    def _connect(self, ranks: list[dict]) -> list[dict]:
        transports = []
        for place in self._local:
            peers = sorted((rank["rank"], rank["handle"]) for rank in ranks
                           if rank["subgroup"] == place.subgroup)
            transports.append({"transport": self._native.connect_group(
                id=self._id, device=place.device.local_hardware_id, num_sms=self.num_sms,
                low_latency_sms=self.low_latency_sms, ranks_per_device=self.ranks_per_device,
                handles=[base64.b64decode(handle) for _, handle in peers])})
        return transports

    def _check_num_sms(self, num_sms: int | None, devices: Sequence[tuple[str, int]]) -> int:
        if num_sms is None:
            return default_num_sms(devices)
        most = max_num_sms(devices)
        if num_sms > most:
            raise ValueError(
                f"num_sms={num_sms} is too many: the blocks of all ranks that share a device must "
                f"be on it at the same time, which leaves {most} SMs to each here")
        return num_sms

    def _together(self, step: str, work: Callable[[], list[dict]]) -> list[dict]:
        """Does `work` on all processes, and returns the results of all in one list."""
        error, results = None, []
        try:
            results = work()
        except RuntimeError as e:
            error = str(e)
        everyone = [{"error": error, "results": results}]
        if len(self._processes) > 1:
            everyone = self._exchange(step, everyone[0], self._timeout_s)
        errors = {process: theirs["error"] for process, theirs in zip(self._processes, everyone)
                  if theirs["error"] is not None}
        if errors:
            raise RuntimeError(f"the {step} of Group {self._id} failed: " + "; ".join(
                f"process {process}: {error}" for process, error in errors.items()))
        return [result for theirs in everyone for result in theirs["results"]]

    def _exchange(self, step: str, value: dict, timeout_s: float) -> list[dict]:
        return bootstrap.exchange(f"group/{self._id}/{step}", value, self._me, self._processes,
                                  timeout_s)
