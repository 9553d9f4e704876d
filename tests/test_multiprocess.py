"""Two JAX processes on one machine's CPU."""

import os
import time

import pytest

from jax_ep.testing import multiprocess

pytestmark = pytest.mark.slow


def launch(function, **options):
    path = os.path.join(os.path.dirname(__file__), "workers.py")
    return multiprocess.launch(f"{path}:{function}", 2, **options)


def test_exchange():
    launch("exchange", devices_per_process=2)


def test_making_groups():
    launch("default_backend,cpu_backend_wants_one_process,disagree,one_process_makes_no_group")


def test_launcher_reports_failures():
    """One process fails, the other hangs: the launcher ends both and tells which did what."""
    with pytest.raises(multiprocess.ProcessesFailed) as info:
        launch("fail_or_hang")
    assert "process 0: still running" in str(info.value)
    assert "process 1: exit code 1" in str(info.value)
    assert "wrong on purpose" in str(info.value)


def test_launcher_has_a_time_limit():
    start = time.monotonic()
    with pytest.raises(multiprocess.ProcessesFailed, match="still running"):
        launch("fail_or_hang", timeout_s=1)
    assert time.monotonic() - start < 10
