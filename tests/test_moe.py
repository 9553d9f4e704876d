"""`moe` and `swiglu` against a loop over all experts without any communication."""

import functools

import jax
import jax.numpy as jnp
import jax_ep
import ml_dtypes
import numpy as np
import pytest

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.cases import Case

HIDDEN, WIDTH, OUT = 6, 5, 4


def inputs(case, dtype=np.float32):
    """topk_idx, and the differentiable (x, topk_weights, w_gate_up, w_down), by rank.

    Some pairs are not routed, and some tokens name an expert twice.
    """
    shapes = ((case.num_tokens, HIDDEN), (case.num_tokens, case.num_topk),
              (case.experts_per_rank, HIDDEN, 2 * WIDTH), (case.experts_per_rank, WIDTH, OUT))
    rng = np.random.default_rng(0)
    topk_idx = rng.integers(
        -1, case.num_experts, (case.num_ranks, case.num_tokens, case.num_topk), np.int32)
    values = [rng.normal(size=(case.num_ranks, *shape)).astype(np.float32) for shape in shapes]
    values[0] = values[0].astype(dtype)
    return topk_idx, tuple(values)


def poisoned(expert_fn):
    """Adds NaN to the results of rows that hold no token, as a GEMM that skips them may."""

    def call(rows, group_sizes):
        out = expert_fn(rows, group_sizes)
        empty = jnp.all(rows == 0, axis=-1, keepdims=True)
        return jnp.where(empty, jnp.nan, out)

    return call


def ep_moe(case, kind, topk_idx, args):
    """The layer over the ranks; also the handle's num_dropped."""
    group = run.group_of(case, kind)

    def layer(topk_idx, x, topk_weights, w_gate_up, w_down):
        expert_fn = functools.partial(jax_ep.swiglu, w_gate_up=w_gate_up, w_down=w_down)
        y, handle = jax_ep.moe(
            group, x, topk_idx, topk_weights, poisoned(expert_fn), capacity=case.capacity,
            expert_alignment=case.expert_alignment, layout=case.layout)
        return y, handle.num_dropped

    return run.per_rank(group, layer)(topk_idx, *args)


def dense_moe(case, topk_idx, args):
    """Every expert on every token, weighted by the pairs that were not dropped."""
    x, topk_weights, w_gate_up, w_down = args
    placed = oracle.prepare(case.oracle_config, topk_idx).slots >= 0
    w_gate_up = w_gate_up.reshape(-1, *w_gate_up.shape[2:])
    w_down = w_down.reshape(-1, *w_down.shape[2:])
    y = 0
    for expert in range(case.num_experts):
        gate, up = jnp.split(x.astype(jnp.float32) @ w_gate_up[expert], 2, axis=-1)
        weight = jnp.sum(jnp.where((topk_idx == expert) & placed, topk_weights, 0), axis=-1)
        y += weight[..., None] * ((gate / (1 + jnp.exp(-gate)) * up) @ w_down[expert])
    return y


@pytest.mark.parametrize("layout, capacity, backend", [
    ("expert", None, "native"),
    ("expert", 9, "native"),
    ("padded", 3, "native"),
    pytest.param("padded", None, "native", marks=pytest.mark.slow),
    pytest.param("expert", 9, "xla", marks=pytest.mark.slow),
    pytest.param("padded", 3, "xla", marks=pytest.mark.slow),
])
def test_moe_and_its_gradients_equal_the_dense_layer(layout, capacity, backend):
    case = Case(layout=layout, expert_alignment=4, num_tokens=9, capacity=capacity)
    topk_idx, args = inputs(case)
    cotangent = cases.floats(np.float32, (*topk_idx.shape[:2], OUT), 1)

    def loss(f, args):
        y, *rest = f(args)
        return jnp.vdot(y, cotangent), (y, *rest)

    def both(f):
        (_, results), grads = jax.jit(jax.value_and_grad(functools.partial(loss, f), has_aux=True))(
            args)
        return results, grads

    (y, num_dropped), grads = both(lambda args: ep_moe(case, backend, topk_idx, args))
    (expected,), expected_grads = both(lambda args: (dense_moe(case, topk_idx, args),))
    assert np.any(num_dropped) == (capacity is not None)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-5)


def test_bfloat16_tokens_with_float32_weights():
    case = Case(num_tokens=9)
    topk_idx, args = inputs(case, ml_dtypes.bfloat16)
    y, _ = jax.jit(lambda args: ep_moe(case, "native", topk_idx, args))(args)
    assert y.dtype == jnp.bfloat16
    expected = jax.jit(functools.partial(dense_moe, case, topk_idx))(args)
    np.testing.assert_allclose(
        y.astype(np.float32), expected, atol=0.03 * np.abs(expected).max())


def test_expert_fn_gets_the_tree_of_x():
    """Such as quantised rows with their scales."""
    case = Case()
    group = run.group_of(case, "native")
    topk_idx, (x, topk_weights, *_) = inputs(case)
    quantised = x.astype(ml_dtypes.float8_e4m3fn)
    scales = np.full((*x.shape[:2], 1), 2, np.float32)

    def layer(topk_idx, topk_weights, quantised, scales):
        def expert_fn(rows, group_sizes):
            values, scales = rows
            return values.astype(jnp.float32) * scales

        return jax_ep.moe(group, (quantised, scales), topk_idx, topk_weights, expert_fn)[0]

    y = jax.jit(run.per_rank(group, layer))(topk_idx, topk_weights, quantised, scales)
    weight = np.where(topk_idx < 0, 0, topk_weights).sum(-1, keepdims=True)
    expected = 2 * quantised.astype(np.float32) * weight
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kwargs, text", [
    (dict(layout="rank"), "layout"),
    (dict(expert_fn=lambda rows, sizes: rows[1:]), "expert_fn"),
    (dict(expert_fn=lambda rows, sizes: rows.sum(0)), "expert_fn"),
])
def test_moe_errors(kwargs, text):
    case = Case()
    group = run.group_of(case, "native")
    topk_idx, (x, topk_weights, *_) = inputs(case)
    kwargs = {"expert_fn": lambda rows, sizes: rows, **kwargs}
    layer = lambda *args: jax_ep.moe(group, *args, **kwargs)[0]
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(run.per_rank(group, layer), x, topk_idx, topk_weights)


def test_swiglu_of_sorted_and_of_padded_rows_equals_numpy():
    rng = np.random.default_rng(0)
    group_sizes = np.array([2, 0, 3], np.int32)
    w_gate_up = rng.normal(size=(3, HIDDEN, 2 * WIDTH)).astype(np.float32)
    w_down = rng.normal(size=(3, WIDTH, OUT)).astype(np.float32)
    padded = rng.normal(size=(3, 4, HIDDEN)).astype(np.float32)
    expected = np.zeros((3, 4, OUT))
    for expert in range(3):
        gate, up = np.split(padded[expert] @ w_gate_up[expert], 2, axis=-1)
        expected[expert] = (gate / (1 + np.exp(-gate)) * up) @ w_down[expert]

    y = jax.jit(jax_ep.swiglu)(padded, group_sizes, w_gate_up, w_down)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)

    sort = lambda a: np.concatenate([a[i, :size] for i, size in enumerate(group_sizes)])
    rows = np.concatenate([sort(padded), np.full((3, HIDDEN), np.nan, np.float32)])
    y = jax.jit(jax_ep.swiglu)(rows, group_sizes, w_gate_up, w_down)
    np.testing.assert_allclose(y[:5], sort(expected), rtol=1e-5, atol=1e-5)
    if jax.default_backend() == "cpu":  # where ragged_dot fills the rows that it skips
        np.testing.assert_array_equal(y[5:], np.zeros((3, OUT)))


@pytest.mark.parametrize("change, text", [
    (dict(rows=np.zeros((HIDDEN,), np.float32)), "rows"),
    (dict(rows=np.zeros((3, 4, HIDDEN), np.float32)), "rows"),
    (dict(w_gate_up=np.zeros((2, HIDDEN, 2 * WIDTH + 1), np.float32)), "w_gate_up"),
    (dict(w_gate_up=np.zeros((2, HIDDEN + 1, 2 * WIDTH), np.float32)), "w_gate_up"),
    (dict(w_down=np.zeros((2, WIDTH + 1, OUT), np.float32)), "w_down"),
    (dict(w_down=np.zeros((1, WIDTH, OUT), np.float32)), "w_down"),
])
def test_swiglu_errors(change, text):
    args = dict(rows=np.zeros((8, HIDDEN), np.float32), group_sizes=np.zeros(2, np.int32),
                w_gate_up=np.zeros((2, HIDDEN, 2 * WIDTH), np.float32),
                w_down=np.zeros((2, WIDTH, OUT), np.float32))
    with pytest.raises(ValueError, match=text):
        jax_ep.swiglu(**{**args, **change})
