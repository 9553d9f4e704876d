"""Runs a function, or pytest, in N JAX processes on this machine, connected by jax.distributed.

    launch("tests/workers.py:exchange", num_processes=2)
    launch("pytest:-q tests/test_prepare.py", num_processes=2)

calls `exchange()`, or runs the tests, in each process after `jax.distributed.initialize`. The
launcher has its own time limit, and an error names each process that failed, with the end of its
output. The processes are on the CPU unless `env` says otherwise; jax_ep.testing.gpus puts them on
GPUs.

In a launched process, numpy can read any array of which every device's process reads it too: what
the tests assert of whole arrays they assert in every process.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import importlib.util
import itertools
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_TAIL_CHARS = 10000  # room for the stack of a crash under pytest, whose first lines matter most
# A process whose peer has failed gets this long to end by itself, for the sake of its message.
_GRACE_S = 5.0
_GATHER_TIMEOUT_S = 100.0


class ProcessesFailed(AssertionError):
    """Some processes failed or ran out of time; the text has the output of each that did.

    Attributes:
      codes: by process, its exit code, or None where it was still running.
      outputs: by process, what it wrote.
    """

    def __init__(self, text: str, codes: list[int | None], outputs: list[str]):
        super().__init__(text)
        self.codes = codes
        self.outputs = outputs

    @property
    def failed(self) -> list[int]:
        """The processes that did not end with success."""
        return [rank for rank, code in enumerate(self.codes) if code != 0]


def launch(target: str, num_processes: int, *, devices_per_process: int = 1,
           timeout_s: float = 120.0, env: Mapping[str, str] | None = None,
           rank_env: Callable[[int], Mapping[str, str]] | None = None,
           follow: int | None = None) -> list[str]:
    """Runs `target` in every process; returns the processes' outputs by rank.

    Args:
      target: "path/to/file.py:function", several functions, "path/to/file.py:one,two", or
        "pytest:" and pytest's arguments.
      num_processes: how many; each has `devices_per_process` CPU devices, unless `env` says
        otherwise.
      timeout_s: when to end those that still run.
      env, rank_env: environment variables, for all and by rank.
      follow: the rank of a process whose output is also written to stdout, as it comes.

    Raises:
      ProcessesFailed: unless all of them end with success in time.
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
                        env={**environment, **(rank_env(rank) if rank_env else {})},
                        stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT))
            with _Follower(logs[follow]) if follow is not None else contextlib.nullcontext():
                _wait(processes, timeout_s)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        outputs = [log.read_text(errors="replace") for log in logs]
    if codes != [0] * num_processes:
        raise ProcessesFailed(_describe(target, codes, outputs, timeout_s), codes, outputs)
    return outputs


class _Follower:
    """While it is entered, a thread writes to stdout what is added to a file."""

    def __init__(self, path: Path):
        self._path = path
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        with open(self._path, errors="replace") as file:
            while True:
                last = self._end.wait(0.2)
                sys.stdout.write(file.read())
                sys.stdout.flush()
                if last:
                    return


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
    """One below those that Linux gives to outgoing connections, which could take it meanwhile."""
    while True:
        port = random.randrange(10000, 32768)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("0.0.0.0", port))
            return port


def _load(target: str) -> list[Callable[[], Any]]:
    if target.startswith("pytest:"):
        return [lambda: _run_pytest(shlex.split(target.removeprefix("pytest:")))]
    path, _, names = target.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [getattr(module, name) for name in names.split(",")]


def _run_pytest(arguments: list[str]) -> None:
    import pytest

    # After a failure the processes are no longer at the same point of the same program.
    code = pytest.main(["-x", "-p", "no:cacheprovider", *arguments])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"pytest: {code!r}")


def _make_arrays_readable() -> None:
    """Lets numpy read arrays that are partly on other processes' devices."""
    import jax
    import jax.numpy as jnp

    array_type = type(jnp.zeros(()))
    read_here = array_type.__array__

    def read(array: jax.Array, *args, **kwargs):
        if array.is_fully_addressable or array.is_fully_replicated:
            return read_here(array, *args, **kwargs)
        return _gather(array).__array__(*args, **kwargs)

    array_type.__array__ = read


_gathers = collections.defaultdict(itertools.count)


def _gather(array: Any) -> Any:
    """The whole of a global array, by way of the key-value store: slow, and independent of NCCL."""
    import jax
    import numpy as np

    from jax_ep import bootstrap

    processes = sorted({device.process_index for device in array.sharding.device_set})
    parts = []
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            data = np.asarray(shard.data)
            bounds = [s.indices(n)[:2] for s, n in zip(shard.index, array.shape)]
            parts.append((bounds, base64.b64encode(data.tobytes()).decode()))
    key = f"testing/gather/{processes}/{next(_gathers[tuple(processes)])}"
    whole = np.empty(array.shape, array.dtype)
    for theirs in bootstrap.exchange(key, parts, jax.process_index(), processes, _GATHER_TIMEOUT_S):
        for bounds, text in theirs:
            data = np.frombuffer(base64.b64decode(text), array.dtype)
            shape = [stop - start for start, stop in bounds]
            whole[tuple(slice(*b) for b in bounds)] = data.reshape(shape)
    return whole


def _main(target: str, address: str, num_processes: str, rank: str) -> None:
    import jax

    jax.distributed.initialize(address, int(num_processes), int(rank))
    try:
        _make_arrays_readable()
        for function in _load(target):
            function()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # An orderly exit would wait for the peers, who may wait for this process.
        os._exit(1)
    jax.distributed.shutdown()


if __name__ == "__main__":
    _main(*sys.argv[1:])
