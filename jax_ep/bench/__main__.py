"""Times jax_ep on this machine's devices: `python -m jax_ep.bench`.

Prints the time of every operation of an MoE layer without its experts, beside what else a JAX user
has for the same job and the rates that the hardware allows, on the same inputs. On GPUs "device" is
how long the operation's kernels ran on the first rank, "max" on the slowest one, and "in a row" the
time of a call among many by the host's clock; elsewhere only "single" calls are timed. "link" are
the bytes that the busiest rank sends to others or gets from them, without its own tokens; "rows"
all rows of a rank. With --mode=ll it times few tokens, as in decoding, on the low-latency path and
on the ordinary one. docs/performance.md has results and what limits them.
"""

import ctypes
import dataclasses
import os
from pathlib import Path

from absl import app, flags

from jax_ep.bench.settings import LOW_LATENCY_TOKENS, PRESETS, ROUTINGS, Options, Setting

_SETTING = flags.DEFINE_enum(
    "setting", None, list(PRESETS),
    "Sizes and routing, which the next flags change; deepseek on GPUs, else cpu.")
_MODE = flags.DEFINE_enum(
    "mode", "ht", ["ht", "ll"],
    "ht: every operation; ll: few tokens, on the low-latency path beside the ordinary one.")
_TOKENS = flags.DEFINE_list(
    "tokens", None, "Tokens per rank; with --mode=ll a list, 1,8,32,128,256,512 on GPUs, else 1,8.")
_HIDDEN = flags.DEFINE_integer("hidden", None, "Elements of a token.", lower_bound=1)
_EXPERTS = flags.DEFINE_integer("experts", None, "Experts, a multiple of the ranks.", lower_bound=1)
_TOPK = flags.DEFINE_integer("topk", None, "Experts per token.", lower_bound=1)
_ROUTING = flags.DEFINE_enum("routing", None, ROUTINGS, "How tokens choose their experts.")
_RANKS = flags.DEFINE_integer(
    "ranks", None, "EP ranks, one device each; all GPUs, else 8 CPU devices.", lower_bound=1)
_PROCESSES = flags.DEFINE_integer(
    "processes", 1, "Processes that the ranks are spread over; with more processes than GPUs they "
    "share GPUs (under CUDA's MPS).", lower_bound=1)
_DTYPES = flags.DEFINE_list(
    "dtypes", None, "Dtypes of the tokens; fp8 is bfloat16 quantized on the way. bfloat16 on GPUs, "
    "else float32,bfloat16; bfloat16,fp8 with --mode=ll.")
_LAYOUTS = flags.DEFINE_list("layouts", ["expert"], "Layouts of the rows: expert, rank, padded.")
_SMS = flags.DEFINE_list("sms", None, "SMs of the CUDA kernels, a list; jax_ep's choice if empty.")
_CAPACITY = flags.DEFINE_float(
    "capacity_factor", 1.25, "Rows, as a factor of the mean load; more where routing needs more.")
_BACKENDS = flags.DEFINE_list("backends", None, "Backends; cuda on GPUs, else the native one, xla.")
_REPEATS = flags.DEFINE_integer("repeats", 10, "Timed calls of each step.", lower_bound=1)
_PEERS = flags.DEFINE_bool(
    "peers", None, "Time what else crosses the link; the default is to, unless ranks share a GPU.")
_OVERLAP = flags.DEFINE_bool(
    "overlap", None, "On GPUs, time dispatch beside matrix products; as for --peers.")
_JSON = flags.DEFINE_string("json", None, "File for all figures, written after every step.")
_TIME_LIMIT = flags.DEFINE_float("time_limit", 600, "Seconds after which --processes are ended.")


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


def _setting(on_gpus: bool) -> tuple[str, Setting]:
    """The preset with what the flags change of it, and its name."""
    name = _SETTING.value or ("deepseek" if on_gpus else "cpu")
    tokens = _tokens(on_gpus)
    changes = {"num_tokens": tokens and tokens[0], "hidden": _HIDDEN.value,
               "num_experts": _EXPERTS.value, "num_topk": _TOPK.value, "routing": _ROUTING.value}
    changes = {field: value for field, value in changes.items() if value is not None}
    return name + " changed" * bool(changes), dataclasses.replace(PRESETS[name], **changes)


def _tokens(on_gpus: bool) -> list[int] | None:
    """Of the flag; None for those of the preset."""
    if _TOKENS.value is None and _MODE.value == "ll":
        return list(LOW_LATENCY_TOKENS) if on_gpus else [1, 8]
    if _TOKENS.value is None:
        return None
    if _MODE.value == "ht" and len(_TOKENS.value) > 1:
        raise app.UsageError("--tokens is one number, unless with --mode=ll")
    return [int(tokens) for tokens in _TOKENS.value]


def _dtypes(on_gpus: bool) -> list[str]:
    if _DTYPES.value:
        return _DTYPES.value
    if _MODE.value == "ll":
        return ["bfloat16", "fp8"]
    return ["bfloat16"] if on_gpus else ["float32", "bfloat16"]


def _options(ranks: int, on_gpus: bool, ranks_per_gpu: int = 1) -> Options:
    """The Options that the flags ask for.

    Args:
      ranks: how many there are.
      on_gpus: the devices' kind, which decides defaults.
      ranks_per_gpu: how many share one.
    """
    name, setting = _setting(on_gpus)
    shared = ranks_per_gpu > 1
    return Options(
        mode=_MODE.value,
        ranks=ranks,
        ranks_per_gpu=ranks_per_gpu,
        name=name,
        setting=setting,
        tokens=_tokens(on_gpus) or [setting.num_tokens],
        dtypes=_dtypes(on_gpus),
        layouts=_LAYOUTS.value,
        sms=[int(sms) for sms in _SMS.value or []] or [None],
        backends=_BACKENDS.value,
        capacity_factor=_CAPACITY.value,
        repeats=_REPEATS.value,
        peers=not shared if _PEERS.value is None else _PEERS.value,
        overlap=on_gpus and (not shared if _OVERLAP.value is None else _OVERLAP.value),
        json_file=_JSON.value and os.path.abspath(_JSON.value),
    )


def spread(gpus: list[str], num_processes: int) -> tuple[tuple[str, ...], ...]:
    """By process, the GPUs that it sees: all in equal parts, or one that it shares."""
    count = len(gpus)
    starts = [i * count // num_processes for i in range(num_processes + 1)]
    return tuple(tuple(gpus[start : max(end, start + 1)]) for start, end in zip(starts, starts[1:]))


def _launch() -> None:
    """Runs the ranks in processes of their own; passes on what the first one prints."""
    from jax_ep.bench import run
    from jax_ep.testing import gpus, multiprocess

    target = f"{Path(run.__file__)}:from_environment"
    ids = [] if os.environ.get("JAX_PLATFORMS") == "cpu" else gpus.gpu_ids()
    limits = {"timeout_s": _TIME_LIMIT.value, "follow": 0}
    if not ids:
        ranks = _RANKS.value or 8
        if ranks % _PROCESSES.value:
            raise app.UsageError(f"--processes must divide the {ranks} ranks")
        options = _options(ranks, on_gpus=False)
        multiprocess.launch(
            target, _PROCESSES.value, devices_per_process=ranks // _PROCESSES.value,
            env={run.OPTIONS_VARIABLE: options.to_json()}, **limits)
        return
    arrangement = gpus.Arrangement("bench", spread(ids, _PROCESSES.value))
    ranks = sum(map(len, arrangement.visible))
    if _RANKS.value not in (None, ranks):
        raise app.UsageError(f"{_PROCESSES.value} processes on {len(ids)} GPUs make {ranks} ranks; "
                             "choose GPUs with CUDA_VISIBLE_DEVICES")
    options = _options(ranks, True, arrangement.processes_per_gpu)
    gpus.launch(target, arrangement, env={run.OPTIONS_VARIABLE: options.to_json()}, **limits)


def main(argv):
    del argv
    if _PROCESSES.value > 1:
        return _launch()
    keep_freed_memory()
    # Before JAX starts: a CPU has as many devices as it is told to.
    count = f"--xla_force_host_platform_device_count={_RANKS.value or 8}"
    os.environ.setdefault("XLA_FLAGS", count)
    import jax

    from jax_ep.bench import run

    on_gpus = jax.default_backend() == "gpu"
    ranks = _RANKS.value or len(jax.devices())
    if len(jax.devices()) < ranks:
        raise app.UsageError(f"--ranks={ranks}, and JAX has {len(jax.devices())} devices")
    run.run(_options(ranks, on_gpus))


if __name__ == "__main__":
    app.run(main)
