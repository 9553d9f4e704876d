"""Device time from a profiler trace: how long the kernels of a program ran on each GPU."""

import glob
import os
import re
import statistics
import tempfile
from collections.abc import Callable

import jax

# XLA names a GPU's plane "/device:GPU:<ordinal>" and its streams' lines "Stream #<n>(<kinds>)".
_GPU_PLANE = re.compile(r"/device:GPU:(\d+)")
_STREAM_LINE = "Stream #"


def record(calls: Callable[[], None]) -> "jax.profiler.ProfileData | None":
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
    profile: "jax.profiler.ProfileData", num_calls: int, kernel: str = ""
) -> dict[int, float]:
    """By GPU of this process, the time that the kernels of one call took, the median over calls.

    Where the kernels do not divide evenly among the calls it is their mean. A GPU without any, and
    a profile that is laid out otherwise than XLA does it today, gives no entry.

    Args:
      profile: of `num_calls` calls of one program, one after the other.
      num_calls: how many there were.
      kernel: a part of the names of those kernels that count; "" counts all of them.
    """
    result = {}
    for plane in profile.planes:
        found = _GPU_PLANE.fullmatch(plane.name)
        if not found:
            continue
        events = sorted(
            (event.start_ns, event.duration_ns)
            for line in plane.lines
            if line.name.startswith(_STREAM_LINE)
            for event in line.events
            if kernel in event.name
        )
        if events:
            result[int(found[1])] = _per_call([duration for _, duration in events], num_calls) / 1e3
    return result


def _per_call(durations: list[float], num_calls: int) -> float:
    per_call, rest = divmod(len(durations), num_calls)
    if rest:
        return sum(durations) / num_calls
    return statistics.median(
        sum(durations[i : i + per_call]) for i in range(0, len(durations), per_call))
