"""Runs the tests on this machine's GPUs: `python -m jax_ep.testing.gpus`, or `make test-gpu`.

Ranks are arranged in every way that the GPUs here allow: several processes on one GPU, one process
per GPU, one process for all. Each arrangement runs the same tests, in all its processes together.
Needs nothing but Python, jax with CUDA, an installed jax_ep, and the folder of tests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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
_TESTS = ["test_prepare.py", "test_dispatch.py", "test_combine.py", "test_gradients.py",
          "test_transforms.py", "test_group.py", "test_varying_axes.py", "test_errors.py",
          "gpu/test_ranks.py"]
# What starts processes itself.
_LAUNCHERS = {"killed processes": "gpu/test_faults.py", "fabric handles": "gpu/test_fabric.py"}
_NATIVE = "not xla and not reference"
_COMMAND_BUFFERS = ("--xla_gpu_graph_min_graph_size=1 "
                    "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL")
# Of a GPU's memory for JAX's own pools; the workspaces are beside them.
_JAX_MEMORY = 0.6


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Ranks on GPUs."""

    name: str
    visible: tuple[tuple[str, ...], ...]  # by process, the GPUs that it sees
    selection: tuple[str, ...] = ()  # more arguments for pytest
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


def arrangements(gpus: Sequence[str]) -> list[Arrangement]:
    """Those that `gpus` allow; the shorter ones first."""
    first = (gpus[0],)
    quick = ("-m", "not slow")
    result = [
        Arrangement("2 processes on one GPU", (first,) * 2, quick),
        Arrangement("2 processes on one GPU, command buffers", (first,) * 2, quick,
                    _COMMAND_BUFFERS),
        Arrangement("4 processes on one GPU", (first,) * 4, quick),
        Arrangement("8 processes on one GPU", (first,) * 8),
    ]
    count = len(gpus)
    if count > 1:
        result.append(Arrangement("one process per GPU", tuple((gpu,) for gpu in gpus)))
    if count > 2:
        half = count // 2
        result.append(Arrangement("2 processes on all GPUs",
                                  (tuple(gpus[:half]), tuple(gpus[half:2 * half])), quick))
    result.append(Arrangement("one process", (tuple(gpus),)))
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

        def control(*arguments: str, **options) -> None:
            subprocess.run(["nvidia-cuda-mps-control", *arguments], env={**os.environ, **env},
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
    paths = [str(tests / name) for name in _TESTS]
    command = ["-v", "--tb=short", "-k", _NATIVE, *arrangement.selection, *arguments, *paths]
    start = time.monotonic()
    try:
        outputs = launch(f"pytest:{shlex.join(command)}", arrangement, timeout_s=timeout_s)
        totals = dict.fromkeys(_total(output) for output in outputs)
        result = "passed: " + "; ".join(totals)
    except multiprocess.ProcessesFailed as error:
        print(error)
        result = "FAILED: processes " + ", ".join(map(str, error.failed))
    return f"{result} ({time.monotonic() - start:.0f} s)"


def _total(output: str) -> str:
    """Pytest's last line: "12 passed, 3 skipped"."""
    found = re.findall(r"=+ (.* (?:passed|skipped|deselected).*?) in [\d.]+s.* =+", output)
    return found[-1] if found else "no summary"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=Path, default=Path("tests"), help="the folder of tests")
    parser.add_argument("--only", default="", help="arrangements whose name has this part")
    parser.add_argument("--timeout", type=float, default=550, help="seconds for each arrangement")
    options, arguments = parser.parse_known_args()
    gpus = gpu_ids()
    if not gpus:
        print("no GPU here, or jax_ep._native._cuda is not built; python -m jax_ep.info says more")
        return 1

    results = {}
    for arrangement in arrangements(gpus):
        if options.only in arrangement.name:
            print(f"{arrangement.name} ...", flush=True)
            results[arrangement.name] = _run(arrangement, options.tests, options.timeout, arguments)
            print(results[arrangement.name], flush=True)
    for name, test in _LAUNCHERS.items():
        if options.only in name:
            print(f"{name} ...", flush=True)
            run = subprocess.run(
                [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider",
                 str(options.tests / test)],
                env={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=options.timeout, text=True,
                stdout=subprocess.PIPE)
            print(run.stdout)
            results[name] = "FAILED" if run.returncode else f"passed: {_total(run.stdout)}"
    print()
    for name, result in results.items():
        print(f"{name:<40} {result}")
    return int(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
