"""The MoE layer as functions of plain arrays; the nnx and linen modules wrap it."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_ep.group import Group
from jax_ep.moe import moe, swiglu
from jax_ep.routing import expert_load, load_balance_loss, route


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """What an MoE layer is.

    Attributes:
      group: the EP group; it gives the number of experts, the top-k and the mesh.
      features: H, the last dimension of the layer's input and output.
      hidden_features: F, the width inside each SwiGLU expert.
      num_shared_experts: experts that every token goes to, with weight 1, beside the routed ones.
      score, renormalize, scaling_factor, num_groups, topk_groups: the gate, as in `jax_ep.route`.
      correction_bias_rate: the update speed of the auxiliary-loss-free correction bias; None is a
        gate without one.
      capacity_factor: rows per rank as a multiple of the mean load, beyond which pairs are
        dropped; None never drops.
      expert_alignment, layout, quantize: as in `jax_ep.moe`.
      token_axes: the mesh axes that the tokens are spread over, the group's among them. None is
        all axes of the mesh.
      dtype: of the computation and the result; None is that of the input. The gate is always
        computed in float32.
      param_dtype: of the expert weights. The router's are float32.
    """

    group: Group
    features: int
    hidden_features: int
    num_shared_experts: int = 0
    score: str = "softmax"
    renormalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int | None = None
    topk_groups: int | None = None
    correction_bias_rate: float | None = None
    capacity_factor: float | None = None
    expert_alignment: int = 1
    layout: str = "expert"
    quantize: str | None = None
    token_axes: tuple[str, ...] | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        mesh_axes = self.group.mesh.axis_names
        if self.token_axes is None:
            object.__setattr__(self, "token_axes", mesh_axes)
        unknown = set(self.token_axes) - set(mesh_axes)
        if unknown or not set(self.group.axis_names) <= set(self.token_axes):
            raise ValueError(
                f"token_axes must be axes of the mesh {mesh_axes} with the group's "
                f"{self.group.axis_names} among them, got {self.token_axes}"
            )


class MoEStats(NamedTuple):
    """What a layer reports about one batch, over all devices of the layer's token axes."""

    aux_loss: jax.Array  # float32 [], `jax_ep.load_balance_loss`; differentiable
    expert_load: jax.Array  # int32 [E], routed pairs per expert, before dropping
    num_dropped: jax.Array  # int32 [], pairs dropped for lack of capacity
    topk_idx: jax.Array  # int32 [..., K], the experts of each token


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of the layer: its global shape, dtype and sharding."""

    group: Group
    shape: tuple[int, ...]
    dtype: Any
    spec: P

    @property
    def names(self) -> tuple:
        """The mesh axes of every dimension, as flax annotations want them."""
        return tuple(self.spec) + (None,) * (len(self.shape) - len(self.spec))

    def init(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Normal values with variance 1 / fan_in; the arguments are those of a flax initialiser.

        Every expert has a key of its own, so that a device which holds some of them, inside
        `shard_map`, gets the same values as one which holds all.
        """
        normal = jax.nn.initializers.lecun_normal()
        if not self.spec:
            return normal(key, shape, dtype)
        experts = jnp.arange(shape[0])
        if inside_shard_map(self.group):
            experts += jax.lax.axis_index(self.group.axis_names) * shape[0]
        one = lambda expert: normal(jax.random.fold_in(key, expert), shape[1:], dtype)
        return jax.vmap(one)(experts)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape to declare here: a device's part inside `shard_map`, else the whole."""
        if self.spec and inside_shard_map(self.group):
            return (self.group.num_local_experts, *self.shape[1:])
        return self.shape


def weights(config: MoEConfig) -> dict[str, Weight]:
    """The weights of the layer by name. Expert weights are [E, ...], sharded over the group."""
    group, width = config.group, config.hidden_features
    experts, features = group.num_experts, config.features

    def expert_weight(*shape):
        return Weight(group, (experts, *shape), config.param_dtype, P(group.axis_names))

    result = {
        "router": Weight(group, (features, experts), jnp.float32, P()),
        "gate_up": expert_weight(features, 2 * width),
        "down": expert_weight(width, features),
    }
    if config.num_shared_experts:
        width *= config.num_shared_experts
        result["shared_gate_up"] = Weight(group, (features, 2 * width), config.param_dtype, P())
        result["shared_down"] = Weight(group, (width, features), config.param_dtype, P())
    return result


def inside_shard_map(group: Group) -> bool:
    """Whether the trace has the per-device view of the group's axes."""
    manual = [name in jax.sharding.get_abstract_mesh().manual_axes for name in group.axis_names]
    if any(manual) != all(manual):
        raise ValueError(
            f"inside shard_map all or none of the group's axes {group.axis_names} must be manual"
        )
    return all(manual)


def apply(
    config: MoEConfig,
    params: dict[str, jax.Array],
    x: jax.Array,
    correction_bias: jax.Array | None = None,
) -> tuple[jax.Array, MoEStats]:
    """The layer. In the global view (plain jit) it enters `jax.shard_map` itself.

    Args:
      config: the layer.
      params: a value for each of `weights(config)`.
      x: [..., H]; in the global view, sharded over the token axes or about to be.
      correction_bias: float32 [E] or None.

    Returns:
      (y of x's shape, statistics).

    Raises:
      ValueError: a wrong last dimension; in the global view, a number of tokens that the devices
        of the token axes do not divide.
    """
    if x.ndim < 1 or x.shape[-1] != config.features:
        raise ValueError(f"x must have shape [..., features={config.features}], got {x.shape}")
    if config.dtype is not None:
        x = x.astype(config.dtype)
    if correction_bias is None:
        correction_bias = jnp.zeros(config.group.num_experts)

    context = jax.sharding.get_abstract_mesh()
    mesh = config.group.mesh if context.empty else context
    free = [name for name in mesh.axis_names if name not in context.manual_axes]
    if not free:
        return _per_device(config, params, x, correction_bias)

    token_axes = tuple(name for name in config.token_axes if name in free)
    num_parts = math.prod(mesh.shape[name] for name in token_axes)
    num_tokens = math.prod(x.shape[:-1])
    if num_tokens % num_parts:
        raise ValueError(
            f"x has {num_tokens} tokens (shape {x.shape}), which the {num_parts} devices of the "
            f"token axes {token_axes} do not divide; pad the batch"
        )
    specs = {
        name: P() if inside_shard_map(config.group) else weight.spec
        for name, weight in weights(config).items()
    }
    tokens = P(token_axes)
    explicit = AxisType.Explicit in mesh.axis_types

    def place(value, shape, spec):
        if not explicit:
            return value.reshape(shape)
        sharding = NamedSharding(mesh, spec)
        # The reshape leaves alone what is on one device only, and the second call what is placed.
        return jax.sharding.reshard(jax.lax.reshape(value, shape, out_sharding=sharding), sharding)

    def per_device(*args):
        return _per_device(config, *args)

    if context.manual_axes:
        # JAX cannot shard what a nested shard_map saves for the backward pass, except its inputs.
        per_device = jax.checkpoint(per_device)
    run = jax.shard_map(
        per_device,
        mesh=mesh,
        axis_names=set(free),
        in_specs=(specs, tokens, P()),
        out_specs=(tokens, MoEStats(P(), P(), P(), tokens)),
    )
    params = {name: place(params[name], params[name].shape, spec) for name, spec in specs.items()}
    # One dimension of tokens, so that it is their number and not the batch that must divide.
    y, stats = run(
        params,
        place(x, (num_tokens, config.features), tokens),
        place(correction_bias, correction_bias.shape, P()),
    )
    spec = jax.typeof(x).sharding.spec
    topk_shape = (*x.shape[:-1], config.group.num_topk)
    return place(y, x.shape, spec), stats._replace(
        topk_idx=place(stats.topk_idx, topk_shape, P(*spec[:-1])))


def _per_device(config, params, x, correction_bias):
    """`apply` on this device's tokens and experts."""
    group = config.group
    shape = x.shape
    x = x.reshape(-1, config.features)
    logits = x.astype(jnp.float32) @ params["router"].astype(jnp.float32)
    topk_weights, topk_idx = route(
        logits,
        group.num_topk,
        score=config.score,
        renormalize=config.renormalize,
        scaling_factor=config.scaling_factor,
        correction_bias=correction_bias,
        num_groups=config.num_groups,
        topk_groups=config.topk_groups,
    )
    capacity = None
    if config.capacity_factor is not None:
        capacity = group.capacity(
            config.capacity_factor,
            num_tokens=x.shape[0],
            layout=config.layout,
            expert_alignment=config.expert_alignment,
        )
    y, handle = moe(
        group,
        x,
        topk_idx,
        topk_weights,
        lambda rows, sizes: swiglu(rows, sizes, params["gate_up"], params["down"]),
        capacity=capacity,
        expert_alignment=config.expert_alignment,
        layout=config.layout,
        quantize=config.quantize,
    )
    if config.num_shared_experts:
        y += _shared_experts(x, params["shared_gate_up"], params["shared_down"])
    stats = MoEStats(
        load_balance_loss(logits, topk_idx, score=config.score, axis_name=config.token_axes),
        expert_load(topk_idx, group.num_experts, axis_name=config.token_axes),
        jax.lax.psum(handle.num_dropped, config.token_axes),
        topk_idx.reshape(*shape[:-1], group.num_topk),
    )
    return y.reshape(shape), stats


def _shared_experts(x, gate_up, down):
    """Several shared experts are one SwiGLU of their summed width."""
    gate, up = jnp.split(x @ gate_up.astype(x.dtype), 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down.astype(x.dtype)
