"""The MoE layer as a flax.linen module."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AxisType

from jax_ep.flax import layer
from jax_ep.routing import update_correction_bias


class MoE(nn.Module):
    """Router, SwiGLU experts and optional shared experts.

        y, stats = jax_ep.flax.linen.MoE(jax_ep.flax.MoEConfig(group, 512, 1024))(x)
        loss += 0.01 * stats.aux_loss

    The parameters have the names and shapes of `jax_ep.flax.nnx.MoE`; the expert weights are
    annotated as `nn.with_partitioning` does. Inside `shard_map` they are the device's own
    [E_local, ...], without annotations.

    With `config.correction_bias_rate`, the collection "router_state" has the correction bias
    float32 [E], and a call for which that collection is mutable updates it from its own load.
    """

    config: layer.MoEConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, layer.MoEStats]:
        """x [..., H] -> (y of that shape, statistics); raises as `layer.apply`."""
        params = {
            name: self.param(name, _initializer(weight), weight.local_shape, weight.dtype)
            for name, weight in layer.weights(self.config).items()
        }
        if self.config.correction_bias_rate is None:
            return layer.apply(self.config, params, x)

        bias = self.variable(
            "router_state", "correction_bias", jnp.zeros, self.config.group.num_experts)
        y, stats = layer.apply(self.config, params, x, bias.value)
        if self.is_mutable_collection("router_state") and not self.is_initializing():
            bias.value = update_correction_bias(
                bias.value, stats.expert_load, rate=self.config.correction_bias_rate)
        return y, stats


def _initializer(weight: layer.Weight):
    if layer.inside_shard_map(weight.group):
        return weight.init
    mesh = weight.group.mesh
    box = _ExplicitlyPartitioned if AxisType.Explicit in mesh.axis_types else nn.Partitioned
    return lambda *args: box(weight.init(*args), weight.names, mesh)


class _ExplicitlyPartitioned(nn.Partitioned):
    """Explicit axes are part of an array's type, which flax's sharding constraint cannot set."""

    def unbox(self, apply_constraint=True):
        if not apply_constraint:
            return self.value
        return jax.sharding.reshard(self.value, self.get_sharding(self.mesh))
