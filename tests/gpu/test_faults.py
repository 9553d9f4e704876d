"""Processes that die. Starts its own processes, and is not run inside one."""

import os
import signal
from pathlib import Path

import pytest

from jax_ep.testing import gpus, multiprocess

GPUS = gpus.gpu_ids() if os.environ.get("JAX_PLATFORMS") == "cpu" else []

pytestmark = pytest.mark.skipif(not GPUS, reason="needs GPUs, and JAX_PLATFORMS=cpu")


def layouts():
    result = {"one_gpu": ((GPUS[0],),) * 3} if GPUS else {}
    if len(GPUS) > 1:
        result["own_gpus"] = tuple((gpu,) for gpu in GPUS)
    return result


@pytest.mark.parametrize("layout", ["one_gpu", "own_gpus"])
def test_killed_process(layout):
    if layout not in layouts():
        pytest.skip("needs two GPUs")
    arrangement = gpus.Arrangement(layout, layouts()[layout])
    path = Path(__file__).parent / "faults.py"
    with pytest.raises(multiprocess.ProcessesFailed) as info:
        gpus.launch(f"{path}:killed_process", arrangement, timeout_s=120)
    *others, last = info.value.codes
    assert last == -signal.SIGKILL and others == [0] * len(others), info.value
    survivors = info.value.outputs[:-1]
    assert all("SURVIVED" in output for output in survivors)
    assert any("in vain for rank" in output for output in survivors)
