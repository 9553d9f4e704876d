"""The Flax layers against a dense layer, in every way that they can be called."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax_ep
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_ep.flax import MoEConfig, MoEStats, layer
from jax_ep.flax import linen as ep_linen
from jax_ep.flax import nnx as ep_nnx
from jax_ep.testing import run

AXES = ("data", "expert")
TOKENS = P(AXES)
EXPERTS, TOPK, FEATURES, WIDTH = 4, 2, 8, 6
BATCH, LENGTH = 4, 3
STATS_SPEC = MoEStats(P(), P(), P(), TOKENS)


@functools.cache
def make_group(axis_type=AxisType.Auto, kind="native"):
    mesh = run.make_mesh((2, 2), AXES)
    mesh = jax.sharding.Mesh(mesh.devices, AXES, axis_types=(axis_type,) * 2)
    return jax_ep.Group(
        mesh, "expert", num_experts=EXPERTS, num_topk=TOPK, max_tokens_per_rank=BATCH * LENGTH,
        max_row_bytes=4 * FEATURES, backend=run.backend_name(kind))


def make_config(*group_args, **options):
    defaults = dict(num_shared_experts=2, score="sigmoid", scaling_factor=1.5,
                    correction_bias_rate=1e-2)
    return MoEConfig(make_group(*group_args), FEATURES, WIDTH, **{**defaults, **options})


def make_params(config):
    """Values for the weights, placed, from numpy."""
    rng = np.random.default_rng(0)
    return {
        name: jax.device_put(rng.normal(size=weight.shape).astype(np.float32) / 2,
                             NamedSharding(config.group.mesh, weight.spec))
        for name, weight in layer.weights(config).items()
    }


def make_x(config, shape=(BATCH, LENGTH), spec=TOKENS):
    x = np.random.default_rng(1).normal(size=(*shape, FEATURES)).astype(np.float32)
    return jax.device_put(x, NamedSharding(config.group.mesh, spec))


BIAS = np.array([0.3, -0.2, 0.0, 0.1], np.float32)
COTANGENT = np.random.default_rng(2).normal(size=(BATCH, LENGTH, FEATURES)).astype(np.float32)


def dense(params, x, bias):
    """make_config()'s layer with every expert on every token: y, aux loss, load."""
    scores = 1 / (1 + jnp.exp(-x @ params["router"]))
    ranking = jnp.argsort(-(scores + bias), axis=-1)[..., :TOPK]
    chosen = sum(ranking[..., k, None] == jnp.arange(EXPERTS) for k in range(TOPK))
    weights = 1.5 * chosen * scores / jnp.sum(chosen * scores, axis=-1, keepdims=True)

    def swiglu(gate_up, down):
        gate, up = jnp.split(x @ gate_up, 2, axis=-1)
        return (gate / (1 + jnp.exp(-gate)) * up) @ down

    y = swiglu(params["shared_gate_up"], params["shared_down"])
    for expert in range(EXPERTS):
        y += weights[..., expert, None] * swiglu(params["gate_up"][expert], params["down"][expert])
    shares = scores / scores.sum(-1, keepdims=True)
    load = chosen.sum((0, 1))
    return y, EXPERTS * jnp.sum(load / load.sum() * shares.mean((0, 1))), load


def objective(y, aux_loss):
    return jnp.vdot(y, COTANGENT) + 0.1 * aux_loss


def value_and_grad(f):
    """Jitted (params, x, bias) -> objective's aux and its gradient to params and x."""
    def loss(params, x, bias):
        y, aux_loss, *rest = f(params, x, bias)
        return objective(y, aux_loss), (y, aux_loss, *rest)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.fixture(scope="module")
def expected():
    """The dense layer on one device: (y, aux, load), gradients."""
    config = make_config()
    params, x = jax.device_get((make_params(config), make_x(config)))
    (_, results), grads = value_and_grad(dense)(params, x, BIAS)
    return jax.device_get((results, grads))


def layer_results(config, params, x, bias):
    y, stats = layer.apply(config, params, x, bias)
    return y, stats.aux_loss, stats.expert_load, stats.num_dropped


def inside_shard_map(config, axis_names=frozenset(AXES)):
    """`layer_results` called in a shard_map over some of the axes."""
    keep = lambda spec: P(*(name if name in axis_names else None for name in spec))
    specs = {name: keep(weight.spec) for name, weight in layer.weights(config).items()}
    tokens = P(tuple(name for name in AXES if name in axis_names))
    return jax.shard_map(
        functools.partial(layer_results, config), mesh=config.group.mesh, axis_names=axis_names,
        in_specs=(specs, tokens, P()), out_specs=(tokens, P(), P(), P()))


VIEWS = {
    "jit": lambda config: functools.partial(layer_results, config),
    "shard_map": inside_shard_map,
    # The layer enters a shard_map over the expert axis itself.
    "shard_map_over_data": lambda config: inside_shard_map(config, frozenset({"data"})),
}


@pytest.mark.parametrize("view, axis_type", [
    ("jit", AxisType.Auto),
    ("jit", AxisType.Explicit),
    ("shard_map", AxisType.Auto),
    pytest.param("shard_map", AxisType.Explicit, marks=pytest.mark.slow),
    pytest.param("shard_map_over_data", AxisType.Auto, marks=pytest.mark.slow),
    pytest.param("shard_map_over_data", AxisType.Explicit, marks=pytest.mark.slow),
])
def test_results_and_gradients_equal_the_dense_layer(view, axis_type, expected):
    config = make_config(axis_type)
    params, x = make_params(config), make_x(config)
    (_, (*results, num_dropped)), grads = value_and_grad(VIEWS[view](config))(params, x, BIAS)
    assert num_dropped == 0
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        (tuple(results), grads), expected)


def test_tokens_in_any_leading_dimensions():
    """The number of tokens must divide, and not the batch."""
    config = make_config()
    params = make_params(config)
    apply = jax.jit(functools.partial(layer.apply, config))
    flat = make_x(config, (12,))
    y, stats = apply(params, flat, BIAS)
    for shape, spec in (((2, 6), P("data", "expert")), ((3, 2, 2), P())):
        x = jax.device_put(flat.reshape(*shape, FEATURES), NamedSharding(config.group.mesh, spec))
        other, other_stats = apply(params, x, BIAS)
        np.testing.assert_array_equal(other.reshape(y.shape), y)
        assert other_stats.topk_idx.shape == (*shape, TOPK)
        np.testing.assert_array_equal(other_stats.topk_idx.reshape(12, TOPK), stats.topk_idx)


@pytest.mark.parametrize("layout", [
    "expert", pytest.param("padded", marks=pytest.mark.slow)])
def test_capacity_factor_drops_and_counts(layout):
    config = make_config(
        capacity_factor=0.5, layout=layout, expert_alignment=1, num_shared_experts=0)
    params, x = make_params(config), make_x(config)
    y, stats = jax.jit(functools.partial(layer.apply, config))(params, x, BIAS)
    pairs = BATCH * LENGTH * TOPK
    assert 0 < stats.num_dropped < pairs
    assert stats.expert_load.sum() == pairs  # before dropping
    assert np.abs(y).max() > 0


@pytest.mark.slow
def test_compute_dtype(expected):
    config = make_config(dtype=jnp.bfloat16)
    apply = jax.jit(functools.partial(layer.apply, config))
    y, _ = apply(make_params(config), make_x(config), BIAS)
    assert y.dtype == jnp.bfloat16
    y_expected = expected[0][0]
    np.testing.assert_allclose(
        y.astype(np.float32), y_expected, atol=0.05 * np.abs(y_expected).max())



class NnxModel(nnx.Module):
    """How a model uses the layer."""

    def __init__(self, config, rngs):
        self.moe = ep_nnx.MoE(config, rngs=rngs)

    def __call__(self, x):
        y, stats = self.moe(x)
        return x + y, stats


@functools.cache
def nnx_model(axis_type):
    config = make_config(axis_type)
    return NnxModel(config, nnx.Rngs(jax.random.key(0, impl="rbg")))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_nnx_module(axis_type):
    model = nnx_model(axis_type)
    config = model.moe.config
    weights = layer.weights(config)
    for name, weight in weights.items():
        param = getattr(model.moe, name)
        assert param.shape == weight.shape
        assert param[...].sharding.is_equivalent_to(
            NamedSharding(config.group.mesh, weight.spec), len(weight.shape))
        assert 0.5 < np.std(param[...]) * weight.shape[-2] ** 0.5 < 1.5
    gate_up = np.asarray(model.moe.gate_up[...])
    assert not np.array_equal(gate_up[0], gate_up[1])

    x = make_x(config)

    @nnx.jit
    def step(model, x):
        (_, stats), grads = nnx.value_and_grad(
            lambda model: (lambda y, stats: (objective(y, stats.aux_loss), stats))(*model(x)),
            has_aux=True)(model)
        model.moe.update_correction_bias(stats.expert_load)
        return stats, grads

    stats, grads = step(model, x)
    assert set(grads["moe"]) == set(weights)  # the correction bias gets no gradient
    np.testing.assert_allclose(
        model.moe.correction_bias[...],
        0.01 * np.sign(np.mean(stats.expert_load) - stats.expert_load), rtol=1e-6)


def test_nnx_module_in_shard_map_by_its_partition_specs():
    model = nnx_model(AxisType.Auto)
    graphdef, state = nnx.split(model)
    specs = nnx.get_partition_spec(state)
    assert specs["moe"]["gate_up"].get_value() == P("expert", None, None)
    x = make_x(model.moe.config)
    apply = lambda state, x: nnx.merge(graphdef, state)(x)
    expected, expected_stats = jax.jit(apply)(state, x)
    y, stats = jax.jit(jax.shard_map(
        apply, mesh=model.moe.config.group.mesh, in_specs=(specs, TOKENS),
        out_specs=(TOKENS, STATS_SPEC)))(state, x)
    np.testing.assert_array_equal(y, expected)
    jax.tree.map(np.testing.assert_array_equal, stats, expected_stats)


@pytest.mark.parametrize("axis_type", [
    pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit])
def test_linen_module(axis_type, expected):
    config = make_config(axis_type)
    x = make_x(config)
    module = ep_linen.MoE(config)
    with jax.set_mesh(config.group.mesh):
        boxed = jax.jit(module.init)(jax.random.key(0, impl="rbg"), x)
    specs = nn.get_partition_spec(boxed)["params"]
    variables = nn.unbox(boxed)
    params = make_params(config)
    for name, weight in layer.weights(config).items():
        assert specs[name] == (P("expert", None, None) if weight.spec else P(None, None))
        assert variables["params"][name].sharding.is_equivalent_to(
            params[name].sharding, len(weight.shape))

    variables = {"params": params, "router_state": {"correction_bias": jnp.asarray(BIAS)}}
    (y, stats), updated = jax.jit(
        functools.partial(module.apply, mutable=["router_state"]))(variables, x)
    (y_expected, _, load), _ = expected
    np.testing.assert_allclose(y, y_expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        updated["router_state"]["correction_bias"], BIAS + 0.01 * np.sign(load.mean() - load))


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["nnx", "linen"])
def test_init_in_shard_map_equals_init_outside(flavour):
    config = make_config(correction_bias_rate=None)
    x = make_x(config)

    def init(x):
        if flavour == "linen":
            return nn.unbox(ep_linen.MoE(config).init(jax.random.key(0), x))["params"]
        model = ep_nnx.MoE(config, rngs=nnx.Rngs(0))
        return {name: getattr(model, name)[...] for name in layer.weights(config)}

    specs = {name: weight.spec for name, weight in layer.weights(config).items()}
    inside = jax.jit(jax.shard_map(
        init, mesh=config.group.mesh, in_specs=TOKENS, out_specs=specs))(x)
    jax.tree.map(np.testing.assert_array_equal, inside, jax.jit(init)(x))


def test_errors():
    config = make_config()
    params = make_params(config)
    apply = functools.partial(layer.apply, config)
    with pytest.raises(ValueError, match="10 tokens.*4 devices"):
        jax.eval_shape(apply, params, np.zeros((5, 2, FEATURES), np.float32))
    with pytest.raises(ValueError, match="features=8"):
        jax.eval_shape(apply, params, np.zeros((4, 2, FEATURES + 1), np.float32))
    with pytest.raises(ValueError, match="token_axes"):
        dataclasses.replace(config, token_axes=("data",))
    with pytest.raises(ValueError, match="token_axes"):
        dataclasses.replace(config, token_axes=("expert", "model"))


def test_a_group_of_two_axes_must_be_manual_as_a_whole():
    group = jax_ep.Group(
        make_group().mesh, AXES, num_experts=EXPERTS, num_topk=TOPK, max_tokens_per_rank=8,
        max_row_bytes=4 * FEATURES)
    config = MoEConfig(group, FEATURES, WIDTH)
    apply = jax.shard_map(
        lambda params, x: layer.apply(config, params, x)[0], mesh=group.mesh,
        axis_names={"data"}, in_specs=(P(), P("data")), out_specs=P("data"))
    with pytest.raises(ValueError, match="all or none of the group's axes"):
        jax.eval_shape(apply, make_params(config), make_x(config))
