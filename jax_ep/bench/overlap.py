"""Whether dispatch and independent compute run at the same time."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.bench import measure
from jax_ep.bench.steps import Inputs, Layer, Step, add_axis, compile_step, drop_axis, per_device

_TRIAL_LENGTH = 4  # products in the chain by which one product is timed


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
    size = matrix_size
    matrices = per_device(
        lambda i: jax.random.normal(jax.random.key(i[0]), (1, size, size), jnp.bfloat16),
        inputs.mesh)(np.arange(inputs.mesh.size))

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
    length = max(1, round(_TRIAL_LENGTH * ratio))
    yield alone
    yield compile_step(f"overlap: {length} products", lambda m: chain(length)(m[0])[None], inputs,
                       matrices)
    for name, layer in (("one stream", plain), ("two streams", overlapped)):
        yield compile_step(f"overlap: both, {name}", both(layer, length), inputs, matrices,
                           *batch(layer))


def _wall(times: measure.Times) -> float:
    return times.in_a_row or times.single
