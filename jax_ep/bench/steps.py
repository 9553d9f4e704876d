"""The programs that are timed: the operations of one MoE layer without its experts."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_ep
from jax_ep.bench import settings
from jax_ep.bench.settings import Setting

AXIS = "expert"


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled program, its operands, and what it moves."""

    name: str
    call: Callable[[], Any]
    kernel: str = ""  # a pattern in the names of the kernels that are this step; "" for all
    row_bytes: int = 0  # of a rank, the mean: from tokens to rows or back
    link_bytes: int = 0  # that the busiest rank sends to others, or gets from them
    temp_bytes: int | None = None  # XLA's own scratch, per device


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The same tokens and routing for every backend and peer, on the devices of a mesh."""

    mesh: Mesh
    setting: Setting
    routing: np.ndarray  # topk_idx int32 [R, T, K], of all ranks, on every host
    x: jax.Array  # [R * T, H], as are the next two
    topk_idx: jax.Array
    topk_weights: jax.Array


def make_inputs(setting: Setting, num_ranks: int, dtype: str) -> Inputs:
    """Inputs on the first `num_ranks` devices; every process makes its ranks' part."""
    devices = np.array(jax.devices()[:num_ranks])
    mesh = Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
    topk_idx, topk_weights = settings.topk(setting, num_ranks)
    spread = functools.partial(_spread, mesh, setting.num_tokens)
    x = spread(lambda rank: settings.tokens(setting, num_ranks, rank, dtype))
    return Inputs(mesh, setting, topk_idx, x, spread(topk_idx.__getitem__),
                  spread(topk_weights.__getitem__))


def _spread(mesh: Mesh, rows_per_rank: int, of_rank: Callable[[int], np.ndarray]) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    me = jax.process_index()
    shards = [jax.device_put(of_rank(rank), device)
              for rank, device in enumerate(mesh.devices.flat) if device.process_index == me]
    shape = (mesh.size * rows_per_rank, *shards[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def per_device(f: Callable, mesh: Mesh, **options: Any) -> Callable:
    """f on every device of the mesh, all operands and results split along their first axis."""
    spec = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, **options))


def add_axis(tree: Any) -> Any:
    """What has no axis of ranks gets one, to cross the boundary of shard_map."""
    return jax.tree.map(lambda a: a[None], tree)


def drop_axis(tree: Any) -> Any:
    return jax.tree.map(lambda a: a[0], tree)


def make_group(inputs: Inputs, backend: str, num_sms: int | None = None,
               **options: Any) -> jax_ep.Group:
    """A Group with room for exactly these inputs."""
    setting = inputs.setting
    return jax_ep.Group(
        inputs.mesh, AXIS, num_experts=setting.num_experts, num_topk=setting.num_topk,
        max_tokens_per_rank=setting.num_tokens,
        max_row_bytes=setting.hidden * inputs.x.dtype.itemsize, backend=backend, num_sms=num_sms,
        **options)


def compile_step(name: str, f: Callable, inputs: Inputs, *operands: Any,
                 compiler_options: dict[str, Any] | None = None, **fields: Any) -> Step:
    """The step that runs `f`, per device, on `operands`."""
    program = per_device(f, inputs.mesh).lower(*operands).compile(compiler_options)
    memory = program.memory_analysis()
    return Step(name, functools.partial(program, *operands), **fields,
                temp_bytes=memory.temp_size_in_bytes if memory is not None else None)


class Layer:
    """prepare, dispatch and combine of one Group in one layout, and what they move.

    Args:
      group: over `inputs.mesh`.
      inputs: tokens and routing.
      layout: of the rows.
      capacity_factor: rows, as a factor of the mean load; more where the routing needs more, so
        that nothing is dropped.
      quantize: None, or as for `jax_ep.dispatch`.
    """

    def __init__(self, group: jax_ep.Group, inputs: Inputs, layout: str, capacity_factor: float,
                 quantize: str | None = None):
        self.group, self.inputs, self.layout = group, inputs, layout
        num_experts = inputs.setting.num_experts
        self.capacity = max(group.capacity(capacity_factor, layout=layout),
                            settings.needed_capacity(inputs.routing, num_experts, layout))
        self.quantize = quantize
        self.handle = per_device(lambda i: add_axis(self.prepare(i)), inputs.mesh)(inputs.topk_idx)
        # What combine is timed on: rows as experts give them back.
        self.rows, self.row_weights = per_device(self._dispatch_to_experts, inputs.mesh)(
            inputs.x, self.handle, inputs.topk_weights)

    def prepare(self, topk_idx):
        return jax_ep.prepare(self.group, topk_idx, layout=self.layout, capacity=self.capacity)

    def dispatch(self, x, handle, topk_weights):
        return jax_ep.dispatch(x, handle, topk_weights, quantize=self.quantize)

    def combine(self, rows, handle, row_weights):
        # A row of layout "rank" serves several experts: the weights cannot ride on combine.
        return jax_ep.combine(rows, handle, None if self.layout == "rank" else row_weights)

    def forward(self, x, topk_idx, topk_weights):
        handle = self.prepare(topk_idx)
        rows, row_weights = self.dispatch(x, handle, topk_weights)
        return self.combine(self._experts(rows), handle, row_weights)

    def forward_backward(self, x, topk_idx, topk_weights):
        y, pullback = jax.vjp(lambda x, w: self.forward(x, topk_idx, w), x, topk_weights)
        return y, pullback(y)

    @property
    def num_dropped(self) -> int:
        """Pairs that this process's ranks had no room for."""
        return sum(int(np.asarray(shard.data).sum())
                   for shard in self.handle.num_dropped.addressable_shards)

    @functools.cached_property
    def bytes_per_row(self) -> tuple[int, int]:
        """Of a row as dispatch sends it, and of one that comes back; all leaves together."""
        on_the_wire, _ = jax.eval_shape(
            per_device(self._dispatch, self.inputs.mesh), self.inputs.x, self.handle,
            self.inputs.topk_weights)
        leading = self.handle.row_source.ndim  # axes that count ranks and rows
        return tuple(sum(int(np.prod(leaf.shape[leading:], dtype=int)) * leaf.dtype.itemsize
                         for leaf in jax.tree.leaves(rows)) for rows in (on_the_wire, self.rows))

    def steps(self) -> Iterator[Step]:
        """prepare, dispatch, combine, forward, forward+backward."""
        inputs = self.inputs
        to_dispatch = (inputs.x, self.handle, inputs.topk_weights)
        sent, returned = self.bytes_per_row
        num_experts = inputs.setting.num_experts
        num_rows = settings.kept_rows(inputs.routing, num_experts, self.layout)
        link = settings.link_rows(inputs.routing, num_experts)

        def moved(bytes_per_row):
            return {"row_bytes": num_rows * bytes_per_row // inputs.mesh.size,
                    "link_bytes": link * bytes_per_row}

        batch = (inputs.x, inputs.topk_idx, inputs.topk_weights)
        yield compile_step("prepare", lambda i: add_axis(self.prepare(i)), inputs, inputs.topk_idx,
                           kernel="PrepareKernel")
        yield compile_step("dispatch", self._dispatch, inputs, *to_dispatch,
                           kernel="DispatchKernel", **moved(sent))
        yield compile_step("combine", self._combine, inputs, self.rows, self.handle,
                           self.row_weights, kernel="CombineKernel", **moved(returned))
        yield compile_step("forward", self.forward, inputs, *batch, **moved(sent + returned))
        # Cotangents travel as they are, whatever dispatch quantizes.
        yield compile_step("forward+backward", self.forward_backward, inputs, *batch,
                           **moved(sent + 3 * returned))

    def _dispatch(self, x, handle, topk_weights):
        rows, row_weights = self.dispatch(x, drop_axis(handle), topk_weights)
        if self.quantize:
            rows = rows.values, rows.scales
        return add_axis((rows, row_weights))

    def _dispatch_to_experts(self, x, handle, topk_weights):
        rows, row_weights = self.dispatch(x, drop_axis(handle), topk_weights)
        return add_axis((self._experts(rows), row_weights))

    def _combine(self, rows, handle, row_weights):
        return self.combine(*drop_axis((rows, handle, row_weights)))

    def _experts(self, rows):
        """What stands for the experts: nothing, or back to the tokens' dtype."""
        return rows.dequantize() if self.quantize else rows
