"""How a program is timed: single calls, calls in a row, and its kernels in a profiler trace."""

import collections
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from jax_ep import bootstrap
from jax_ep.bench import trace

_IN_FLIGHT = 4  # calls in a row: the device never waits, and their results fit in memory
_TIMEOUT_S = 300.0
_exchanges = itertools.count()


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds of one call on this process's devices, taken in up to three ways."""

    # By the host's clock: from the call until its results are there, the median; and of calls
    # enqueued one behind the other, the mean.
    single: float
    in_a_row: float | None = None
    # That kernels ran, by local GPU: see trace.device_microseconds. Empty without a trace.
    device: dict[int, float] = dataclasses.field(default_factory=dict)


def times(call: Callable[[], Any], repeats: int, *, kernel: str = "",
          before: Callable[[], Any] | None = None) -> Times:
    """Times a call of a compiled program; on GPUs in all three ways, elsewhere single calls.

    Args:
      call: runs the program and returns its results.
      repeats: timed calls of each way.
      kernel: a pattern in the names of the kernels whose device time counts; "" counts all.
      before: as `profiled` has it; not with `kernel` "", as its own kernels would count, too.
    """
    warm_up(call)
    single = single_call(call, repeats)
    if jax.default_backend() != "gpu":
        return Times(single)
    mean = calls_in_a_row(call, repeats)
    profile = profiled(call, repeats, before if kernel else None)
    return Times(single, mean, trace.device_microseconds(profile, repeats, kernel)
                 if profile else {})


def warm_up(call: Callable[[], Any]) -> None:
    """Makes the calls whose time does not count."""
    jax.block_until_ready(call())
    if jax.default_backend() == "gpu":
        # With as many results alive as later, so that the pool of memory has grown already: where
        # ranks share a GPU it begins empty.
        jax.block_until_ready([call() for _ in range(_IN_FLIGHT)])


def calls_in_a_row(call: Callable[[], Any], repeats: int) -> float:
    """Microseconds of a call, of `repeats` enqueued one behind the other, by the host's clock."""
    everyone(None)  # ranks that begin together do not wait for one another
    in_flight = collections.deque()
    start = time.perf_counter()
    for _ in range(repeats):
        if len(in_flight) == _IN_FLIGHT:
            jax.block_until_ready(in_flight.popleft())
        in_flight.append(call())
    jax.block_until_ready(list(in_flight))
    return 1e6 * (time.perf_counter() - start) / repeats


def profiled(call: Callable[[], Any], repeats: int,
             before: Callable[[], Any] | None) -> "jax.profiler.ProfileData | None":
    """The profile of `repeats` calls in a row, each behind one of `before`, if there is any.

    `before` keeps the devices busy until the host has enqueued the call. Otherwise short kernels
    wait for the host, and for the ranks that it serves later.
    """

    def both() -> Any:
        if before is not None:
            before()
        return call()

    return trace.record(lambda: calls_in_a_row(both, repeats))


def single_call(call: Callable[[], Any], repeats: int) -> float:
    """Microseconds from a call until its results are there: the median of `repeats`."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


def everyone(value: Any) -> list[Any]:
    """The JSON-serialisable values of all processes, which must all call this, in their order."""
    processes = list(range(jax.process_count()))
    if len(processes) == 1:
        return [value]
    return bootstrap.exchange(f"bench/{next(_exchanges)}", value, jax.process_index(), processes,
                              _TIMEOUT_S)
