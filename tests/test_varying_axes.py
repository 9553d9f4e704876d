"""check_vma=True: outputs vary over the axes that they do vary over, and no others."""

import functools

import jax
import jax.numpy as jnp
import jax_ep
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits

CASE = Case(num_ranks=4, num_topk=2)
X = cases.floats(np.float32, (CASE.num_tokens, 4))
TOPK_IDX = cases.routing("uniform", CASE)[0]
WEIGHTS = cases.floats(np.float32, TOPK_IDX.shape)


@functools.lru_cache
def make_group(kind):
    mesh = run.make_mesh((2, 4), ("data", "expert"))
    return jax_ep.Group(mesh, "expert", num_experts=CASE.num_experts, num_topk=CASE.num_topk,
                        max_tokens_per_rank=CASE.max_tokens_per_rank, max_row_bytes=64,
                        backend=run.backend_name(kind))


@pytest.fixture
def any_group(both_backends):
    return make_group(both_backends)


@pytest.fixture
def group(backend):
    return make_group(backend)


def outputs(group, layout, x, topk_idx, topk_weights):
    """Every array that prepare, dispatch and combine give, by name."""
    handle = jax_ep.prepare(group, topk_idx, layout=layout)
    rows, row_weights = jax_ep.dispatch(x, handle, topk_weights)
    out = {name: getattr(handle, name) for name in run.HANDLE_FIELDS if name != "topk_idx"}
    out.update(rows=rows, row_weights=row_weights, y=jax_ep.combine(rows, handle))
    if layout != "rank":
        out["weighted"] = jax_ep.combine(rows, handle, row_weights)
    return {name: a.reshape(-1) for name, a in out.items() if a is not None}


def trace(group, f, args, in_specs, out_specs):
    """The result's shapes; shard_map raises when one varies over an axis not in its spec."""
    return jax.eval_shape(jax.shard_map(f, mesh=group.mesh, in_specs=in_specs, out_specs=out_specs,
                                        check_vma=True), *args)


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_every_output_varies_over_the_expert_axis(layout, any_group):
    """Also when all ranks have the same inputs: P() must be refused for each output."""
    args, specs = (X, TOPK_IDX, WEIGHTS), (P(), P(), P())

    def all_outputs(*args):
        return outputs(any_group, layout, *args)

    names = list(trace(any_group, all_outputs, args, specs, P("expert")))
    assert {"slots", "rows", "row_weights", "y"} <= set(names)
    for name in names:
        with pytest.raises(ValueError, match="out_specs"):
            trace(any_group, lambda *args: all_outputs(*args)[name], args, specs, P())


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_data_invariant_inputs_stay_data_invariant(layout, any_group):
    """On a (data, expert) mesh; P("expert") promises equality over data."""
    args = [np.tile(a, (4, 1)) for a in (X, TOPK_IDX, WEIGHTS)]
    trace(any_group, lambda *a: outputs(any_group, layout, *a), args, P("expert"), P("expert"))


def test_axes_of_the_arguments_are_joined(any_group):
    """Rows vary over data where x does; the handle only where topk_idx does."""
    x = np.tile(X, (8, 1))
    topk_idx, weights = np.tile(TOPK_IDX, (4, 1)), np.tile(WEIGHTS, (4, 1))
    specs = (P(("data", "expert")), P("expert"), P("expert"))

    def f(names):
        def pick(*args):
            out = outputs(any_group, "expert", *args)
            return [out[name] for name in names]
        return pick

    trace(any_group, f(["slots", "num_rows"]), (x, topk_idx, weights), specs, P("expert"))
    trace(any_group, f(["rows", "y", "weighted"]), (x, topk_idx, weights), specs,
          P(("data", "expert")))
    for name in ("rows", "y", "weighted"):
        with pytest.raises(ValueError, match="out_specs"):
            trace(any_group, f([name]), (x, topk_idx, weights), specs, P("expert"))


def test_values_with_replicated_tokens(group):
    """x alike on all ranks, choices different: each rank's rows are copies of the one x."""
    topk_idx = cases.routing("uniform", CASE)

    def f(x, topk_idx):
        handle = jax_ep.prepare(group, topk_idx[0])
        rows, _ = jax_ep.dispatch(x, handle)
        return rows[None], jax_ep.combine(rows, handle)[None]

    rows, y = jax.jit(jax.shard_map(f, mesh=group.mesh, in_specs=(P(), P("expert")),
                                    out_specs=P("expert")))(X, topk_idx)
    plan = oracle.prepare(CASE.oracle_config, topk_idx)
    expected = oracle.dispatch(plan, np.stack([X] * 4))
    assert_same_bits(rows, expected)
    assert_same_bits(y, oracle.combine(plan, expected))


def test_gradient_of_replicated_tokens_is_summed_over_ranks(group):
    """The transpose of the broadcast to the ranks is a sum; without varying axes it is lost."""
    topk_idx = cases.routing("uniform", CASE)

    def loss(x, topk_idx):
        handle = jax_ep.prepare(group, topk_idx[0])
        rows, _ = jax_ep.dispatch(x, handle)
        return jax.lax.psum((rows**2).sum() / 2, "expert")

    f = jax.shard_map(loss, mesh=group.mesh, in_specs=(P(), P("expert")), out_specs=P())
    grad = jax.jit(jax.grad(f))(X, topk_idx)
    # Every pair is a copy: the gradient is x times the number of pairs of the token.
    np.testing.assert_allclose(grad, X * CASE.num_ranks * CASE.num_topk, rtol=1e-6)


def test_gradients_inside_and_outside_agree(group):
    """grad of shard_map equals shard_map of grad, with inputs varying over both axes."""
    topk_idx = np.concatenate([cases.routing("uniform", CASE, seed) for seed in range(2)])
    x = cases.floats(np.float32, (8, CASE.num_tokens, 4))
    weights = cases.floats(np.float32, topk_idx.shape)
    axes = ("data", "expert")

    def loss(x, topk_idx, weights):
        handle = jax_ep.prepare(group, topk_idx)
        rows, row_weights = jax_ep.dispatch(x, handle, weights)
        return jnp.sin(jax_ep.combine(jnp.sin(rows), handle, row_weights)).sum()

    def total(x, topk_idx, weights):
        return run.per_rank(group, loss, axes)(x, topk_idx, weights).sum()

    outside = jax.jit(jax.grad(total, (0, 2)))(x, topk_idx, weights)
    inside = jax.jit(run.per_rank(group, jax.grad(loss, (0, 2)), axes))(x, topk_idx, weights)
    unchecked = jax.jit(run.per_rank(group, jax.grad(loss, (0, 2)), axes, check_vma=False))(
        x, topk_idx, weights)
    for a, b, c in zip(outside, inside, unchecked):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(a, c, rtol=1e-6, atol=1e-6)
