"""The workspace of a Group with backend "cuda", over a stand-in for the native module."""

import collections
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import backends, memory, workspace
from jax_ep.testing import run

SIZES = dict(num_ranks=4, num_experts=8, num_topk=2, max_tokens_per_rank=8, max_row_bytes=64)


class Native:
    """Keeps what is open, and fails where it is told to."""

    def __init__(self, fail_at=None, fabric_obstacle=None, gpus=8):
        self.fail_at = fail_at
        self.gpus = gpus  # fewer than devices: ranks share them
        self.fabric_obstacle = fabric_obstacle
        self.kinds = set()
        self.sms = set()
        self.ranks_per_device = set()
        self.open = {}
        self.calls = collections.Counter()

    def _call(self, name, where=None):
        self.calls[name] += 1
        if (name, where) == self.fail_at:
            raise RuntimeError(f"{name} failed on {where}")

    def machine_info(self):
        return {"devices": [{"uuid": f"gpu{i % self.gpus}", "num_sms": 132} for i in range(8)]}

    def reach(self, device):
        self._call("reach", device)
        return {"host": "a", "device": f"{device} (GPU)", "nvlink_domain": None,
                "domain_obstacle": "no fabric", "fabric_obstacle": self.fabric_obstacle}

    def workspace_bytes(self, **sizes):
        assert sizes == SIZES
        return 1 << 21

    def open_group(self, *, id, device, rank, memory, **settings):
        self._call("open", device)
        self.kinds.add(memory)
        self.open[id, device] = rank
        return f"{device}".encode()

    def connect_group(self, *, id, device, handles, num_sms, low_latency_sms,
                      ranks_per_device):
        self._call("connect", device)
        self.sms.add((num_sms, low_latency_sms))
        self.ranks_per_device.add(ranks_per_device)
        ranks = [self.open[id, int(handle)] for handle in handles]
        assert ranks == list(range(SIZES["num_ranks"]))
        assert str(device).encode() in handles
        return "peer access"

    def check_group(self, id):
        return "rank 1 is late" if self.fail_at == ("check", id) else None

    def disconnect_group(self, id):
        self._call("disconnect")

    def close_group(self, id):
        assert self.calls["disconnect"]
        self.open = {key: rank for key, rank in self.open.items() if key[0] != id}


def make(monkeypatch, native, shape=(2, 4), names=("data", "expert"), num_sms=None, id=7):
    monkeypatch.setattr(backends, "load_cuda", lambda: native)
    return workspace.Workspace(id, run.make_mesh(shape, names), ("expert",), axis="expert",
                               sizes=SIZES, num_sms=num_sms, timeout_s=5.0)


@pytest.mark.parametrize("shape, names, axis_names", [
    ((8,), ("a",), ("a",)),
    ((2, 4), ("a", "b"), ("b",)),
    ((2, 4), ("a", "b"), ("a",)),
    ((4, 2), ("a", "b"), ("b", "a")),
    ((2, 2, 2), ("a", "b", "c"), ("c", "a")),
    ((2, 2, 2), ("a", "b", "c"), ("b",)),
])
def test_places_are_those_of_axis_index(shape, names, axis_names):
    mesh = run.make_mesh(shape, names)
    others = tuple(name for name in names if name not in axis_names)

    def f():
        subgroup = jax.lax.axis_index(others) if others else 0
        return jnp.stack([jnp.int32(subgroup), jax.lax.axis_index(axis_names)])[None]

    program = jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P(names), check_vma=False)
    seen = {shard.device: tuple(np.asarray(shard.data)[0]) for shard in
            jax.jit(program)().addressable_shards}
    assert seen == {place.device: (place.subgroup, place.rank)
                    for place in workspace.places(mesh, axis_names)}


@pytest.mark.parametrize("devices, most, default, low_latency", [
    ([("a", 132)], 132, 32, 100),
    ([("a", 132)] * 2, 66, 32, 34),
    ([("a", 132)] * 8, 16, 16, 8),
    ([("a", 132), ("b", 132), ("b", 132), ("b", 132), ("b", 132), ("b", 132)], 26, 26, 13),
    ([("a", 132), ("b", 20)], 20, 20, 10),
    ([("a", 300)], 300, 32, 256),
    ([("a", 4)] * 8, 0, 1, 1),
])
def test_num_sms(devices, most, default, low_latency):
    assert workspace.max_num_sms(devices) == most
    assert workspace.default_num_sms(devices) == default
    assert workspace.low_latency_sms(devices) == low_latency


@pytest.mark.parametrize("devices, most", [
    ([("a", 132)], 1),
    ([("a", 132), ("b", 132)], 1),
    ([("a", 132), ("b", 132), ("a", 132)], 2),
])
def test_ranks_per_device(devices, most):
    assert workspace.ranks_per_device(devices) == most


@pytest.mark.parametrize("gpus, most", [(8, 1), (7, 2), (2, 4), (1, 8)])
def test_kernels_know_how_many_ranks_share_a_gpu(gpus, most, monkeypatch):
    native = Native(gpus=gpus)
    with contextlib.closing(make(monkeypatch, native)):
        assert native.ranks_per_device == {most}


@pytest.mark.parametrize("num_sms, expected", [(None, (32, 100)), (8, (8, 8))])
def test_num_sms_of_the_kernels(num_sms, expected, monkeypatch):
    """Every kernel has as many blocks as the caller says; by default low-latency ones have more."""
    native = Native()
    with contextlib.closing(make(monkeypatch, native, num_sms=num_sms)):
        assert native.sms == {expected}


def test_opens_and_closes(monkeypatch):
    native = Native()
    opened = make(monkeypatch, native)
    assert len(native.open) == 8 and native.calls["connect"] == 8
    assert (opened.num_bytes, opened.num_sms, opened.transport) == (1 << 21, 32, "peer access")
    opened.check()
    opened.close()
    opened.close()
    assert not native.open and native.calls["disconnect"] == 1


@pytest.mark.parametrize("fail_at", [("reach", 2), ("open", 3), ("connect", 5)])
def test_nothing_stays_open_after_a_failure(fail_at, monkeypatch):
    native = Native(fail_at)
    with pytest.raises(RuntimeError, match=f"process 0: {fail_at[0]} failed on {fail_at[1]}"):
        make(monkeypatch, native)
    assert not native.open


@pytest.mark.parametrize("asked", ["", "ipc", "fabric"])
def test_memory(asked, monkeypatch):
    monkeypatch.setenv(memory.VARIABLE, asked)
    native = Native()
    with contextlib.closing(make(monkeypatch, native)) as opened:
        assert native.kinds == {opened.memory} == {asked or "ipc"}


def test_no_way_to_share_memory(monkeypatch):
    monkeypatch.setenv(memory.VARIABLE, "fabric")
    native = Native(fabric_obstacle="not permitted")
    with pytest.raises(RuntimeError, match="ranks 0, 1, 2, 3: .* not permitted"):
        make(monkeypatch, native)
    assert not native.calls["open"] and native.calls["disconnect"] == 1


def test_too_many_sms(monkeypatch):
    native = Native()
    with pytest.raises(ValueError, match="num_sms=133.* 132 SMs"):
        make(monkeypatch, native, num_sms=133)
    assert not native.open


def test_check_raises_what_a_kernel_noted(monkeypatch):
    opened = make(monkeypatch, Native(("check", 7)))
    with pytest.raises(RuntimeError, match="rank 1 is late"):
        opened.check()
