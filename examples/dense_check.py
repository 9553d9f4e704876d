"""The same model without expert parallelism, on one device, and how far the two differ.

The MoE layer is written here from its definition with a loop over all experts, so that nothing of
`jax_ep` is in the dense model but the parameters.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model import loss_fn

# Float32 sums are taken in another order on eight devices than on one.
LOSS_TOLERANCE = 1e-5  # relative
GRADIENT_TOLERANCE = 1e-5  # relative to the largest entry of each parameter's gradient
TIE_TOLERANCE = 1e-5  # router scores that are closer than this may be ranked either way


class DenseStats(NamedTuple):
    aux_loss: jax.Array
    # [batch, length], how much better than the worst chosen expert the best unchosen one is.
    routing_error: jax.Array


def dense_moe(layer, x, topk_idx):
    """The MoE layer with every expert applied to every token.

    `topk_idx` [batch, length, K] are the experts that the EP layer chose. They are checked against
    the scores here, but not chosen anew: near a tie, rounding may rank two experts differently.
    """
    num_experts = layer.router.shape[1]
    scores = jax.nn.softmax(x @ layer.router[...])
    chosen = jax.nn.one_hot(topk_idx, num_experts).sum(axis=-2)  # [batch, length, E]
    weights = chosen * scores
    weights /= weights.sum(axis=-1, keepdims=True)
    y = jnp.zeros_like(x)
    for expert in range(num_experts):
        gate, up = jnp.split(x @ layer.gate_up[expert], 2, axis=-1)
        output = (jax.nn.silu(gate) * up) @ layer.down[expert]
        y += weights[..., expert, None] * output

    fraction = chosen.mean(axis=(0, 1)) / topk_idx.shape[-1]
    aux_loss = num_experts * jnp.sum(fraction * scores.mean(axis=(0, 1)))
    best_unchosen = jnp.where(chosen > 0, -jnp.inf, scores).max(axis=-1)
    worst_chosen = jnp.where(chosen > 0, scores, jnp.inf).min(axis=-1)
    return y, DenseStats(aux_loss, best_unchosen - worst_chosen)


def without_drops(graphdef, params):
    """The model with room for every token, as the dense one has."""
    model = nnx.merge(graphdef, params)
    for block in model.blocks:
        block.moe.config = dataclasses.replace(block.moe.config, capacity_factor=None)
    return model


def compare(graphdef, params, text: jax.Array, aux_weight: float) -> dict[str, float]:
    """Differences of loss, gradients and routing between the EP model and the dense model.

    Args:
      graphdef, params: the model as `nnx.split` gives it, on the mesh.
      text: uint8 [batch, length + 1] on the mesh.
      aux_weight: of the load-balance loss, which takes part in the comparison.

    Returns:
      loss: relative difference; gradient: the largest relative difference over all parameters;
      routing: see `DenseStats.routing_error`, negative where the choice is not in doubt.
    """

    def ep_loss(params, text):
        return loss_fn(without_drops(graphdef, params), text, aux_weight)

    def dense_loss(params, text, topk_idx):
        choices = iter(topk_idx)
        moe = lambda layer, x: dense_moe(layer, x, next(choices))
        return loss_fn(nnx.merge(graphdef, params), text, aux_weight, moe)

    gradient = functools.partial(jax.value_and_grad, has_aux=True)
    (loss, (_, stats)), grads = jax.jit(gradient(ep_loss))(params, text)
    one_device = jax.device_put(
        jax.device_get((params, text, stats.topk_idx)), jax.local_devices()[0])
    (dense, (_, dense_stats)), dense_grads = jax.jit(gradient(dense_loss))(*one_device)

    def difference(ours, theirs):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        return np.abs(ours - theirs).max() / np.abs(theirs).max()

    return {
        "loss": float(difference(loss, dense)),
        "gradient": float(max(jax.tree.leaves(jax.tree.map(difference, grads, dense_grads)))),
        "routing": float(dense_stats.routing_error.max()),
    }


def check(differences: dict[str, float]) -> bool:
    """Prints the differences beside their tolerances; whether all are within them."""
    tolerances = {
        "loss": LOSS_TOLERANCE, "gradient": GRADIENT_TOLERANCE, "routing": TIE_TOLERANCE}
    print("Expert-parallel model against the dense one on one device:")
    passed = {name: differences[name] <= tolerances[name] for name in tolerances}
    for name, tolerance in tolerances.items():
        print(f"  {name:8s} difference {differences[name]:9.2e}, tolerance {tolerance:.0e}: "
              f"{'ok' if passed[name] else 'TOO LARGE'}")
    return all(passed.values())
