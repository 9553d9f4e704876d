"""The MoE layer as a flax.nnx module."""

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ep.flax import layer
from jax_ep.routing import update_correction_bias


class CorrectionBias(nnx.Variable):
    """Gate biases that balance the experts; state, not trained by gradients."""


class MoE(nnx.Module):
    """Router, SwiGLU experts and optional shared experts.

        moe = jax_ep.flax.nnx.MoE(jax_ep.flax.MoEConfig(group, 512, 1024), rngs=nnx.Rngs(0))
        y, stats = moe(x)                       # x: [..., 512]
        loss += 0.01 * stats.aux_loss

    Attributes:
      router: Param float32 [H, E].
      gate_up, down: Params [E, H, 2 * F] and [E, F, H], sharded over the group's axes on E and
        annotated with it (`nnx.get_partition_spec`).
      shared_gate_up, shared_down: Params [H, 2 * F'] and [F', H] with shared experts,
        F' = num_shared_experts * F.
      correction_bias: CorrectionBias float32 [E], with `config.correction_bias_rate`.

    Created inside `shard_map`, the expert weights are the device's own [E_local, ...].
    """

    def __init__(self, config: layer.MoEConfig, *, rngs: nnx.Rngs):
        self.config = config
        for name, weight in layer.weights(config).items():
            value = weight.init(rngs.params(), weight.local_shape, weight.dtype)
            setattr(self, name, nnx.Param(value, **_annotation(weight)))
        if config.correction_bias_rate is not None:
            self.correction_bias = CorrectionBias(jnp.zeros(config.group.num_experts))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, layer.MoEStats]:
        """x [..., H] -> (y of that shape, statistics); raises as `layer.apply`."""
        params = {name: getattr(self, name)[...] for name in layer.weights(self.config)}
        bias = None
        if self.config.correction_bias_rate is not None:
            bias = self.correction_bias[...]
        return layer.apply(self.config, params, x, bias)

    def update_correction_bias(self, load: jax.Array) -> None:
        """One step of auxiliary-loss-free balancing; `load` is a call's `stats.expert_load`."""
        self.correction_bias[...] = update_correction_bias(
            self.correction_bias[...], load, rate=self.config.correction_bias_rate)


def _annotation(weight: layer.Weight) -> dict:
    if layer.inside_shard_map(weight.group):
        return {}
    return {"out_sharding": weight.names, "mesh": weight.group.mesh}
