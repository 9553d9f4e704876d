"""Derivatives: dispatch and combine are each other's transposes, and weights flow back."""

import jax
import jax.numpy as jnp
import jax_ep
import ml_dtypes
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits, assert_same_values
from jax_ep.testing.run import runner

HIDDEN = 4


def case_of(layout, capacity="tight"):
    return Case(num_ranks=2, num_topk=3, layout=layout, expert_alignment=8).with_capacity(capacity)


def arrays(case, kind="unrouted", seed=0):
    """Plan, handle-ready topk_idx, x and topk_weights."""
    topk_idx = cases.routing(kind, case, seed)
    x = cases.floats(np.float32, (case.num_ranks, case.num_tokens, HIDDEN), seed)
    weights = cases.floats(np.float32, topk_idx.shape, seed + 1)
    return oracle.prepare(case.oracle_config, topk_idx), topk_idx, x, weights


def weights_transpose(plan, row_weights):
    """topk_weights' cotangent: each pair reads the place that its weight was copied to."""
    topk_weights = np.zeros(plan.slots.shape, row_weights.dtype)
    for src, t, k, dst, row in plan.placed_pairs():
        where = (dst, *row, k) if plan.config.layout == "rank" else (dst, *row)
        topk_weights[src, t, k] = row_weights[where]
    return topk_weights


def junk_outside(plan, leaf):
    """NaN in the rows without a source, as an uninitialised GEMM output may have."""
    leaf = leaf.copy()
    leaf[plan.row_source < 0] = np.nan
    return leaf


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_transpose_of_dispatch_is_combine(layout, backend):
    case = case_of(layout)
    plan, topk_idx, x, weights = arrays(case)
    x = {"a": x, "b": x.astype(ml_dtypes.bfloat16)}
    handle = runner(case, backend).prepare(topk_idx)
    (rows, row_weights), vjp = jax.vjp(
        lambda x, w: runner(case, backend).dispatch(handle, x, w), x, weights)
    rows_bar = {name: junk_outside(plan, cases.floats(leaf.dtype, leaf.shape, 3))
                for name, leaf in rows.items()}
    weights_bar = junk_outside(plan, cases.floats(np.float32, row_weights.shape, 4))
    x_bar, topk_weights_bar = vjp((rows_bar, weights_bar))
    assert_same_bits(x_bar, {name: oracle.combine(plan, leaf) for name, leaf in rows_bar.items()})
    assert_same_bits(topk_weights_bar, weights_transpose(plan, weights_bar))


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_transpose_of_combine_is_dispatch(layout, backend):
    case = case_of(layout)
    plan, topk_idx, x, _ = arrays(case)
    handle = runner(case, backend).prepare(topk_idx)
    rows = [cases.floats(dtype, (case.num_ranks, *case.row_dims, HIDDEN), 5)
            for dtype in (np.float32, ml_dtypes.bfloat16)]
    y, vjp = jax.vjp(lambda rows: runner(case, backend).combine(handle, rows), rows)
    y_bar = [x, x.astype(ml_dtypes.bfloat16)]
    expected = [oracle.dispatch(plan, leaf) for leaf in y_bar]
    assert_same_bits(vjp(y_bar)[0], expected)
    # d(combine) is combine, d(dispatch) dispatch.
    _, y_dot = jax.jvp(lambda rows: runner(case, backend).combine(handle, rows),
                       (rows,), (expected,))
    assert_same_bits(y_dot, [oracle.combine(plan, leaf) for leaf in expected])


@pytest.mark.parametrize("layout", ["expert", "padded"])
def test_weighted_combine_is_bilinear(layout, backend):
    case = case_of(layout)
    plan, topk_idx, y_bar, _ = arrays(case)
    handle = runner(case, backend).prepare(topk_idx)
    rows = junk_outside(plan, cases.floats(np.float32, (2, *case.row_dims, HIDDEN), 5))
    weights = junk_outside(plan, cases.floats(np.float32, (2, *case.row_dims), 6))
    y, vjp = jax.vjp(lambda r, w: runner(case, backend).combine(handle, r, w), rows, weights)
    rows_bar, weights_bar = map(np.asarray, vjp(y_bar))
    sent = oracle.dispatch(plan, y_bar)
    live = plan.row_source >= 0
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(
            rows_bar, np.where(live[..., None], weights[..., None] * sent, 0), rtol=1e-6)
        np.testing.assert_allclose(
            weights_bar, np.where(live, (rows.astype(np.float64) * sent).sum(-1), 0),
            rtol=1e-5, atol=1e-5)
    assert not rows_bar[~live].any() and not weights_bar[~live].any()


def test_half_precision_tangents(backend):
    """Cotangents have their primal's dtype: bfloat16 rows, float32 weights and the reverse."""
    case = case_of("expert", "worst")
    plan, topk_idx, x, _ = arrays(case)
    handle = runner(case, backend).prepare(topk_idx)
    for row_dtype, weight_dtype in ((ml_dtypes.bfloat16, np.float32),
                                    (np.float32, ml_dtypes.bfloat16)):
        rows = cases.floats(row_dtype, (2, *case.row_dims, HIDDEN), 5)
        weights = cases.floats(weight_dtype, (2, *case.row_dims), 6)
        y, vjp = jax.vjp(lambda r, w: runner(case, backend).combine(handle, r, w), rows, weights)
        rows_bar, weights_bar = vjp(x.astype(row_dtype))
        assert (rows_bar.dtype, weights_bar.dtype) == (row_dtype, weight_dtype)
        sent = oracle.dispatch(plan, x.astype(row_dtype)).astype(np.float64)
        np.testing.assert_allclose(np.asarray(rows_bar, np.float64),
                                   weights.astype(np.float64)[..., None] * sent, rtol=2e-2)
        np.testing.assert_allclose(np.asarray(weights_bar, np.float64),
                                   (rows.astype(np.float64) * sent).sum(-1), rtol=2e-2, atol=0.3)


def test_integer_and_bool_leaves(backend):
    """They have float0 tangents; the float leaf beside them its usual one."""
    case = case_of("expert")
    plan, topk_idx, x, _ = arrays(case)
    handle = runner(case, backend).prepare(topk_idx)
    tree = {"x": x, "ids": np.arange(10, dtype=np.int32).reshape(2, 5), "mask": x > 0}

    def dispatch(tree):
        return runner(case, backend).dispatch(handle, tree)[0]

    rows, vjp = jax.vjp(dispatch, tree)
    bar = {name: cases.floats(np.float32, leaf.shape) if name == "x"
           else np.zeros(leaf.shape, jax.dtypes.float0) for name, leaf in rows.items()}
    tree_bar, = vjp(bar)
    assert_same_bits(tree_bar["x"], oracle.combine(plan, bar["x"]))
    assert tree_bar["ids"].dtype == tree_bar["mask"].dtype == jax.dtypes.float0
    loss = jax.grad(lambda x: (dispatch({**tree, "x": x})["x"] ** 2).sum() / 2)
    expected = oracle.combine(plan, oracle.dispatch(plan, x))
    np.testing.assert_allclose(loss(x), expected, rtol=1e-6)


def moe(group, case, use_weights=True):
    """combine(expert(dispatch)) on stacked arrays, with a nonlinear expert."""
    def f(topk_idx, x, topk_weights):
        handle = run.prepare(group, case, topk_idx)
        rows, row_weights = jax_ep.dispatch(x, handle, topk_weights)
        if not use_weights:
            return jax_ep.combine(jnp.sin(rows), handle), row_weights
        return jax_ep.combine(jnp.sin(rows), handle, row_weights)

    return run.per_rank(group, f)


@pytest.mark.slow
@pytest.mark.parametrize("layout, backend", [
    ("expert", "native"), ("rank", "native"), ("padded", "native"), ("expert", "xla")])
def test_check_grads(layout, backend):
    """Orders 1 and 2 (the reference, slow to compile: 1), forward and reverse, with drops."""
    case = case_of(layout)
    _, topk_idx, x, weights = arrays(case)
    f = jax.jit(moe(run.group_of(case, backend), case, use_weights=layout != "rank"))
    check_grads(lambda x, w: f(topk_idx, x / 4, w / 4), (x, weights),
                order=2 if backend == "native" else 1, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2)


@pytest.mark.slow
def test_check_grads_in_float64():
    backend = "native"
    with jax.enable_x64(True):
        case = case_of("padded")
        _, topk_idx, x, weights = arrays(case)
        f = jax.jit(moe(run.group_of(case, backend), case))
        check_grads(lambda x, w: f(topk_idx, x, w),
                    (x.astype(np.float64) / 4, weights.astype(np.float64) / 4), order=2,
                    modes=("fwd", "rev"), atol=1e-5, rtol=1e-5)


def dense(x, topk_idx, topk_weights, experts):
    """Every expert on every token, on one device; topk_idx -1 selects nothing."""
    out = jnp.einsum("rth,ehf->retf", x, experts)
    select = (topk_idx[..., None] == jnp.arange(experts.shape[0])) * topk_weights[..., None]
    return jnp.einsum("rtke,retf->rtf", select, jnp.tanh(out))


@pytest.mark.parametrize("layout, kind, backend", [
    ("expert", "unrouted", "native"), ("padded", "duplicates", "native"),
    pytest.param("expert", "duplicates", "xla", marks=pytest.mark.slow)])
def test_layer_equals_dense_computation(layout, kind, backend):
    """Values and gradients of tokens, gate weights and expert weights."""
    case = Case(num_ranks=4, num_topk=3, layout=layout, expert_alignment=8)
    _, topk_idx, x, weights = arrays(case, kind)
    x, weights = x / 4, weights / 4
    group = run.group_of(case, backend)
    experts = cases.floats(np.float32, (case.num_experts, HIDDEN, HIDDEN), 9) / 4

    def expert_parallel(x, topk_idx, topk_weights, experts):
        def f(x, topk_idx, topk_weights, experts):
            handle = run.prepare(group, case, topk_idx)
            rows, row_weights = jax_ep.dispatch(x, handle, topk_weights)
            if layout == "padded":
                out = jnp.einsum("ech,ehf->ecf", rows, experts)
            else:
                out = jax.lax.ragged_dot(rows, experts, handle.group_sizes)
            return jax_ep.combine(jnp.tanh(out), handle, row_weights)

        experts = experts.reshape(case.num_ranks, -1, HIDDEN, HIDDEN)
        return run.per_rank(group, f)(x, topk_idx, topk_weights, experts)

    def loss(f):
        return jax.jit(jax.value_and_grad(
            lambda x, w, e: (f(x, topk_idx, w, e) ** 2).sum(), argnums=(0, 1, 2)))

    actual = loss(expert_parallel)(x, weights, experts)
    expected = loss(dense)(x, weights, experts)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=1e-5)


def test_second_derivative_of_the_transpose(backend):
    """grad(grad) through both primitives equals that of a plain gather and sum."""
    case = Case(num_ranks=2, num_topk=3)
    _, topk_idx, x, weights = arrays(case)
    x, weights = x / 4, weights / 4
    f = moe(run.group_of(case, backend), case)

    def plain(topk_idx, x, weights):
        return jnp.sin(x) * jnp.where(topk_idx >= 0, weights, 0).sum(-1, keepdims=True)

    def second(f):
        def first(x, w):
            grads = jax.grad(lambda x, w: (f(topk_idx, x, w) ** 2).sum(), (0, 1))(x, w)
            return sum((g**2).sum() for g in grads)

        return jax.jit(jax.grad(first, (0, 1)))(x, weights)

    for a, e in zip(second(f), second(plain)):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


def test_linear_transpose(backend):
    case = case_of("expert")
    plan, topk_idx, x, _ = arrays(case)
    handle = runner(case, backend).prepare(topk_idx)
    rows = cases.floats(np.float32, (2, *case.row_dims, HIDDEN), 5)
    transpose = jax.linear_transpose(lambda x: runner(case, backend).dispatch(handle, x)[0], x)
    assert_same_values(transpose(rows)[0], oracle.combine(plan, rows))
