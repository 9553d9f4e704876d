"""What the benchmark times: the operations of one MoE layer without its experts."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_ep

AXIS = "expert"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the benchmark's table of settings."""

    num_ranks: int
    num_tokens: int  # per rank
    hidden: int
    num_experts: int
    num_topk: int
    dtype: str
    layout: str
    capacity_factor: float

    @property
    def row_bytes(self) -> int:
        return self.hidden * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Result:
    """One timed step: all ranks, one call."""

    backend: str
    step: str
    microseconds: float
    moved_bytes: int  # payload of all ranks that the step carries from tokens to rows or back
    temp_bytes: int | None  # XLA's own scratch, per device

    @property
    def gigabytes_per_second(self) -> float:
        return self.moved_bytes / self.microseconds / 1e3


def run(setting: Setting, backend: str, repeats: int) -> list[Result]:
    """Times prepare, dispatch, combine, forward and forward+backward on one backend."""
    mesh = jax.make_mesh(
        (setting.num_ranks,),
        (AXIS,),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[: setting.num_ranks],
    )
    with jax_ep.Group(
        mesh,
        AXIS,
        num_experts=setting.num_experts,
        num_topk=setting.num_topk,
        max_tokens_per_rank=setting.num_tokens,
        max_row_bytes=setting.row_bytes,
        backend=backend,
    ) as group:
        return _time_steps(setting, group, repeats)


def _time_steps(setting: Setting, group: jax_ep.Group, repeats: int) -> list[Result]:
    spec = PartitionSpec(AXIS)
    x, topk_idx, topk_weights = (
        jax.device_put(a, NamedSharding(group.mesh, spec)) for a in _inputs(setting)
    )
    capacity = group.capacity(setting.capacity_factor, layout=setting.layout)

    def prepare(topk_idx):
        return jax_ep.prepare(group, topk_idx, layout=setting.layout, capacity=capacity)

    def forward(x, topk_idx, topk_weights):
        handle = prepare(topk_idx)
        rows, row_weights = jax_ep.dispatch(x, handle, topk_weights)
        return jax_ep.combine(rows, handle, None if setting.layout == "rank" else row_weights)

    def forward_backward(x, topk_idx, topk_weights):
        y, pullback = jax.vjp(lambda x, w: forward(x, topk_idx, w), x, topk_weights)
        return y, pullback(y)

    def compile_step(f: Callable, *operands):
        return _per_device(f, group.mesh).lower(*operands).compile()

    # The handle and the rows cross the boundary of shard_map with a leading axis of ranks.
    handle = _per_device(lambda i: _add_axis(prepare(i)), group.mesh)(topk_idx)

    def dispatch(x, handle, topk_weights):
        return _add_axis(jax_ep.dispatch(x, _drop_axis(handle), topk_weights))

    rows, row_weights = _per_device(dispatch, group.mesh)(x, handle, topk_weights)

    def combine(rows, handle, row_weights):
        rows, handle, row_weights = _drop_axis((rows, handle, row_weights))
        return jax_ep.combine(rows, handle, None if setting.layout == "rank" else row_weights)

    kept = int((np.asarray(handle.row_source) >= 0).sum())
    row_bytes = kept * setting.row_bytes
    steps = [
        ("prepare", lambda i: _add_axis(prepare(i)), (topk_idx,), 0),
        ("dispatch", dispatch, (x, handle, topk_weights), row_bytes),
        ("combine", combine, (rows, handle, row_weights), row_bytes),
        ("forward", forward, (x, topk_idx, topk_weights), 2 * row_bytes),
        ("forward+backward", forward_backward, (x, topk_idx, topk_weights), 4 * row_bytes),
    ]
    results = []
    for name, function, operands, moved in steps:
        step = compile_step(function, *operands)
        memory = step.memory_analysis()
        microseconds = _median_microseconds(functools.partial(step, *operands), repeats)
        results.append(
            Result(
                group.backend,
                name,
                microseconds,
                moved,
                memory.temp_size_in_bytes if memory is not None else None,
            )
        )
    return results


def memcpy(num_bytes: int, repeats: int) -> Result:
    """A host copy of `num_bytes` on one thread, the yardstick of the CPU backends."""
    source = np.random.default_rng(0).integers(0, 255, num_bytes, np.uint8)
    target = np.zeros_like(source)
    microseconds = _median_microseconds(lambda: np.copyto(target, source), repeats)
    return Result("memcpy", "copy", microseconds, num_bytes, None)


def _inputs(setting: Setting) -> Sequence[np.ndarray]:
    """Random tokens, distinct random experts per token, and weights, for all ranks."""
    rng = np.random.default_rng(0)
    tokens = setting.num_ranks * setting.num_tokens
    x = rng.standard_normal((tokens, setting.hidden), np.float32).astype(jnp.dtype(setting.dtype))
    scores = rng.random((tokens, setting.num_experts))
    topk_idx = np.argpartition(scores, setting.num_topk - 1)[:, : setting.num_topk]
    return x, topk_idx.astype(np.int32), rng.random((tokens, setting.num_topk), np.float32)


def _per_device(f: Callable, mesh) -> Callable:
    spec = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))


def _add_axis(tree):
    return jax.tree.map(lambda a: a[None], tree)


def _drop_axis(tree):
    return jax.tree.map(lambda a: a[0], tree)


def _median_microseconds(call: Callable, repeats: int) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)
