"""jit, scan, loops, vmap, checkpoint and dead-code elimination of whole layers."""

import functools

import jax
import jax.numpy as jnp
import jax_ep
import numpy as np
import pytest

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits, assert_same_values
from jax_ep.testing.jaxprs import count_ops

CASE = Case(num_ranks=4, num_topk=3).with_capacity("tight")
HIDDEN = 8


def inputs(seed=0, case=CASE):
    x = cases.floats(np.float32, (case.num_ranks, case.num_tokens, HIDDEN), seed)
    return x, cases.routing("unrouted", case, seed)


def layer(group, x, topk_idx):
    """Halving is exact, so the oracle can follow."""
    handle = run.prepare(group, CASE, topk_idx)
    rows, _ = jax_ep.dispatch(x, handle)
    return jax_ep.combine(rows * 0.5, handle)


def layer_oracle(x, topk_idx):
    plan = oracle.prepare(CASE.oracle_config, topk_idx)
    return oracle.combine(plan, oracle.dispatch(plan, x) * np.float32(0.5))


@pytest.fixture
def group(backend):
    return run.group_of(CASE, backend)


def test_two_layers_in_one_program(group):
    """Also by an inner jit called twice: one call site, two instances in flight."""
    inner = jax.jit(functools.partial(layer, group))

    def f(x, one, two):
        y = layer(group, x, one)
        return y, layer(group, y, two), inner(x, one), inner(x, two), inner(y, two)

    (x, one), (_, two) = inputs(0), inputs(1)
    y, z, *others = jax.jit(run.per_rank(group, f))(x, one, two)
    assert_same_bits(y, layer_oracle(x, one))
    assert_same_bits(z, layer_oracle(np.asarray(y), two))
    assert_same_bits(others, [y, layer_oracle(x, two), z])


def test_without_jit(group):
    x, topk_idx = inputs()
    y = run.per_rank(group, functools.partial(layer, group))(x, topk_idx)
    assert_same_bits(y, layer_oracle(x, topk_idx))


def test_scan(group):
    """With a cached handle, and with prepare inside the loop."""
    num_layers = 6

    def f(x, topk_idx, many_topk_idx):
        handle = run.prepare(group, CASE, topk_idx)

        def cached(x, _):
            return jax_ep.combine(jax_ep.dispatch(x, handle)[0] * 0.5, handle), None

        def fresh(x, topk_idx):
            y = layer(group, x, topk_idx)
            return y, y

        return (jax.lax.scan(cached, x, length=num_layers)[0],
                jax.lax.scan(fresh, x, many_topk_idx)[1])

    x, topk_idx = inputs()
    many = np.stack([cases.routing("uniform", CASE, seed) for seed in range(num_layers)], axis=1)
    last, ys = jax.jit(run.per_rank(group, f))(x, topk_idx, many)
    expected = x
    for _ in range(num_layers):
        expected = layer_oracle(expected, topk_idx)
    assert_same_bits(last, expected)
    for i in range(num_layers):
        x = layer_oracle(x, many[:, i])
        assert_same_bits(np.asarray(ys)[:, i], x, f"layer {i}")


def test_loop_and_branch_known_at_run_time_only(group):
    def f(x, topk_idx, count):
        def step(state):
            i, x = state
            return i + 1, jax.lax.cond(i % 2 == 0, lambda: layer(group, x, topk_idx), lambda: -x)

        return jax.lax.while_loop(lambda state: state[0] < count, step, (0 * count, x))[1]

    x, topk_idx = inputs()
    program = jax.jit(run.per_rank(group, f))
    for count in (0, 3):
        y = program(x, topk_idx, np.full((CASE.num_ranks,), count, np.int32))
        expected = x if count == 0 else layer_oracle(-layer_oracle(x, topk_idx), topk_idx)
        assert_same_bits(y, expected)


def test_many_executions_in_flight(group):
    program = jax.jit(run.per_rank(group, functools.partial(layer, group)))
    args = [inputs(seed) for seed in range(40)]
    for (x, topk_idx), y in zip(args, [program(*a) for a in args]):
        assert_same_bits(y, layer_oracle(x, topk_idx))


def test_handle_crosses_jit_as_a_pytree(backend):
    handle = run.runner(CASE, backend).prepare(inputs()[1])
    leaves, tree = jax.tree.flatten(handle)
    again = jax.jit(lambda h: h)(jax.tree.unflatten(tree, leaves))
    assert jax.tree.structure(again) == tree
    assert (again.layout, again.capacity) == (handle.layout, handle.capacity)
    assert_same_bits(run.handle_arrays(again), run.handle_arrays(handle))


BATCH = 3


def test_vmap_of_everything(group):
    def f(x, topk_idx):
        return jax.vmap(lambda x, topk_idx: layer(group, x, topk_idx))(x, topk_idx)

    batch = [inputs(seed) for seed in range(BATCH)]
    args = [np.stack(a, axis=1) for a in zip(*batch)]
    y = np.asarray(jax.jit(run.per_rank(group, f))(*args))
    for i, (x, topk_idx) in enumerate(batch):
        assert_same_bits(y[:, i], layer_oracle(x, topk_idx), f"batch {i}")


def test_vmap_of_some_arguments(group):
    """Each of x, weights, handle, rows alone batched equals the loop over the batch."""
    def f(x, topk_idx, topk_weights):
        handles = jax.vmap(lambda idx: run.prepare(group, CASE, idx))(topk_idx)
        handle = jax.tree.map(lambda a: a[0], handles)
        rows, row_weights = jax_ep.dispatch(x[0], handle, topk_weights[0])
        many_rows = jnp.stack([rows, rows + 1])
        many_weights = jnp.stack([row_weights, row_weights * 2])
        batched = [
            jax.vmap(lambda x: jax_ep.dispatch(x, handle, topk_weights[0]))(x),
            jax.vmap(lambda w: jax_ep.dispatch(x[0], handle, w))(topk_weights),
            jax.vmap(lambda h: jax_ep.dispatch({"x": x[0]}, h))(handles),
            jax.vmap(lambda r: jax_ep.combine(r, handle, row_weights))(many_rows),
            jax.vmap(lambda w: jax_ep.combine(rows, handle, w))(many_weights),
            jax.vmap(lambda h: jax_ep.combine(rows, h))(handles),
            jax.vmap(lambda r: jax_ep.combine(r, handle), in_axes=-1, out_axes=-1)(
                jnp.moveaxis(many_rows, 0, -1)),
        ]
        one = [
            jax_ep.dispatch(x[1], handle, topk_weights[0]),
            jax_ep.dispatch(x[0], handle, topk_weights[1]),
            jax_ep.dispatch({"x": x[0]}, jax.tree.map(lambda a: a[1], handles)),
            jax_ep.combine(many_rows[1], handle, row_weights),
            jax_ep.combine(rows, handle, many_weights[1]),
            jax_ep.combine(rows, jax.tree.map(lambda a: a[1], handles)),
            jax_ep.combine(many_rows[1], handle),
        ]
        batched[-1] = jnp.moveaxis(batched[-1], -1, 0)
        return jax.tree.map(lambda a: a[1], batched), one

    batch = [(*inputs(seed), cases.floats(np.float32, (4, CASE.num_tokens, CASE.num_topk), seed))
             for seed in range(2)]
    args = [np.stack(a, axis=1) for a in zip(*batch)]
    batched, one = jax.jit(run.per_rank(group, f))(*args)
    if group.backend == "xla":
        # Whether a multiply-add is fused may differ from one instance to the next.
        for i in (3, 4):
            np.testing.assert_allclose(batched[i], one[i], rtol=1e-6, atol=1e-5)
            batched[i] = one[i]
    assert_same_values(batched, one)


def loss(group, handle, x, topk_weights):
    rows, row_weights = jax_ep.dispatch(x, handle, topk_weights)
    return jax_ep.combine(jnp.sin(rows), handle, row_weights).sum()


def loss_inputs(backend):
    x, topk_idx = inputs()
    weights = cases.floats(np.float32, topk_idx.shape, 7)
    return run.runner(CASE, backend).prepare(topk_idx), x, weights


def test_checkpoint_recomputes(backend, group):
    """Nothing is saved but the inputs: the rows are dispatched once more, and no op is lost."""
    f = functools.partial(loss, group)

    def gradients(f):
        return run.per_rank(group, jax.grad(f, argnums=(1, 2)))

    args = loss_inputs(backend)
    plain, again = gradients(f), gradients(jax.checkpoint(f))
    assert_same_bits(jax.jit(again)(*args), jax.jit(plain)(*args))
    before, after = count_ops(plain, *args), count_ops(again, *args)
    assert after["dispatch"] == before["dispatch"] + 1
    assert after["combine"] == before["combine"]


def test_checkpoint_saves_no_rows(backend, group):
    handle, x, weights = loss_inputs(backend)

    def residual_shapes(f):
        program = run.per_rank(group, lambda *args: f(*args))
        _, vjp = jax.vjp(lambda x, w: program(handle, x, w), x, weights)
        return [a.shape for a in jax.tree.leaves(vjp)]

    f = functools.partial(loss, group)
    rows = CASE.row_dims[0] * HIDDEN
    assert any(np.prod(shape) == CASE.num_ranks * rows for shape in residual_shapes(f))
    assert not any(np.prod(shape) == CASE.num_ranks * rows
                   for shape in residual_shapes(jax.checkpoint(f)))


def test_checkpoint_with_prepare_in_a_scan(group):
    def f(x, topk_idx, remat):
        body = layer_with_sin
        if remat:
            body = jax.checkpoint(body, prevent_cse=False)
        y, _ = jax.lax.scan(lambda x, idx: (body(x, idx), None), x, topk_idx)
        return y.sum()

    def layer_with_sin(x, topk_idx):
        handle = run.prepare(group, CASE, topk_idx)
        return jax_ep.combine(jnp.sin(jax_ep.dispatch(x, handle)[0]), handle)

    x, one = inputs(0)
    topk_idx = np.stack([one, inputs(1)[1]], axis=1)
    grads = [jax.jit(run.per_rank(group, jax.grad(functools.partial(f, remat=remat))))(x, topk_idx)
             for remat in (False, True)]
    assert np.abs(grads[0]).max() > 0
    np.testing.assert_allclose(*grads, rtol=1e-5, atol=1e-6)


def test_unused_results_are_eliminated(backend, group):
    """No side effects: what nobody reads is not computed."""
    def f(x, topk_idx):
        handle = run.prepare(group, CASE, topk_idx)
        rows, _ = jax_ep.dispatch(x, handle)
        jax_ep.combine(rows, handle)
        return x + 1

    x, topk_idx = inputs()
    text = jax.jit(run.per_rank(group, f)).lower(x, topk_idx).compile().as_text()
    assert "jax_ep" not in "".join(line for line in text.splitlines() if "custom-call(" in line)
    assert "all-" not in text
