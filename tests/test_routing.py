"""Gates and balance statistics against plain numpy written from the published formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import routing

# One compilation per case instead of one per operation.
route = jax.jit(routing.route, static_argnames=(
    "num_topk", "score", "renormalize", "scaling_factor", "num_groups", "topk_groups"))
load_balance_loss = jax.jit(routing.load_balance_loss, static_argnames=("score", "axis_name"))
expert_load = jax.jit(routing.expert_load, static_argnames=("num_experts", "axis_name"))

SIGMOID = dict(score="sigmoid", renormalize=True, scaling_factor=2.5)
GATES = {
    "softmax": dict(),
    "renormalized": dict(renormalize=True),
    "sigmoid": SIGMOID,
    "bias": dict(SIGMOID, bias=True),
    "grouped": dict(SIGMOID, bias=True, num_groups=4, topk_groups=2),
    "grouped_softmax": dict(num_groups=8, topk_groups=3),
    "groups_of_one": dict(score="sigmoid", num_groups=16, topk_groups=5),
    "one_group": dict(num_groups=1),
}


def make_inputs(num_tokens=64, num_experts=16, bias=False, **options):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(num_tokens, num_experts), scale=2).astype(np.float32)
    if bias:
        options["correction_bias"] = rng.normal(size=num_experts, scale=0.5).astype(np.float32)
    return logits, options


def numpy_scores(logits, score):
    logits = logits.astype(np.float64)
    if score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def numpy_best(values, count):
    """Indices of the `count` largest values, the lowest index first among equals."""
    return np.argsort(-values, kind="stable")[:count]


def numpy_route(logits, num_topk, score="softmax", renormalize=False, scaling_factor=1.0,
                correction_bias=None, num_groups=1, topk_groups=1):
    weights, chosen = [], []
    for scores in numpy_scores(logits, score):
        biased = scores + (0 if correction_bias is None else correction_bias)
        groups = biased.reshape(num_groups, -1)
        group_values = np.array([np.sort(group)[-2:].sum() for group in groups])
        for group in set(range(num_groups)) - set(numpy_best(group_values, topk_groups)):
            groups[group] = -np.inf
        best = numpy_best(groups.reshape(-1), num_topk)
        weight = scores[best] / (scores[best].sum() if renormalize else 1)
        chosen.append(best)
        weights.append(weight * scaling_factor)
    return np.array(weights), np.array(chosen)


@pytest.mark.parametrize("gate, num_topk", [*((gate, 5) for gate in GATES), ("grouped", 1)])
def test_route_equals_numpy(gate, num_topk):
    logits, options = make_inputs(**GATES[gate])
    expected_weights, expected_idx = numpy_route(logits, num_topk, **options)
    weights, idx = route(logits, num_topk, **options)
    assert weights.dtype == jnp.float32 and idx.dtype == jnp.int32
    np.testing.assert_array_equal(idx, expected_idx)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-6)


def test_ties_go_to_the_lowest_index():
    logits = np.zeros((3, 8), np.float32)
    _, idx = route(logits, 3)
    np.testing.assert_array_equal(idx, [[0, 1, 2]] * 3)
    _, idx = route(logits, 3, score="sigmoid", num_groups=4, topk_groups=2)
    np.testing.assert_array_equal(idx, [[0, 1, 2]] * 3)


def test_negative_biased_scores_do_not_lose_to_masked_groups():
    logits = np.zeros((1, 4), np.float32)
    bias = np.array([-3.0, -2.0, -5.0, -5.0])
    _, idx = route(logits, 2, score="sigmoid", correction_bias=bias, num_groups=2, topk_groups=1)
    np.testing.assert_array_equal(idx, [[1, 0]])


def test_bfloat16_logits_are_computed_in_float32():
    logits = jnp.asarray(make_inputs()[0], jnp.bfloat16)
    weights, idx = route(logits, 3, score="sigmoid", renormalize=True)
    expected = route(logits.astype(jnp.float32), 3, score="sigmoid", renormalize=True)
    assert weights.dtype == jnp.float32
    np.testing.assert_array_equal(weights, expected[0])
    np.testing.assert_array_equal(idx, expected[1])


def test_underflowing_scores_give_zero_weights():
    weights, _ = route(np.full((1, 4), -1e4, np.float32), 2, score="sigmoid", renormalize=True)
    np.testing.assert_array_equal(weights, [[0, 0]])


def test_no_tokens():
    weights, idx = route(np.zeros((0, 8), np.float32), 2, num_groups=4, topk_groups=2)
    assert weights.shape == idx.shape == (0, 2)
    assert load_balance_loss(np.zeros((0, 8), np.float32), idx) == 0
    np.testing.assert_array_equal(expert_load(idx, 8), np.zeros(8))


@pytest.mark.parametrize("gate", ["softmax", "renormalized", "grouped"])
def test_gradient_goes_through_the_weights_only(gate):
    """The derivative is that of the weights with the selection held fixed."""
    logits, options = make_inputs(num_tokens=4, **GATES[gate])
    bias = options.pop("correction_bias", np.zeros(16, np.float32))
    cotangent = np.random.default_rng(1).normal(size=(4, 3))

    def loss(logits, bias):
        weights, _ = route(logits, 3, correction_bias=bias, **options)
        return jnp.sum(weights * cotangent)

    grad_logits, grad_bias = jax.jit(jax.grad(loss, argnums=(0, 1)))(logits, bias)
    np.testing.assert_array_equal(grad_bias, np.zeros(16))

    _, idx = numpy_route(logits, 3, correction_bias=bias, **options)

    def numpy_loss(logits):
        weights = np.take_along_axis(numpy_scores(logits, options.get("score", "softmax")), idx, -1)
        if options.get("renormalize"):
            weights /= weights.sum(-1, keepdims=True)
        return np.sum(weights * cotangent) * options.get("scaling_factor", 1.0)

    step = 1e-4
    expected = np.zeros(logits.shape)
    for place in np.ndindex(*logits.shape):
        delta = np.zeros(logits.shape)
        delta[place] = step
        expected[place] = (numpy_loss(logits + delta) - numpy_loss(logits - delta)) / (2 * step)
    np.testing.assert_allclose(grad_logits, expected, atol=2e-6)


@pytest.mark.parametrize("kwargs, error, text", [
    (dict(num_topk=0), ValueError, "num_topk"),
    (dict(num_topk=9), ValueError, "num_topk"),
    (dict(score="relu"), ValueError, "score"),
    (dict(router_logits=np.zeros((4, 2, 8), np.float32)), ValueError, "router_logits"),
    (dict(router_logits=np.zeros((4, 8), np.int32)), TypeError, "router_logits"),
    (dict(correction_bias=np.zeros(7, np.float32)), ValueError, "correction_bias"),
    (dict(correction_bias=np.zeros(8, np.int32)), TypeError, "correction_bias"),
    (dict(num_groups=3, topk_groups=1), ValueError, "num_groups"),
    (dict(num_groups=4), ValueError, "topk_groups"),
    (dict(topk_groups=2), ValueError, "num_groups"),
    (dict(num_groups=4, topk_groups=5), ValueError, "topk_groups"),
    (dict(num_topk=3, num_groups=4, topk_groups=1), ValueError, "num_topk"),
])
def test_route_errors(kwargs, error, text):
    kwargs = {"router_logits": np.zeros((4, 8), np.float32), "num_topk": 2, **kwargs}
    with pytest.raises(error, match=text):
        routing.route(**kwargs)


def numpy_load_balance_loss(logits, idx, score):
    probs = numpy_scores(logits, score)
    probs /= probs.sum(-1, keepdims=True)
    load = np.bincount(idx[idx >= 0], minlength=logits.shape[1])
    return logits.shape[1] * np.sum(load / load.sum() * probs.mean(0))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_load_balance_loss_equals_numpy(score):
    logits, _ = make_inputs()
    idx = np.array(route(logits, 3, score=score)[1])
    idx[::5, 1] = -1
    loss = load_balance_loss(logits, idx, score=score)
    np.testing.assert_allclose(loss, numpy_load_balance_loss(logits, idx, score), rtol=1e-6)


def test_load_balance_loss_is_one_when_balanced_and_num_experts_when_collapsed():
    idx = np.arange(32, dtype=np.int32).reshape(32, 1) % 8
    even = np.zeros((32, 8), np.float32)
    np.testing.assert_allclose(load_balance_loss(even, idx), 1.0, rtol=1e-6)
    collapsed = np.zeros((32, 8), np.float32)
    collapsed[:, 3] = 50
    np.testing.assert_allclose(
        load_balance_loss(collapsed, np.full((32, 1), 3)), 8.0, rtol=1e-6)


def test_load_balance_loss_over_an_axis_is_that_of_the_global_batch():
    logits, _ = make_inputs()
    _, idx = route(logits, 2)
    mesh = jax.make_mesh((4,), ("expert",))

    def sharded(logits):
        return jax.shard_map(
            lambda l, i: (routing.load_balance_loss(l, i, axis_name="expert"),
                          routing.expert_load(i, 16, axis_name=("expert",))),
            mesh=mesh, in_specs=P("expert"), out_specs=P())(logits, idx)

    place = jax.NamedSharding(mesh, P("expert"))
    logits_sharded, idx = jax.device_put(logits, place), jax.device_put(idx, place)
    (loss, load), grad = jax.jit(jax.value_and_grad(sharded, has_aux=True))(logits_sharded)
    one_device = jax.jit(jax.value_and_grad(routing.load_balance_loss))
    expected, expected_grad = one_device(logits, np.asarray(idx))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, atol=1e-8)
    np.testing.assert_array_equal(load, np.bincount(np.asarray(idx).ravel(), minlength=16))


def test_load_balance_loss_errors():
    logits = np.zeros((4, 8), np.float32)
    with pytest.raises(ValueError, match="topk_idx"):
        routing.load_balance_loss(logits, np.zeros((3, 2), np.int32))
    with pytest.raises(ValueError, match="score"):
        routing.load_balance_loss(logits, np.zeros((4, 2), np.int32), score="tanh")


def test_expert_load_ignores_unrouted():
    idx = np.array([[0, 2], [2, -1], [-1, -1], [2, 2]], np.int32)
    load = expert_load(idx, 4)
    assert load.dtype == jnp.int32
    np.testing.assert_array_equal(load, [1, 0, 4, 0])
    with pytest.raises(TypeError, match="topk_idx"):
        routing.expert_load(np.zeros((2, 2), np.float32), 4)


def test_update_correction_bias_moves_against_the_load():
    bias = np.array([0.5, 0.0, -0.25, 1.0])
    new = routing.update_correction_bias(bias, np.array([8, 2, 4, 2]), rate=0.125)
    np.testing.assert_array_equal(new, [0.375, 0.125, -0.25, 1.125])
    with pytest.raises(ValueError, match="correction_bias"):
        routing.update_correction_bias(bias, np.zeros(3, np.float32))


def test_correction_bias_balances_a_skewed_router():
    logits = make_inputs(num_tokens=512)[0] + np.linspace(-1, 1, 16, dtype=np.float32)

    def step(bias, _):
        _, idx = route(logits, 2, score="sigmoid", correction_bias=bias)
        load = expert_load(idx, 16)
        return routing.update_correction_bias(bias, load, rate=2e-3), load

    _, loads = jax.lax.scan(step, np.zeros(16, np.float32), length=400)
    assert loads[0].max() > 1.5 * loads[0].mean()
    assert loads[-1].max() < 1.15 * loads[-1].mean()
