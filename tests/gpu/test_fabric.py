"""Groups in memory that is shared by fabric handles, where this machine has them.

Starts its own processes, and is not run inside one.
"""

import os
import re
import shlex
from pathlib import Path

import pytest

from jax_ep import memory
from jax_ep.testing import gpus

GPUS = gpus.gpu_ids() if os.environ.get("JAX_PLATFORMS") == "cpu" else []
FOLDER = Path(__file__).parent
# Of test_ranks.py: the ways taken, data by the oracle, memory that is freed or not to be had.
TESTS = "attributes or hundred_groups or many_groups or too_little_memory or changing_routing"

pytestmark = pytest.mark.skipif(not GPUS, reason="needs GPUs, and JAX_PLATFORMS=cpu")


ARRANGEMENTS = [
    gpus.Arrangement("two processes on one GPU", (tuple(GPUS[:1]),) * 2),
    gpus.Arrangement("one process per GPU", tuple((gpu,) for gpu in GPUS)),
    gpus.Arrangement("one process", (tuple(GPUS),)),
]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda arrangement: arrangement.name)
def test_fabric(arrangement):
    if arrangement is not ARRANGEMENTS[0] and len(GPUS) < 2:
        pytest.skip("needs two GPUs")
    outputs = gpus.launch(f"{FOLDER / 'fabric.py'}:probe", arrangement, timeout_s=120)
    obstacles = set(re.findall("FABRIC: (.*)", "\n".join(outputs))) - {"works"}
    if obstacles:
        pytest.skip("no fabric handles here: " + "; ".join(obstacles))
    command = shlex.join(["-v", "--tb=short", "-k", TESTS, str(FOLDER / "test_ranks.py")])
    outputs = gpus.launch(f"pytest:{command}", arrangement, timeout_s=300,
                          env={memory.VARIABLE: "fabric"})
    assert all("5 passed" in output for output in outputs), "\n".join(outputs)
