"""Whether transfers and independent compute run at the same time."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep.bench import measure
from jax_ep.bench.steps import Inputs, Layer, Step, add_axis, compile_step, drop_axis, per_device

_TRIAL_LENGTH = 4  # products in the chain by which one product is timed
_MIN_LENGTH = 2  # a single one XLA schedules behind the transfer (jax 0.12.0.1)


def overlap_steps(
    plain: Layer, overlapped: Layer, inputs: Inputs, repeats: int, matrix_size: int = 4096
) -> Iterator[Step]:
    """A dispatch, a chain of matrix products of about its time, and both in one program.

    Args:
      plain, overlapped: of a Group without and one with `overlap`, alike otherwise.
      inputs: of both.
      repeats: calls by which the length of the chain is found.
      matrix_size: of the square matrices.
    """
    matrices = _matrices(inputs, matrix_size, matrix_size, jnp.bfloat16)

    def chain(length):
        def f(matrix):
            product = matrix
            for _ in range(length):
                product = jnp.tanh(product @ matrix)  # stays finite
            return product
        return f

    def dispatch(layer):
        return lambda x, handle, weights: add_axis(layer.dispatch(x, drop_axis(handle), weights))

    def both(layer, length):
        def f(matrix, *operands):
            return chain(length)(matrix[0])[None], dispatch(layer)(*operands)
        return f

    def batch(layer):
        return inputs.x, layer.handle, inputs.topk_weights

    alone = compile_step("overlap: dispatch", dispatch(plain), inputs, *batch(plain))
    trial = compile_step("", lambda m: chain(_TRIAL_LENGTH)(m[0])[None], inputs, matrices)
    us, trial_us = (measure.times(step.call, repeats) for step in (alone, trial))
    # The same number in all processes, as they run one program.
    ratio = measure.everyone(_wall(us) / _wall(trial_us))[0]
    length = max(_MIN_LENGTH, round(_TRIAL_LENGTH * ratio))
    yield alone
    yield compile_step(f"overlap: {length} products", lambda m: chain(length)(m[0])[None], inputs,
                       matrices)
    for name, layer in (("one stream", plain), ("two streams", overlapped)):
        yield compile_step(f"overlap: both, {name}", both(layer, length), inputs, matrices,
                           *batch(layer))


def layer_steps(
    plain: jax_ep.Group, overlapped: jax_ep.Group, inputs: Inputs, intermediate: int = 1024
) -> Iterator[Step]:
    """A layer in one part, and in halves as docs/overlap.md has it.

    In layout "rank"; two matrix products over all rows of a rank stand for its experts.

    Args:
      plain, overlapped: Groups for `inputs` without and with `overlap`.
      inputs: tokens and routing.
      intermediate: columns between the two products.
    """
    hidden, dtype = inputs.setting.hidden, inputs.x.dtype
    weights = (_matrices(inputs, hidden, intermediate, dtype),
               _matrices(inputs, intermediate, hidden, dtype))

    def layer(group, num_parts):
        def send(x, topk_idx, topk_weights):
            handle = jax_ep.prepare(group, topk_idx, layout="rank",
                                    capacity=group.worst_case_capacity(len(x), layout="rank"))
            return handle, jax_ep.dispatch(x, handle, topk_weights)[0]

        def f(up, down, *batch):
            sent = [send(*part) for part in zip(*(jnp.array_split(a, num_parts) for a in batch))]
            out = []
            while sent:
                handle, rows = sent.pop(0)
                rows = jax.nn.relu(rows @ up[0]) @ down[0]
                rows, sent, out = jax.lax.optimization_barrier((rows, sent, out))
                out.append(jax_ep.combine(rows, handle))
            return jnp.concatenate(out)
        return f

    operands = *weights, inputs.x, inputs.topk_idx, inputs.topk_weights
    for name, group, num_parts in (("layer", plain, 1), ("halves, one stream", plain, 2),
                                   ("halves, two streams", overlapped, 2)):
        yield compile_step(f"overlap: {name}", layer(group, num_parts), inputs, *operands)


def _matrices(inputs: Inputs, rows: int, columns: int, dtype: jnp.dtype) -> jax.Array:
    """A matrix for each rank, [R, rows, columns]."""
    def make(rank):
        return jax.random.normal(jax.random.key(rank[0]), (1, rows, columns), dtype)

    return per_device(make, inputs.mesh)(np.arange(inputs.mesh.size))


def _wall(times: measure.Times) -> float:
    return times.in_a_row or times.single
