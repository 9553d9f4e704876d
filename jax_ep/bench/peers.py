"""What else a JAX user has for the same job, and the rates that the hardware allows."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.bench import settings
from jax_ep.bench.steps import AXIS, Inputs, Step, add_axis, compile_step, drop_axis, per_device


def gather_and_scatter(inputs: Inputs) -> Iterator[Step]:
    """Every token to every rank, and sums of a row per token and rank back."""
    num_ranks = inputs.mesh.size
    # Every rank receives, and then sends, what all others have.
    link_bytes = inputs.x.nbytes // num_ranks * (num_ranks - 1)
    moved = {"row_bytes": inputs.x.nbytes, "link_bytes": link_bytes}

    def gather(x):
        return jax.lax.all_gather(x, AXIS, tiled=True)

    yield compile_step("all_gather", gather, inputs, inputs.x, **moved)
    rows = per_device(gather, inputs.mesh)(inputs.x)
    yield compile_step(
        "psum_scatter", lambda rows: jax.lax.psum_scatter(rows, AXIS, tiled=True), inputs, rows,
        **moved)


class RaggedAllToAll:
    """Dispatch and combine of layout "expert" by `jax.lax.ragged_all_to_all` between two sorts.

    Args:
      inputs: tokens and routing, without tokens that are not routed.
      capacity: rows per rank, enough for all.
    """

    def __init__(self, inputs: Inputs, capacity: int):
        self.inputs, self.capacity = inputs, capacity
        self.num_experts = inputs.setting.num_experts
        self.num_ranks = inputs.mesh.size

    def dispatch(self, x, topk_idx):
        """Rows [capacity, H] by local expert, source rank, and pair; zero where there are none.

        Also returns what `combine` needs to find its way back.
        """
        num_local = self.num_experts // self.num_ranks
        me = jax.lax.axis_index(AXIS)
        num_topk = topk_idx.shape[1]
        experts = topk_idx.reshape(-1)
        order = jnp.argsort(experts, stable=True)
        counts = jnp.bincount(experts, length=self.num_experts).astype(jnp.int32)
        all_counts = jax.lax.all_gather(counts, AXIS).reshape(self.num_ranks, -1, num_local)
        sizes = all_counts.sum(axis=2)  # [from rank, to rank]
        received = self._exchange(x[order // num_topk], sizes, self.capacity)

        # Received by source and then expert; a row past the end counts as of one more expert.
        local_counts = jnp.take(all_counts, me, axis=1).reshape(-1)
        num_rows = local_counts.sum()
        local_experts = jnp.tile(jnp.arange(num_local), self.num_ranks)
        of_row = jnp.repeat(local_experts, local_counts, total_repeat_length=self.capacity)
        of_row = jnp.where(jnp.arange(self.capacity) < num_rows, of_row, num_local)
        by_expert = jnp.argsort(of_row, stable=True)
        return received[by_expert], (order, by_expert, sizes)

    def combine(self, rows, way, topk_weights):
        """The weighted sum [T, H] of each token's rows."""
        order, by_expert, sizes = way
        by_source = jnp.zeros_like(rows).at[by_expert].set(rows, unique_indices=True)
        returned = self._exchange(by_source, sizes.T, order.shape[0])
        pairs = jnp.zeros_like(returned).at[order].set(returned, unique_indices=True)
        pairs = pairs.reshape(*topk_weights.shape, -1).astype(jnp.float32)
        return jnp.einsum("tkh,tk->th", pairs, topk_weights).astype(rows.dtype)

    def steps(self) -> Iterator[Step]:
        inputs = self.inputs

        def dispatch(x, topk_idx):
            return add_axis(self.dispatch(x, topk_idx))

        def combine(rows, way, topk_weights):
            return self.combine(*drop_axis((rows, way)), topk_weights)

        # What has to cross, for the sake of comparison; this sends a row for every pair.
        row_bytes = inputs.setting.hidden * inputs.x.dtype.itemsize
        moved = {
            "row_bytes": inputs.routing.size // self.num_ranks * row_bytes,
            "link_bytes": settings.link_rows(inputs.routing, self.num_experts) * row_bytes,
        }
        yield compile_step("ragged_all_to_all dispatch", dispatch, inputs, inputs.x,
                           inputs.topk_idx, **moved)
        rows, way = per_device(dispatch, inputs.mesh)(inputs.x, inputs.topk_idx)
        yield compile_step("ragged_all_to_all combine", combine, inputs, rows, way,
                           inputs.topk_weights, **moved)

    def _exchange(self, rows, sizes, num_rows):
        """Sends sizes[me, r] rows to each rank r, one after the other; gives [num_rows, H]."""
        me = jax.lax.axis_index(AXIS)
        # Where each source's rows begin at each target, and each target's at each source.
        at_target = jnp.cumsum(sizes, axis=0) - sizes
        at_source = jnp.cumsum(sizes, axis=1) - sizes
        out = jnp.zeros((num_rows, rows.shape[1]), rows.dtype)
        return jax.lax.ragged_all_to_all(
            rows, jax.lax.pcast(out, AXIS, to="varying"), at_source[me], sizes[me], at_target[me],
            sizes[:, me], axis_name=AXIS)


def link_copies(inputs: Inputs) -> Iterator[Step]:
    """Each rank's tokens to the next rank: by a collective, and by the copy engines."""
    mesh, num_ranks = inputs.mesh, inputs.mesh.size
    num_bytes = inputs.x.nbytes // num_ranks
    ring = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
    moved = {"row_bytes": num_bytes, "link_bytes": num_bytes}
    yield compile_step("ppermute", lambda x: jax.lax.ppermute(x, AXIS, ring), inputs, inputs.x,
                       **moved)
    if jax.process_count() == 1:
        devices = list(mesh.devices.flat)
        shards = {shard.device: shard.data for shard in inputs.x.addressable_shards}
        yield Step("device_put",
                   lambda: [jax.device_put(shards[source], target)
                            for source, target in zip(devices, devices[1:] + devices[:1])], **moved)


def memory_copy(inputs: Inputs, num_bytes: int = 1 << 30) -> Step:
    """Reads `num_bytes` of every device's memory and writes as many."""
    num_ranks = inputs.mesh.size
    words = per_device(lambda i: jnp.zeros((1, num_bytes // 4), jnp.uint32) + i[:, None],
                       inputs.mesh)(np.arange(num_ranks, dtype=np.uint32))
    return compile_step("memory copy", jnp.bitwise_not, inputs, words, row_bytes=2 * num_bytes)


def host_copy(inputs: Inputs) -> Step:
    """A copy of the rows of all ranks on one thread of the host: the yardstick of CPU devices."""
    row_bytes = inputs.setting.hidden * inputs.x.dtype.itemsize
    source = np.ones(inputs.routing.size * row_bytes, np.uint8)
    target = np.zeros_like(source)
    return Step("memcpy of the rows", lambda: np.copyto(target, source),
                row_bytes=source.nbytes // inputs.mesh.size)
