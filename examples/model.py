"""A small byte-level transformer language model whose feed-forward layers are MoE layers."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_ep
from jax_ep.flax import MoEConfig
from jax_ep.flax.nnx import MoE

VOCABULARY = 256  # bytes


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. `capacity_factor` is that of `jax_ep.flax.MoEConfig`."""

    num_layers: int = 2
    width: int = 128
    num_heads: int = 4
    expert_width: int = 128
    num_experts: int = 8
    num_topk: int = 2
    capacity_factor: float | None = 1.25


class KVCache(NamedTuple):
    """Keys and values of one layer's past positions, [batch, length, heads, features] each."""

    key: jax.Array
    value: jax.Array


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        self.qkv = nnx.Linear(config.width, 3 * config.width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [batch, length, width], of which every position sees those before it."""
        query, key, value = self._project(x)
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.reshape(x.shape))

    def decode(
        self, x: jax.Array, cache: KVCache, position: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """One position of `__call__`: x [batch, width] at `position`, the earlier ones cached."""
        query, *new = self._project(x[:, None], position)
        key, value = (
            jax.lax.dynamic_update_slice_in_dim(old, one, position, axis=1)
            for old, one in zip(cache, new))
        lengths = jnp.full(x.shape[0], position + 1, jnp.int32)
        y = jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=lengths)
        return self.out(y.reshape(x.shape)), KVCache(key, value)

    def empty_cache(self, batch: int, length: int) -> KVCache:
        """The cache before the first position, with room for `length` of them."""
        shape = (batch, length, self.num_heads, self.out.in_features // self.num_heads)
        # An array each: they are donated, which one device refuses for the same array twice.
        return KVCache(jnp.zeros(shape), jnp.zeros(shape))

    def _project(self, x, start=0):
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = (qkv[:, :, i] for i in range(3))
        return rotate(query, start), rotate(key, start), value


def rotate(x: jax.Array, start: jax.Array | int = 0) -> jax.Array:
    """Rotary embedding of [batch, length, heads, features] at the positions from `start` on."""
    length, features = x.shape[1], x.shape[-1]
    frequencies = 1e4 ** (-jnp.arange(features // 2) / (features // 2))
    angles = (start + jnp.arange(length))[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    """Attention and an expert-parallel MoE layer, each on a normalised residual stream."""

    def __init__(self, config: ModelConfig, group: jax_ep.Group, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.moe = MoE(
            MoEConfig(
                group, config.width, config.expert_width, capacity_factor=config.capacity_factor
            ),
            rngs=rngs,
        )


class Transformer(nnx.Module):
    """Bytes [batch, length] -> logits of the next byte, and every layer's MoE statistics."""

    def __init__(self, config: ModelConfig, group: jax_ep.Group, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(
            VOCABULARY, config.width, rngs=rngs, embedding_init=nnx.initializers.normal(0.5))
        self.blocks = nnx.List(Block(config, group, rngs=rngs) for _ in range(config.num_layers))
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        # Small logits, so that training starts from even odds over the bytes.
        self.head = nnx.Linear(
            config.width, VOCABULARY, use_bias=False, rngs=rngs,
            kernel_init=nnx.initializers.normal(0.06))

    def __call__(self, tokens: jax.Array, moe: Callable | None = None):
        """`moe(layer, x) -> (y, stats)` stands in for the MoE layers' own computation."""
        moe = moe or MoE.__call__
        x = self.embed(tokens)
        stats = []
        for block in self.blocks:
            x += block.attention(block.attention_norm(x))
            y, layer_stats = moe(block.moe, block.moe_norm(x))
            x += y
            stats.append(layer_stats)
        logits = self.head(self.norm(x))
        return logits, jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats)


def make_group(mesh: jax.sharding.Mesh, config: ModelConfig, tokens_per_device: int,
               backend: str | None = None) -> jax_ep.Group:
    """The EP group over the mesh axis "expert" for batches of `tokens_per_device` tokens."""
    return jax_ep.Group(
        mesh,
        "expert",
        num_experts=config.num_experts,
        num_topk=config.num_topk,
        max_tokens_per_rank=tokens_per_device,
        max_row_bytes=4 * config.width,
        backend=backend,
    )


def loss_fn(model: Transformer, text: jax.Array, aux_weight: float = 0.0,
            moe: Callable | None = None):
    """Nats per byte of text uint8 [batch, length + 1], plus the weighted load-balance loss.

    Returns (the sum, (nats per byte, the layers' statistics)).
    """
    text = text.astype(jnp.int32)
    logits, stats = model(text[:, :-1], moe)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()
    return nats + aux_weight * stats.aux_loss.mean(), (nats, stats)
