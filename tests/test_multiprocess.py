"""Two JAX processes on one machine's CPU."""

import os

import pytest

from jax_ep.testing import multiprocess

pytestmark = pytest.mark.slow


def launch(function, **options):
    path = os.path.join(os.path.dirname(__file__), "workers.py")
    return multiprocess.launch(f"{path}:{function}", 2, **options)


def test_exchange():
    launch("exchange", devices_per_process=2)


def test_default_backend_of_several_processes():
    launch("default_backend")


def test_cpu_backend_wants_one_process():
    launch("cpu_backend_wants_one_process")


def test_disagreement_on_settings():
    launch("disagree")


def test_one_process_makes_no_group():
    launch("one_process_makes_no_group")


def test_launcher_reports_failures():
    with pytest.raises(multiprocess.ProcessesFailed) as info:
        launch("fail_in_one")
    assert "process 1: exit code 1" in str(info.value)
    assert "wrong on purpose" in str(info.value)


def test_launcher_has_a_time_limit():
    with pytest.raises(multiprocess.ProcessesFailed) as info:
        launch("hang", timeout_s=12)
    assert str(info.value).count("still running") == 2
    assert "about to hang" in str(info.value)
