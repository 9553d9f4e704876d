"""Runs a function in N JAX processes on this machine's CPU, connected by jax.distributed.

    launch("tests/workers.py:exchange", num_processes=2)

calls `exchange()` in each process after `jax.distributed.initialize`. The launcher has its own time
limit, and an error names each process that failed, with the end of its output.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

_TAIL_CHARS = 4000
# A process whose peer has failed gets this long to end by itself, for the sake of its message.
_GRACE_S = 5.0


class ProcessesFailed(AssertionError):
    """Some processes failed or ran out of time; the text has the output of each that did."""


def launch(target: str, num_processes: int, *, devices_per_process: int = 1,
           timeout_s: float = 120.0, env: Mapping[str, str] | None = None) -> list[str]:
    """Runs `target` in every process; returns the processes' outputs by rank.

    `target` is "path/to/file.py:function", or several functions, "path/to/file.py:one,two".
    Raises ProcessesFailed unless all of them end with success within `timeout_s`.
    """
    address = f"127.0.0.1:{_free_port()}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_per_process}",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        **(env or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(num_processes)]
        processes = []
        try:
            for rank, log in enumerate(logs):
                with open(log, "wb") as file:
                    processes.append(subprocess.Popen(
                        [sys.executable, "-m", __name__, target, address, str(num_processes),
                         str(rank)],
                        env=environment, stdout=file, stderr=subprocess.STDOUT))
            _wait(processes, timeout_s)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        outputs = [log.read_text(errors="replace") for log in logs]
    if codes != [0] * num_processes:
        raise ProcessesFailed(_describe(target, codes, outputs, timeout_s))
    return outputs


def _wait(processes: list[subprocess.Popen], timeout_s: float) -> None:
    """Until all have ended, or the limit has passed, or the grace time after a failure."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if any(codes) and not failed:
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(0.05)


def _describe(target: str, codes: list[int | None], outputs: list[str], timeout_s: float) -> str:
    lines = [f"{target} failed"]
    for rank, (code, output) in enumerate(zip(codes, outputs)):
        if code == 0:
            lines.append(f"process {rank}: success")
            continue
        state = f"exit code {code}" if code is not None else f"still running (limit {timeout_s} s)"
        lines.append(f"process {rank}: {state}; the end of its output:\n{output[-_TAIL_CHARS:]}")
    return "\n".join(lines)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _load(target: str) -> list[Callable[[], None]]:
    path, _, names = target.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [getattr(module, name) for name in names.split(",")]


def _main(target: str, address: str, num_processes: str, rank: str) -> None:
    import jax

    jax.distributed.initialize(address, int(num_processes), int(rank))
    try:
        for function in _load(target):
            function()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # An orderly exit would wait for the peers, who may wait for this process.
        os._exit(1)
    jax.distributed.shutdown()


if __name__ == "__main__":
    _main(*sys.argv[1:])
