"""Which arrangements of ranks the launcher of tests on GPUs runs; no GPU is needed."""

import sys

import pytest

from jax_ep.testing import gpus


@pytest.fixture
def only(monkeypatch):
    """Runs the command with --only on a machine of so many GPUs: exit status, and what it ran."""
    def run(part, num_gpus):
        ran = []
        monkeypatch.setattr(gpus, "gpu_ids", lambda: [str(i) for i in range(num_gpus)])
        monkeypatch.setattr(gpus, "_run", lambda arrangement, *_: ran.append(arrangement.name))
        monkeypatch.setattr(sys, "argv", ["gpus", "--only", part])
        return gpus.main(), ran
    return run


def test_arrangements_are_chosen_by_a_part_of_their_name(only):
    assert only("one process", 2) == (0, ["one process per GPU", "one process for all GPUs"])


def test_a_name_that_no_arrangement_has_is_a_failure(only, capsys):
    assert only("2 processes on all GPUs", 2) == (1, [])
    assert "2 processes on all GPUs" in capsys.readouterr().out
