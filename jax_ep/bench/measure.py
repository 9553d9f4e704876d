"""How a program is timed: single calls, calls in a row, and its kernels in a profiler trace."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from jax_ep.bench import trace

_WARM_UPS = 3


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds of one call on this process's devices, taken in up to three ways."""

    single: float  # from the call until its results are there, by the host's clock; the median
    in_a_row: float | None = None  # of many calls enqueued together, by the host's clock; the mean
    # That kernels ran, by local GPU: see trace.device_microseconds. Empty without a trace.
    device: dict[int, float] = dataclasses.field(default_factory=dict)


def times(call: Callable[[], Any], repeats: int, *, kernel: str = "") -> Times:
    """Times a call of a compiled program; on GPUs in all three ways, elsewhere single calls.

    Args:
      call: runs the program and returns its results.
      repeats: timed calls of each way.
      kernel: a part of the name of the kernels whose device time counts; "" counts all.
    """
    on_gpus = jax.default_backend() == "gpu"
    for _ in range(_WARM_UPS if on_gpus else 1):
        jax.block_until_ready(call())
    single = single_call(call, repeats)
    if not on_gpus:
        return Times(single)

    def in_a_row():
        for _ in range(repeats):
            results = call()
        jax.block_until_ready(results)

    start = time.perf_counter()
    in_a_row()
    mean = 1e6 * (time.perf_counter() - start) / repeats
    profile = trace.record(in_a_row)
    return Times(single, mean, trace.device_microseconds(profile, repeats, kernel)
                 if profile else {})


def single_call(call: Callable[[], Any], repeats: int) -> float:
    """Microseconds from a call until its results are there: the median of `repeats`."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)
