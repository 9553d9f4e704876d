"""Device time from a profiler trace: how long the kernels of a program ran on each GPU."""

import glob
import os
import re
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax

# XLA names a GPU's plane "/device:GPU:<ordinal>" and its streams' lines "Stream #<n>(<kinds>)".
_GPU_PLANE = re.compile(r"/device:GPU:(\d+)")
_STREAM_LINE = "Stream #"


def record(calls: Callable[[], Any]) -> "jax.profiler.ProfileData | None":
    """The profile of what `calls` does until the devices have done it; None if there is none."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError:  # another profiler has the device, or there is none
            calls()  # all the same: other processes run them too
            return None
        try:
            calls()
        finally:
            jax.profiler.stop_trace()
        files = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
        return jax.profiler.ProfileData.from_file(files[0]) if files else None


def device_microseconds(
    profile: "jax.profiler.ProfileData", num_calls: int, kernel: str = "",
    part: slice = slice(None),
) -> dict[int, float]:
    """By GPU of this process, how long one call had kernels running: the median over the calls.

    Time in which several kernels run counts once, and time between kernels does not count. Where
    the kernels do not divide evenly among the calls it is the mean. A GPU without any has no entry,
    nor has one in a profile that is laid out otherwise than XLA does it today.

    Args:
      profile: of `num_calls` calls of one program, one after the other.
      num_calls: how many there were.
      kernel: a pattern that is found in the names of those kernels that count; "" counts all, and
        copies.
      part: which of them count, in the order in which they began on a GPU.
    """
    result = {}
    for plane in profile.planes:
        found = _GPU_PLANE.fullmatch(plane.name)
        if not found:
            continue
        spans = sorted(
            (event.start_ns, event.start_ns + event.duration_ns)
            for line in plane.lines
            if line.name.startswith(_STREAM_LINE)
            for event in line.events
            if re.search(kernel, event.name)
        )[part]
        if spans:
            result[int(found[1])] = _per_call(spans, num_calls) / 1e3
    return result


def _per_call(spans: list[tuple[float, float]], num_calls: int) -> float:
    per_call, rest = divmod(len(spans), num_calls)
    if rest:
        return _covered(spans) / num_calls
    return statistics.median(
        _covered(spans[i : i + per_call]) for i in range(0, len(spans), per_call))


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans, which are sorted by their starts."""
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
