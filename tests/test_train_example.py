"""The training example: a short run, its checkpoints, its check, and its text."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def train(folder, *flags):
    """Runs the example on a tiny model; returns what it printed, and its history."""
    command = [
        sys.executable, EXAMPLES / "train_moe.py", "--steps=6", "--eval_every=2",
        "--checkpoint_every=3", "--length=16", "--batch_size=8", "--num_layers=1", "--width=16",
        "--num_heads=2", "--expert_width=8",
        f"--text_dir={pathlib.Path(sysconfig.get_path('stdlib'), 'asyncio')}",
        f"--output_dir={folder / 'out'}", f"--checkpoint_dir={folder / 'checkpoints'}", *flags]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "out" / "history.json").read_text())


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    printed, history = train(tmp_path)
    assert "Resuming" not in printed and "TOO LARGE" not in printed
    assert len(history["nats"]) == len(history["load"]) == 6
    assert [step for step, _ in history["held_out"]] == [0, 2, 4, 6]
    assert (tmp_path / "out" / "train_moe.png").stat().st_size > 10_000
    assert (tmp_path / "checkpoints" / "3").is_dir()

    shutil.rmtree(tmp_path / "checkpoints" / "6")
    printed, resumed = train(tmp_path)
    assert "Resuming after step 3" in printed
    assert resumed == history


def test_text_is_split_by_file_and_the_same_every_time(tmp_path, example_module):
    text = example_module("text")
    for i in range(45):
        (tmp_path / f"{i:02}.py").write_bytes(bytes([i]) * 10)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_bytes(b"\xff")
    training, held_out = text.load(tmp_path)
    assert set(held_out) == {19, 39}
    assert set(training) == set(range(45)) - {19, 39}

    pieces = text.sample(held_out, 4, 5, (1, 2))
    assert pieces.shape == (4, 6) and pieces.dtype == np.uint8
    np.testing.assert_array_equal(pieces, text.sample(held_out, 4, 5, (1, 2)))
    with pytest.raises(ValueError, match="fewer than 20"):
        text.load(tmp_path / "site-packages")


def test_the_check_fails_beyond_its_tolerances(example_module, capsys):
    check = example_module("dense_check").check
    assert check({"loss": 1e-7, "gradient": 1e-6, "routing": -0.1})
    assert not check({"loss": 1e-7, "gradient": 1e-2, "routing": -0.1})
    assert not check({"loss": float("nan"), "gradient": 0.0, "routing": -0.1})
    assert "TOO LARGE" in capsys.readouterr().out
