"""prepare, dispatch and combine under shard_map for a Case, on arrays with a leading rank axis.

The three are separate compiled programs, with the Handle passed between them as data, so that
tests of one do not compile the others. Programs and Groups are kept for the whole session.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax_ep
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_ep.testing.cases import Case

AXIS = "expert"
HANDLE_FIELDS = ("topk_idx", "slots", "row_source", "row_topk_idx", "group_sizes",
                 "expert_counts", "num_rows", "num_dropped")


def backend_name(kind: str) -> str:
    """`kind` is "native" (that of the platform) or a backend's name."""
    if kind != "native":
        return kind
    return {"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """A mesh of Auto axes over the first devices.

    Skips the test where there are too few, and in a process none of whose devices is among them.
    """
    count = int(np.prod(shape))
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices")
    devices = np.array(jax.devices()[:count]).reshape(shape)
    if all(device.process_index != jax.process_index() for device in devices.flat):
        pytest.skip("runs on other processes' devices")
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def jit(f: Callable) -> Callable:
    """jax.jit, but a call with an argument of no bytes skips the test where JAX crashes on those.

    That is on several GPUs: jax 0.11.2 has a segmentation fault while it compiles, without any
    operation of ours, jax.shard_map(lambda a, b: (a, b), ...) of a float[2, 0, 8], of which each
    GPU has a half, and a float[2, 5]. jax 0.12.0.1 has none.
    """
    compiled = jax.jit(f)

    @functools.wraps(compiled)
    def call(*args):
        if (jax.__version_info__ < (0, 12) and jax.device_count() > 1
                and jax.default_backend() == "gpu"
                and any(0 in np.shape(leaf) for leaf in jax.tree.leaves(args))):
            pytest.skip("jax crashes on arguments of no bytes on several GPUs")
        return compiled(*args)

    return call


@functools.lru_cache(maxsize=None)
def make_group(num_ranks: int, num_experts: int, num_topk: int, max_tokens_per_rank: int,
               kind: str, max_row_bytes: int = 8192, low_latency: bool = False) -> jax_ep.Group:
    """A Group over one axis, shared by all tests that ask for the same.

    Without low_latency the ordinary kernels run, however few the tokens are.
    """
    return jax_ep.Group(
        make_mesh((num_ranks,), (AXIS,)), AXIS, num_experts=num_experts, num_topk=num_topk,
        max_tokens_per_rank=max_tokens_per_rank, max_row_bytes=max_row_bytes,
        backend=backend_name(kind), low_latency=low_latency)


def group_of(case: Case, kind: str, low_latency: bool = False) -> jax_ep.Group:
    return make_group(case.num_ranks, case.num_experts, case.num_topk, case.max_tokens_per_rank,
                      kind, low_latency=low_latency)


def per_rank(group: jax_ep.Group, f: Callable, axes: tuple[str, ...] | None = None,
             **options: Any) -> Callable:
    """f under shard_map; every array in and out of the result has a leading axis of EP ranks.

    `axes` (default: the group's) are the mesh axes of the leading axis, row-major.
    """
    spec = PartitionSpec(axes or group.axis_names)

    def on_device(*args):
        args = jax.tree.map(lambda a: a[0], args)
        return jax.tree.map(lambda a: a[None], f(*args))

    return jax.shard_map(on_device, mesh=group.mesh, in_specs=spec, out_specs=spec, **options)


def prepare(group: jax_ep.Group, case: Case, topk_idx: jax.Array) -> jax_ep.Handle:
    """jax_ep.prepare with the settings of the case; per-device view."""
    return jax_ep.prepare(group, topk_idx, layout=case.layout, capacity=case.capacity,
                          expert_alignment=case.expert_alignment)


class Runner:
    """The three operations of one case on one backend, each jitted over stacked arrays."""

    def __init__(self, case: Case, kind: str):
        self.case = case
        self.group = group_of(case, kind)
        self.prepare = jit(per_rank(self.group, functools.partial(prepare, self.group, case)))
        self.dispatch = jit(per_rank(
            self.group,
            lambda handle, x, topk_weights=None: jax_ep.dispatch(x, handle, topk_weights)))
        self.combine = jit(per_rank(
            self.group,
            lambda handle, rows, row_weights=None: jax_ep.combine(rows, handle, row_weights)))


@functools.lru_cache(maxsize=None)
def runner(case: Case, kind: str) -> Runner:
    return Runner(case, kind)


def handle_arrays(handle: jax_ep.Handle) -> dict[str, np.ndarray | None]:
    """The arrays of a Handle by name, in numpy."""
    values = {name: getattr(handle, name) for name in HANDLE_FIELDS}
    return {name: None if a is None else np.asarray(a) for name, a in values.items()}
