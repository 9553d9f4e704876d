"""Times jax_ep on this machine's devices: `python -m jax_ep.bench`.

Prints, for each dtype, the median time of every operation over all ranks, and the payload's rate,
for the native backend and for the reference ("xla") on the same inputs, beside a plain copy of
the same bytes.
"""

import ctypes
import os
import platform

from absl import app, flags

_RANKS = flags.DEFINE_integer("ranks", 8, "EP ranks, one device each.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 1024, "Tokens per rank.", lower_bound=0)
_HIDDEN = flags.DEFINE_integer("hidden", 1024, "Elements of a token.", lower_bound=1)
_EXPERTS = flags.DEFINE_integer("experts", 32, "Experts, a multiple of the ranks.", lower_bound=1)
_TOPK = flags.DEFINE_integer("topk", 4, "Experts per token.", lower_bound=1)
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "Dtypes of the tokens.")
_LAYOUT = flags.DEFINE_enum("layout", "expert", ["expert", "rank", "padded"], "Layout of the rows.")
_CAPACITY = flags.DEFINE_float("capacity_factor", 1.25, "Rows, as a factor of the mean load.")
_BACKENDS = flags.DEFINE_list("backends", None, "Backends; the native one and xla by default.")
_REPEATS = flags.DEFINE_integer("repeats", 10, "Timed calls of each step.", lower_bound=1)


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory instead of handing it back to the system.

    XLA:CPU allocates results and scratch anew for every call; otherwise most of a call's time goes
    into page faults on them (5 to 6 times of it, measured), whichever backend runs.
    """
    arena_max, mmap_max, trim_threshold = -8, -4, -1  # malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(
        mallopt(arena_max, 1) and mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1)
    )


def main(argv):
    del argv
    kept = keep_freed_memory()
    # Before JAX starts: a CPU has as many devices as it is told to.
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={_RANKS.value}")
    import jax

    from jax_ep import backends
    from jax_ep.bench import measure

    devices = jax.devices()
    if len(devices) < _RANKS.value:
        raise app.UsageError(f"--ranks={_RANKS.value}, and JAX has {len(devices)} devices")
    native, reason = backends.choose(devices, None)
    names = _BACKENDS.value or list(dict.fromkeys([native, "xla"]))
    print(
        f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}, "
        f"{os.cpu_count()} cores, {platform.machine()}; native backend {native}: {reason}"
    )
    print(
        f"{_RANKS.value} ranks, {_TOKENS.value} tokens per rank, hidden {_HIDDEN.value}, "
        f"top-{_TOPK.value} of {_EXPERTS.value} experts, layout {_LAYOUT.value}, "
        f"capacity factor {_CAPACITY.value:g}; median of {_REPEATS.value}; "
        f"freed host memory {'kept' if kept else 'not kept'} between calls"
    )
    for dtype in _DTYPES.value:
        setting = measure.Setting(
            _RANKS.value,
            _TOKENS.value,
            _HIDDEN.value,
            _EXPERTS.value,
            _TOPK.value,
            dtype,
            _LAYOUT.value,
            _CAPACITY.value,
        )
        results = [measure.run(setting, name, _REPEATS.value) for name in names]
        payload = results[0][1].moved_bytes
        print(f"\n{dtype}: {payload / 1e6:.1f} MB of rows in all")
        print(f"{'step':<18}" + "".join(f"{name + ' us':>12}{'GB/s':>8}" for name in names), end="")
        print(f"{'speed-up':>10}{'  scratch MB per device':<}")
        for row in zip(*results):
            print(f"{row[0].step:<18}", end="")
            for result in row:
                print(f"{result.microseconds:12.0f}{result.gigabytes_per_second:8.2f}", end="")
            speedup = row[-1].microseconds / row[0].microseconds
            scratch = ", ".join(f"{(result.temp_bytes or 0) / 1e6:.1f}" for result in row)
            print(f"{speedup:9.1f}x  {scratch}")
        copy = measure.memcpy(payload, _REPEATS.value)
        print(f"{'memcpy of the rows':<18}{copy.microseconds:12.0f}{copy.gigabytes_per_second:8.2f}")


if __name__ == "__main__":
    app.run(main)
