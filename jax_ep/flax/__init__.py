"""Expert-parallel MoE layers for Flax: `jax_ep.flax.nnx.MoE` and `jax_ep.flax.linen.MoE`.

Both are described by one `MoEConfig` and return `(y, MoEStats)`. They run in plain `jit` over the
group's mesh, where they enter `shard_map` themselves, and inside a `shard_map` of yours.
"""

from jax_ep.flax import linen, nnx
from jax_ep.flax.layer import MoEConfig, MoEStats

__all__ = ["MoEConfig", "MoEStats", "linen", "nnx"]
