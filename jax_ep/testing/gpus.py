"""Runs the tests on this machine's GPUs: `python -m jax_ep.testing.gpus`, or `make test-gpu`.

Ranks are arranged in every way that the GPUs here allow: several processes on one GPU, one process
per GPU, one process for all. An arrangement runs its tests in all its processes together, and ends
at the first failure, where the processes part; the other arrangements run nevertheless. Every one
has a time limit.
Needs nothing but Python, jax with CUDA, an installed jax_ep, and the folder of tests.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jax_ep.testing import multiprocess

# What runs in step in all processes. The reference is tested elsewhere.
_MOVES = ("test_prepare.py", "test_dispatch.py", "test_combine.py", "test_low_latency.py")
_RANKS = ("gpu/test_ranks.py", "gpu/test_low_latency_ranks.py")
_TESTS = (*_MOVES, "test_quantize.py", "test_gradients.py", "test_transforms.py", "test_group.py",
          "test_varying_axes.py", "test_errors.py", *_RANKS, "test_moe.py")
# What starts processes itself.
_LAUNCHERS = {"killed processes": "gpu/test_faults.py", "fabric handles": "gpu/test_fabric.py"}
_NATIVE = "not xla and not reference"
_QUICK = "not slow"
_ENV = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}  # no TF32: layers are compared with float32
_COMMAND_BUFFERS = ("--xla_gpu_graph_min_graph_size=1 "
                    "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL")
# Of a GPU's memory for JAX's own pools; the workspaces are beside them.
_JAX_MEMORY = 0.6


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Ranks on GPUs."""

    name: str
    visible: tuple[tuple[str, ...], ...]  # by process, the GPUs that it sees
    tests: tuple[str, ...] = _TESTS
    selection: str = _QUICK  # pytest's -k; it knows names and markers
    xla_flags: str = ""

    @property
    def processes_per_gpu(self) -> int:
        everywhere = [gpu for gpus in self.visible for gpu in gpus]
        return max(everywhere.count(gpu) for gpu in everywhere)


def gpu_ids() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    from jax_ep import backends

    if not backends.has_cuda():
        return []
    from jax_ep._native import _cuda

    count = len(_cuda.machine_info()["devices"])
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named else [str(i) for i in range(count)])[:count]


def arrangements(gpus: Sequence[str], slow: bool = False) -> list[Arrangement]:
    """Those that `gpus` allow, the quick ones first; each is to take less than four minutes."""
    first = (gpus[0],)
    each = tuple((gpu,) for gpu in gpus)
    count = len(gpus)
    result = [
        Arrangement("2 processes on one GPU", (first,) * 2),
        Arrangement("2 processes on one GPU, command buffers", (first,) * 2, (*_MOVES, *_RANKS),
                    xla_flags=_COMMAND_BUFFERS),
        Arrangement("4 processes on one GPU", (first,) * 4,
                    (*_MOVES, "test_transforms.py", "test_group.py", *_RANKS)),
        # The matrices of 8 ranks are slow tests.
        Arrangement("8 processes on one GPU", (first,) * 8,
                    (*_MOVES, "test_group.py", "test_varying_axes.py", *_RANKS),
                    "R8 or test_group or test_varying or "
                    "((test_ranks or test_low_latency_ranks) and not slow)"),
    ]
    if count > 1:
        result.append(Arrangement("one process per GPU", each))
    if count > 2:
        half = count // 2
        result.append(Arrangement("2 processes on all GPUs",
                                  (tuple(gpus[:half]), tuple(gpus[half:2 * half])),
                                  (*_MOVES, "test_group.py", *_RANKS)))
    result.append(Arrangement("one process for all GPUs", (tuple(gpus),)))
    if slow:
        result.append(Arrangement("slow tests", each if count > 1 else (first,) * 2,
                                  selection="slow"))
    return result


def launch(target: str, arrangement: Arrangement, *, timeout_s: float = 300.0,
           env: Mapping[str, str] | None = None, follow: int | None = None) -> list[str]:
    """multiprocess.launch with the processes on GPUs; under MPS where they share one."""
    sharing = arrangement.processes_per_gpu
    environment = {
        "JAX_PLATFORMS": "cuda",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {arrangement.xla_flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{_JAX_MEMORY / sharing:.3f}",
        **(env or {}),
    }

    def rank_env(rank: int) -> dict[str, str]:
        own = {"CUDA_VISIBLE_DEVICES": ",".join(arrangement.visible[rank])}
        if sharing > 1:  # NCCL refuses two ranks on a GPU unless it takes them for two hosts
            own["NCCL_HOSTID"] = f"rank{rank}"
        return own

    with mps() if sharing > 1 else contextlib.nullcontext({}) as mps_env:
        return multiprocess.launch(target, len(arrangement.visible), timeout_s=timeout_s,
                                   env={**environment, **mps_env}, rank_env=rank_env, follow=follow)


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """A CUDA multi-process service of its own; gives the environment of its clients.

    Without it the kernels of two processes take turns on a GPU, milliseconds each. A client that is
    killed may leave the service useless, so that every launch has a new one.
    """
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        env = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in env.values():
            os.mkdir(path)
        control_env = {**os.environ, **env}
        # The service numbers the GPUs that it sees anew for its clients, which name them as here.
        control_env.pop("CUDA_VISIBLE_DEVICES", None)

        def control(*arguments: str, **options) -> None:
            subprocess.run(["nvidia-cuda-mps-control", *arguments], env=control_env,
                           timeout=30, stdout=subprocess.DEVNULL, **options)

        control("-d", check=True)
        try:
            yield env
        finally:
            try:
                control(input=b"quit -t 5\n")
            except subprocess.TimeoutExpired:
                pid = Path(env["CUDA_MPS_PIPE_DIRECTORY"], "nvidia-cuda-mps-control.pid")
                if pid.exists():
                    os.kill(int(pid.read_text()), signal.SIGKILL)


def _run(arrangement: Arrangement, tests: Path, timeout_s: float, arguments: Sequence[str]) -> str:
    """Runs the tests in one arrangement; prints the failures, and returns the result in a line."""
    paths = [str(tests / name) for name in arrangement.tests]
    command = ["-v", "--tb=short", "-k", f"{_NATIVE} and ({arrangement.selection})", *arguments,
               *paths]
    try:
        outputs = launch(f"pytest:{shlex.join(command)}", arrangement, timeout_s=timeout_s,
                         env=_ENV)
    except multiprocess.ProcessesFailed as error:
        print(error)
        processes = ", ".join(map(str, error.failed))
        return f"FAILED: {_total(error.outputs)}; processes {processes}"
    except (OSError, subprocess.SubprocessError) as error:  # of MPS
        return f"FAILED: {error!r}"
    return _total(outputs)


def _run_launcher(test: Path, timeout_s: float) -> str:
    """Runs a test that starts processes itself, as _run does."""
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "--tb=short", "-p", "no:cacheprovider",
               str(test)]
    with tempfile.TemporaryFile("w+") as file, subprocess.Popen(
            command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=file,
            stderr=subprocess.STDOUT) as process:
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # so that it ends what it has started
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        file.seek(0)
        output = file.read()
    print(output)
    return ("FAILED: " if process.returncode else "") + _total([output])


def _total(outputs: Sequence[str]) -> str:
    """How many tests passed, failed and were skipped, by the outputs of `pytest -v`.

    A test has the most telling state that it had in any process; those that are not on the devices
    of a test skip it.
    """
    order = ("SKIPPED", "PASSED", "FAILED", "ERROR").index
    states = {}
    for output in outputs:
        for test, state in re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", output, re.M):
            states[test] = max(states.get(test, state), state, key=order)
    counts = collections.Counter(states.values())
    return (f"{counts['PASSED']} passed, {counts['FAILED'] + counts['ERROR']} failed, "
            f"{counts['SKIPPED']} skipped")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Other arguments are given to pytest.")
    parser.add_argument("--tests", type=Path, default=Path("tests"), help="the folder of tests")
    parser.add_argument("--only", default="", help="arrangements whose name has this part")
    parser.add_argument("--slow", action="store_true", help="the slow tests too, at the end")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each arrangement")
    options, arguments = parser.parse_known_args()
    gpus = gpu_ids()
    if not gpus:
        print("no GPU here, or jax_ep._native._cuda is not built; python -m jax_ep.info says more")
        return 1

    runs = {arrangement.name: functools.partial(_run, arrangement, options.tests, options.timeout,
                                                arguments)
            for arrangement in arrangements(gpus, options.slow)}
    runs |= {name: functools.partial(_run_launcher, options.tests / test, options.timeout)
             for name, test in _LAUNCHERS.items()}
    chosen = {name: run for name, run in runs.items() if options.only in name}
    if not chosen:
        print(f"no arrangement of these {len(gpus)} GPUs has {options.only!r} in its name")
        return 1
    results = {}
    for name, run in chosen.items():
        print(f"{name} ...", flush=True)
        start = time.monotonic()
        results[name] = f"{run()} ({time.monotonic() - start:.0f} s)"
        print(f"{name}: {results[name]}", flush=True)
    print()
    for name, result in results.items():
        print(f"{name:<40} {result}")
    return int(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
