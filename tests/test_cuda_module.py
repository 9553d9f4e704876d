"""The CUDA module on a machine without a GPU, or a driver: it imports, and says what is missing."""

import subprocess
import sys

import pytest

from jax_ep import backends

pytestmark = pytest.mark.skipif(not backends.has_cuda(), reason="built without CUDA")

SIZES = dict(num_ranks=8, num_experts=256, num_topk=8, max_tokens_per_rank=4096,
             max_row_bytes=7168 * 2)
LOW_LATENCY = [f"low_latency_{op}{half}" for op in ("dispatch", "combine")
               for half in ("", "_start", "_done")]


@pytest.fixture
def module():
    from jax_ep._native import _cuda

    return _cuda


def test_imports_without_a_gpu():
    """In a process that sees none, whether there is a driver or not; and needs no CUDA library."""
    code = """
from jax_ep._native import _cuda
machine = _cuda.machine_info()
assert machine["devices"] == [] and machine["obstacle"], machine
try:
    assert not _cuda.reach(0)
except RuntimeError as error:
    assert "CUDA device 0" in str(error), error
assert machine["runtime_version"] >= 12000, machine
libraries = {line.split("/")[-1] for line in open("/proc/self/maps")}
assert not any("libcudart" in library for library in libraries), libraries
"""
    # -P: the current folder may hold a jax_ep that is not the one under test.
    subprocess.run([sys.executable, "-P", "-c", code], check=True,
                   env={"PATH": "", "CUDA_VISIBLE_DEVICES": "",
                        "PYTHONPATH": ":".join(p for p in sys.path if p)})


def test_targets(module):
    """Each operation for programs with command buffers, and for those of a Group with overlap."""
    assert set(module.targets()) == {f"jax_ep_cuda_{op}{kind}" for kind in ("", "_uncaptured")
                                     for op in ("prepare", "dispatch", "combine", *LOW_LATENCY)}


def test_workspace_bytes(module):
    """8 ranks, 4096 tokens, hidden 7168, bfloat16: no more than 600 MB."""
    num_bytes = module.workspace_bytes(**SIZES)
    assert num_bytes <= 600e6
    assert num_bytes % (2 << 20) == 0
    assert module.workspace_bytes(**SIZES | {"max_tokens_per_rank": 8192}) > num_bytes


def test_low_latency_workspace_bytes(module):
    """Three more buffers, each of a group's tokens: 8 ranks, 128 tokens: no more than 64 MB."""
    sizes = SIZES | {"max_tokens_per_rank": 128}
    without = module.workspace_bytes(**sizes)
    assert module.workspace_bytes(**sizes, low_latency=False) == without
    assert 3 * without < module.workspace_bytes(**sizes, low_latency=True) <= 64e6


def test_groups_that_are_not_open(module):
    with pytest.raises(RuntimeError, match="12345 is not open"):
        module.connect_group(id=12345, device=0, handles=[], num_sms=1,
                             low_latency_sms=1, ranks_per_device=1)
    assert module.check_group(12345) is None
    module.disconnect_group(12345)
    module.close_group(12345)


def test_too_many_ranks(module):
    with pytest.raises(RuntimeError, match="at most 72 ranks, got 73"):
        module.open_group(id=1, device=0, axis="expert", subgroup=0, rank=0, timeout_s=1.0,
                          memory="ipc", **SIZES | {"num_ranks": 73})


def test_too_large_topk(module):
    with pytest.raises(RuntimeError, match="at most 64 experts per token, got num_topk=65"):
        module.open_group(id=1, device=0, axis="expert", subgroup=0, rank=0, timeout_s=1.0,
                          memory="ipc", **SIZES | {"num_topk": 65})


def test_unknown_memory(module):
    with pytest.raises(ValueError, match='no memory "rdma"'):
        module.open_group(id=1, device=0, axis="expert", subgroup=0, rank=0,
                          timeout_s=1.0, memory="rdma",
                          **SIZES)
