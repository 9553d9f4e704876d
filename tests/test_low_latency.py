"""The low-latency path: the bits of prepare, dispatch and combine, fused and in two phases."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import jax_ep
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax_ep import low_latency

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits, assert_same_values

LAYOUTS = ("expert", "padded")
CASE = Case(num_ranks=2, num_topk=3, expert_alignment=8).with_capacity("tight")
NUM_RANKS = CASE.num_ranks


def for_layouts(some):
    """Those of the layouts that the path is for; without tokens there are rows nevertheless.

    jax 0.12.0.1 cannot compile a shard_map all of whose arguments are empty.
    """
    return [case if case.num_tokens else dataclasses.replace(case, capacity=7) for case in some
            if case.layout in LAYOUTS]


def group_of(case, backend="native"):
    return run.group_of(case, backend, low_latency=True)


def plan_options(case):
    return dict(layout=case.layout, capacity=case.capacity, expert_alignment=case.expert_alignment)


def fused(group, case, x, topk_idx, weights=None, quantize=None, mode="ll"):
    return jax_ep.prepare_and_dispatch(
        group, x, topk_idx, weights, **plan_options(case), quantize=quantize, mode=mode)


def started(group, case, x, topk_idx, weights=None, quantize=None):
    return jax_ep.dispatch_start(group, x, topk_idx, weights, **plan_options(case),
                                 quantize=quantize)


def split(*args, **options):
    return jax_ep.dispatch_done(started(*args, **options))


def combine_in_one(rows, handle, row_weights=None):
    return jax_ep.combine(rows, handle, row_weights, mode="ll")


def combine_in_two(rows, handle, row_weights=None):
    return jax_ep.combine_done(jax_ep.combine_start(rows, handle, row_weights))


WAYS = {"fused": (fused, combine_in_one), "split": (split, combine_in_two)}


def payload(case, seed=0):
    """Eight leaves, the most that the path takes, of bytes that divide nothing."""
    leaves = cases.payload(case, seed)
    return {name: leaf for name, leaf in leaves.items() if name not in ("complex", "f16")}


def weights_of(case, seed=0, dtype=np.float32):
    return cases.floats(dtype, (case.num_ranks, case.num_tokens, case.num_topk), seed)


def rows_of(case, dtype, seed=0, dims=(5,)):
    """Rows to be summed; those without a source hold junk as well."""
    return cases.floats(dtype, (case.num_ranks, *case.row_dims, *dims), seed)


@functools.cache
def program(case, backend, way, weighted):
    """Dispatches x, and sums each of the given rows, with and without weights."""
    group = group_of(case, backend)
    dispatch, combine = WAYS[way]

    def f(x, topk_idx, weights, sums):
        rows, row_weights, handle = dispatch(group, case, x, topk_idx, weights)
        y = [combine(leaves, handle) for leaves in sums]
        if weighted:
            y += [combine(leaves, handle, row_weights) for leaves in sums]
        return rows, row_weights, handle, y

    return run.jit(run.per_rank(group, f))


def check(case, backend, way, topk_idx, x, weights, sums, what=""):
    weighted = backend == "native"  # else a compiler decides on the last bit
    rows, row_weights, handle, y = program(case, backend, way, weighted)(
        x, topk_idx, weights, sums)
    plan = oracle.prepare(case.oracle_config, topk_idx)
    what = f"{case} {way} {what}"
    assert_same_bits(run.handle_arrays(handle), plan.fields(), f"{what} handle")
    assert_same_bits(rows, {name: oracle.dispatch(plan, leaf) for name, leaf in x.items()},
                     f"{what} rows")
    expected_weights = oracle.dispatch_weights(plan, weights)
    assert_same_bits(row_weights, expected_weights, f"{what} row_weights")
    expected = [[oracle.combine(plan, leaf, w) for leaf in leaves]
                for w in (None, expected_weights)[:1 + weighted] for leaves in sums]
    assert_same_values(y, expected, f"{what} sums")


def check_all_routings(case, backend, way, dtypes=(np.float32, ml_dtypes.bfloat16)):
    for seed, (kind, topk_idx) in enumerate(cases.routings(case)):
        sums = [[rows_of(case, dtype, seed, dims) for dims in ((5,), (2, 8))] for dtype in dtypes]
        check(case, backend, way, topk_idx, payload(case, seed), weights_of(case, seed), sums, kind)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", for_layouts(cases.quick_matrix()), ids=str)
def test_same_bits(case, way, backend):
    check_all_routings(case, backend, way)


def matrix():
    """Settings, each with one way and two dtypes, in turn."""
    dtypes = list(cases.FLOAT_DTYPES.values())
    return [pytest.param(case, list(WAYS)[i % 2], (dtypes[i % 5], dtypes[(i + 2) % 5]),
                         id=str(case))
            for i, case in enumerate(for_layouts(cases.matrix() + cases.odd_sizes()))]


@pytest.mark.slow
@pytest.mark.parametrize("case, way, dtypes", matrix())
def test_same_bits_in_the_matrix(case, way, dtypes, backend):
    check_all_routings(case, backend, way, dtypes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_tokens(layout, way):
    """In one group, one after the other."""
    for num_tokens in (0, 1, 9, 2):
        case = Case(layout=layout, num_topk=3, num_tokens=num_tokens, spare_tokens=9 - num_tokens,
                    capacity=7)
        check_all_routings(case, "native", way, (np.float32,))


@pytest.mark.parametrize("way", WAYS)
def test_tokens_of_another_number_on_each_rank(way):
    """Rank r has r of them; those that a rank lacks are not routed."""
    case = Case(num_ranks=4, num_topk=2, num_tokens=4)
    topk_idx = cases.routing("uniform", case)
    for rank in range(case.num_ranks):
        topk_idx[rank, rank:] = -1
    check(case, "native", way, topk_idx, payload(case), weights_of(case),
          [[rows_of(case, np.float32)]])


@pytest.mark.parametrize("way", WAYS)
def test_many_experts_and_tokens(way):
    """More pairs than a block has threads, and rows of several kilobytes."""
    case = Case(num_ranks=2, experts_per_rank=32, num_topk=8, num_tokens=150, spare_tokens=362)
    x = {"x": cases.floats(ml_dtypes.bfloat16, (2, 150, 2880))}
    for kind in ("uniform", "one_expert", "empty_rank"):
        check(case, "native", way, cases.routing(kind, case), x, weights_of(case),
              [[rows_of(case, ml_dtypes.bfloat16, dims=(72,))]], kind)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("quantize", oracle.QUANTIZE)
def test_cast_rows(quantize, way, backend):
    case = CASE
    dispatch, _ = WAYS[way]
    group = group_of(case, backend)
    f = run.jit(run.per_rank(group, lambda x, topk_idx, weights: dispatch(
        group, case, x, topk_idx, weights, quantize=quantize)))
    shapes = {"a": (np.float32, 130), "b": (ml_dtypes.bfloat16, 384), "c": (np.float16, 8)}
    topk_idx = cases.routing("unrouted", case)
    x = {name: cases.floats(dtype, (NUM_RANKS, case.num_tokens, columns))
         for name, (dtype, columns) in shapes.items()}
    x["ids"] = np.arange(NUM_RANKS * case.num_tokens, dtype=np.int32).reshape(NUM_RANKS, -1)
    weights = weights_of(case, dtype=ml_dtypes.bfloat16)
    rows, row_weights, handle = f(x, topk_idx, weights)
    plan = oracle.prepare(case.oracle_config, topk_idx)
    assert_same_bits(run.handle_arrays(handle), plan.fields())
    assert_same_bits(row_weights, oracle.dispatch_weights(plan, weights))
    assert_same_bits(rows.pop("ids"), oracle.dispatch(plan, x.pop("ids")))
    for name, leaf in x.items():
        values, scales = oracle.quantize(leaf, quantize)
        expected = oracle.dispatch(plan, values), oracle.dispatch(plan, scales)
        assert_same_bits((rows[name].values, rows[name].scales), expected, name)
        assert rows[name].straight_through.dtype == leaf.dtype
        assert not np.asarray(rows[name].straight_through).any()


def test_without_weights(backend):
    group, topk_idx = group_of(CASE, backend), cases.routing("duplicates", CASE)
    x = cases.floats(np.float32, (NUM_RANKS, CASE.num_tokens, 4))
    plan = oracle.prepare(CASE.oracle_config, topk_idx)
    for dispatch in (fused, split):
        f = jax.jit(run.per_rank(group, functools.partial(dispatch, group, CASE)))
        rows, row_weights, _ = f(x, topk_idx)
        assert row_weights is None
        assert_same_bits(rows, oracle.dispatch(plan, x))


def test_handle_serves_the_ordinary_operations():
    group, topk_idx = group_of(CASE), cases.routing("unrouted", CASE)
    x = cases.floats(np.float32, (NUM_RANKS, CASE.num_tokens, 8))

    def f(x, topk_idx):
        rows, _, handle = fused(group, CASE, x, topk_idx)
        return (jax_ep.dispatch(x + 1, handle)[0], jax_ep.combine(rows, handle, mode="ht"),
                jax_ep.combine(rows, run.prepare(group, CASE, topk_idx), mode="ll"))

    more, ordinary, ll = jax.jit(run.per_rank(group, f))(x, topk_idx)
    plan = oracle.prepare(CASE.oracle_config, topk_idx)
    assert_same_bits(more, oracle.dispatch(plan, x + 1))
    expected = oracle.combine(plan, oracle.dispatch(plan, x))
    assert_same_bits((ordinary, ll), (expected, expected))


# Two phases, with compute between them.


def mixed(x, order):
    """Compute whose bits are the same however it is compiled."""
    return jnp.take(x, order, axis=-1) / 2


def layer_in_order(group, case, dispatch, combine, batches, order):
    """What a decoder does: attention, experts and the way back, for each micro-batch."""
    ys = []
    for x, topk_idx, weights in batches:
        rows, row_weights, handle = dispatch(group, case, mixed(x, order), topk_idx, weights)
        ys.append(combine(rows * 2, handle, row_weights))
    return ys


def layer_overlapped(group, case, batches, order):
    """The same for two micro-batches, one of which moves while the other computes."""
    (x, *routing), (other_x, *other_routing) = batches
    one = started(group, case, mixed(x, order), *routing)
    other_x = jax_ep.after(one, other_x)
    other = started(group, case, mixed(other_x, order), *other_routing)
    rows, row_weights, handle = jax_ep.dispatch_done(one, after=other)
    one = jax_ep.combine_start(rows * 2, handle, row_weights)
    rows, row_weights, handle = jax_ep.dispatch_done(other, after=one)
    other = jax_ep.combine_start(rows * 2, handle, row_weights)
    return [jax_ep.combine_done(one, after=other), jax_ep.combine_done(other)]


def micro_batches(case, seed=0, hidden=8):
    return [(cases.floats(np.float32, (case.num_ranks, case.num_tokens, hidden), seed + i),
             cases.routing("unrouted", case, seed + i), weights_of(case, seed + i))
            for i in range(2)]


def order_of(case, hidden=8):
    return np.stack([np.random.default_rng(0).permutation(hidden)] * case.num_ranks)


def layers(group, case, layer, num_layers, batches, order):
    for _ in range(num_layers):
        ys = layer(batches, order)
        batches = [(y, *routing) for y, (_, *routing) in zip(ys, batches)]
    return ys


def scanned(group, case, layer, num_layers, batches, order):
    routings = [routing for _, *routing in batches]

    def body(xs, _):
        return layer([(x, *routing) for x, routing in zip(xs, routings)], order), None

    return jax.lax.scan(body, [x for x, *_ in batches], length=num_layers)[0]


@pytest.mark.parametrize("loop", [layers, scanned])
def test_two_micro_batches_in_flight(loop):
    """Through several layers, with dispatches and combines in flight together."""
    group, args = group_of(CASE), (micro_batches(CASE), order_of(CASE))
    overlapped = functools.partial(layer_overlapped, group, CASE)
    in_order = functools.partial(layer_in_order, group, CASE,
                                 functools.partial(fused, mode="ht"), jax_ep.combine)
    results, expected = (
        jax.jit(run.per_rank(group, functools.partial(loop, group, CASE, layer, 3)))(*args)
        for layer in (overlapped, in_order))
    assert_same_bits(results, expected)


def test_more_starts_than_can_be_in_flight():
    """XLA may order starts and dones that nothing orders as it likes."""
    group, topk_idx = group_of(CASE), cases.routing("uniform", CASE)
    xs = [cases.floats(np.float32, (NUM_RANKS, CASE.num_tokens, 8), seed) for seed in range(5)]

    def f(xs, topk_idx):
        pendings = [started(group, CASE, x, topk_idx) for x in xs]
        # Not in the order of the starts, and after all of them.
        dones = [jax_ep.dispatch_done(p, after=pendings) for p in reversed(pendings)][::-1]
        pendings = [jax_ep.combine_start(rows, handle) for rows, _, handle in dones]
        ys = [jax_ep.combine_done(p, after=pendings) for p in reversed(pendings)][::-1]
        return [rows for rows, _, _ in dones], ys

    rows, ys = jax.jit(run.per_rank(group, f))(xs, topk_idx)
    plan = oracle.prepare(CASE.oracle_config, topk_idx)
    expected = [oracle.dispatch(plan, x) for x in xs]
    assert_same_bits(rows, expected)
    assert_same_bits(ys, [oracle.combine(plan, x) for x in expected])


def test_many_executions_in_flight():
    group, order = group_of(CASE), order_of(CASE)
    overlapped, in_order = (
        jax.jit(run.per_rank(group, functools.partial(layer, group, CASE)))
        for layer in (layer_overlapped,
                      lambda group, case, *args: layer_in_order(group, case, fused, combine_in_one,
                                                                *args)))
    batches = [micro_batches(CASE, seed) for seed in range(10)]
    for args, ys in zip(batches, [overlapped(args, order) for args in batches]):
        assert_same_bits(ys, in_order(args, order))


def test_pending_crosses_a_loop():
    """A start in one round, the done in the next."""
    group, topk_idx = group_of(CASE), cases.routing("uniform", CASE)
    x = cases.floats(np.float32, (NUM_RANKS, CASE.num_tokens, 8))

    def f(x, topk_idx):
        def body(pending, _):
            rows, _, handle = jax_ep.dispatch_done(pending)
            y = jax_ep.combine(rows * 0.5, handle, mode="ll")
            return started(group, CASE, y, topk_idx), y

        last, ys = jax.lax.scan(body, started(group, CASE, x, topk_idx), length=3)
        return ys, jax_ep.dispatch_done(last)[0]

    ys, rows = jax.jit(run.per_rank(group, f))(x, topk_idx)
    plan = oracle.prepare(CASE.oracle_config, topk_idx)
    for i in range(3):
        x = oracle.combine(plan, oracle.dispatch(plan, x) * np.float32(0.5))
        assert_same_bits(np.asarray(ys)[:, i], x)
    assert_same_bits(rows, oracle.dispatch(plan, x))


def test_pending_between_programs():
    """Started by one program, done by another."""
    group, topk_idx = group_of(CASE), cases.routing("uniform", CASE)
    x = cases.floats(np.float32, (NUM_RANKS, CASE.num_tokens, 8))
    pending = jax.jit(run.per_rank(group, functools.partial(started, group, CASE)))(x, topk_idx)
    rows, _, handle = jax.jit(run.per_rank(group, jax_ep.dispatch_done))(pending)
    pending = jax.jit(run.per_rank(group, jax_ep.combine_start))(rows, handle)
    y = jax.jit(run.per_rank(group, jax_ep.combine_done))(pending)
    plan = oracle.prepare(CASE.oracle_config, topk_idx)
    assert_same_bits(rows, oracle.dispatch(plan, x))
    assert_same_bits(y, oracle.combine(plan, np.asarray(rows)))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.uint8, np.bool_, np.int32,
                                   np.complex64, ml_dtypes.float8_e4m3fn])
def test_after_changes_no_bit(dtype):
    group = group_of(CASE)
    x = cases.floats(np.float32, (NUM_RANKS, CASE.num_tokens, 8))
    values = {"a": [cases.any_bits(dtype, (NUM_RANKS, 3, 5))],
              "b": cases.any_bits(dtype, (NUM_RANKS,))}

    def f(x, topk_idx, values):
        pending = started(group, CASE, x, topk_idx)
        values = jax_ep.after(pending, values)
        return values, jax_ep.dispatch_done(pending, after=values)[0]

    results, _ = jax.jit(run.per_rank(group, f))(x, cases.routing("uniform", CASE), values)
    assert_same_bits(results, values)


# Derivatives and transformations.


def loss(dispatch, mode, quantize, group, x, weights, topk_idx):
    rows, row_weights, handle = dispatch(group, CASE, x, topk_idx, weights, quantize=quantize)
    rows = rows if quantize is None else rows.dequantize()
    return jax_ep.combine(jnp.sin(rows), handle, row_weights, mode=mode).sum()


def two_calls(group, case, x, topk_idx, weights=None, quantize=None):
    handle = run.prepare(group, case, topk_idx)
    return *jax_ep.dispatch(x, handle, weights, quantize=quantize), handle


def grad(f):
    return jax.grad(f, (0, 1))


def grad_of_checkpoint(f):
    return jax.grad(jax.checkpoint(f), (0, 1))


def second_derivative(f):
    def norm(*args):
        return sum((g**2).sum() for g in jax.grad(f, (0, 1))(*args))

    return jax.grad(norm, (0, 1))


def jvp(f):
    def of(x, weights, topk_idx):
        return jax.jvp(lambda x, w: f(x, w, topk_idx), (x, weights), (jnp.cos(x), jnp.sin(weights)))

    return of


def grad_in_scan(f):
    def of(x, weights, topk_idx):
        def total(x):
            return jax.lax.scan(lambda s, _: (s + f(x, weights, topk_idx), None), 0.0 * x.sum(),
                                length=2)[0]

        return jax.grad(total)(x)

    return of


def vmapped_grad(f):
    def of(x, weights, topk_idx):
        return jax.vmap(jax.grad(f), (0, None, None))(jnp.stack([x, 2 * x]), weights, topk_idx)

    return of


def differentiated(transform, dispatch, mode, quantize, backend):
    group = group_of(CASE, backend)
    topk_idx = cases.routing("unrouted", CASE)
    x = cases.floats(np.float32, (NUM_RANKS, CASE.num_tokens, 130))
    f = transform(functools.partial(loss, dispatch, mode, quantize, group))
    return jax.jit(run.per_rank(group, f))(x, weights_of(CASE, 1), topk_idx)


@pytest.mark.parametrize("transform", [grad, grad_of_checkpoint, second_derivative, jvp,
                                       grad_in_scan, vmapped_grad])
@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_derivatives_are_those_of_two_calls(quantize, transform):
    results = [differentiated(transform, *how, quantize, "native")
               for how in ((fused, "ll"), (two_calls, "ht"))]
    assert all(np.abs(a).max() > 0 for a in jax.tree.leaves(results[0]))
    assert_same_bits(*results)


def test_gradient_of_the_reference():
    results = [differentiated(grad, *how, None, "xla")
               for how in ((fused, "ll"), (two_calls, "ht"))]
    for a, e in zip(*results):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def test_gradients_of_some_leaves():
    """Leaves without a tangent do not move; integers have none."""
    group, topk_idx = group_of(CASE), cases.routing("uniform", CASE)
    x = cases.floats(np.float32, (NUM_RANKS, CASE.num_tokens, 8))

    def f(dispatch, x, topk_idx):
        tree = {"ids": topk_idx[:, 0], "x": x, "y": jax.lax.stop_gradient(x)}
        rows, _, _ = dispatch(group, CASE, tree, topk_idx)
        return (rows["x"] ** 2 + rows["y"] * rows["ids"][:, None]).sum()

    results = [jax.jit(run.per_rank(group, jax.grad(functools.partial(f, dispatch))))(x, topk_idx)
               for dispatch in (fused, two_calls)]
    assert_same_bits(*results)


def test_vmap():
    group = group_of(CASE)
    x = np.stack([cases.floats(np.float32, (NUM_RANKS, CASE.num_tokens, 8), seed)
                  for seed in range(3)], 1)
    topk_idx = np.stack([cases.routing("unrouted", CASE, seed) for seed in range(3)], 1)
    f = jax.vmap(functools.partial(fused, group, CASE))
    rows, _, handle = jax.jit(run.per_rank(group, f))(x, topk_idx)
    for i in range(3):
        plan = oracle.prepare(CASE.oracle_config, topk_idx[:, i])
        assert_same_bits(np.asarray(rows)[:, i], oracle.dispatch(plan, x[:, i]))
        assert_same_bits(np.asarray(handle.slots)[:, i], plan.slots)


def test_results_vary_over_the_ranks(both_backends):
    """Also with the same tokens on all of them; the gradient of those is the sum over ranks."""
    group = group_of(CASE, both_backends)
    topk_idx = cases.routing("unrouted", CASE)
    x = cases.floats(np.float32, (CASE.num_tokens, 8))

    def results(x, topk_idx):
        pending = started(group, CASE, x, topk_idx[0])
        pending_sum = jax_ep.combine_start(*jax_ep.dispatch_done(pending)[::2])
        out = (fused(group, CASE, x, topk_idx[0]), pending, jax_ep.dispatch_done(pending),
               pending_sum, jax_ep.combine_done(pending_sum), jax_ep.after(pending, x))
        return [a.reshape(-1) for a in jax.tree.leaves(out)]

    def shard_map(f, out_specs):
        return jax.shard_map(f, mesh=group.mesh, in_specs=(P(), P(run.AXIS)), out_specs=out_specs)

    for i in range(len(jax.eval_shape(shard_map(results, P(run.AXIS)), x, topk_idx))):
        with pytest.raises(ValueError, match="out_specs"):
            jax.eval_shape(shard_map(lambda *args: results(*args)[i], P()), x, topk_idx)

    def loss(x, topk_idx):
        rows, _, _ = fused(group, CASE, x, topk_idx[0])
        return jax.lax.psum(rows.sum(), run.AXIS)

    placed = (oracle.prepare(CASE.oracle_config, topk_idx).slots >= 0).sum((0, 2))
    np.testing.assert_array_equal(jax.jit(jax.grad(shard_map(loss, P())))(x, topk_idx),
                                  np.tile(placed[:, None], 8))


# The choice of the path, and what it lowers to.


def targets(group, f, *args, platform="cuda"):
    """This package's custom calls in the StableHLO of f, and whether they have side effects."""
    lowered = jax.jit(run.per_rank(group, f)).trace(*args).lower(lowering_platforms=(platform,))
    return {name: "has_side_effect = true" in rest for name, rest in re.findall(
        r"custom_call @jax_ep_\w+?_(\w+)\((.*)", lowered.as_text())}


def layer(group, mode, layout="expert", num_leaves=1):
    def f(x, topk_idx):
        rows, _, handle = jax_ep.prepare_and_dispatch(group, [x] * num_leaves, topk_idx,
                                                      layout=layout, mode=mode)
        return jax_ep.combine(rows, handle, mode=mode)

    return f


def layer_inputs(case=CASE):
    return cases.floats(np.float32, (case.num_ranks, case.num_tokens, 4)), cases.routing(
        "uniform", case)


ORDINARY = {"prepare": False, "dispatch": False, "combine": False}
LOW_LATENCY = {"low_latency_dispatch": False, "low_latency_combine": False}


@pytest.mark.parametrize("has_buffers, mode, options, expected", [
    (True, None, {}, LOW_LATENCY),
    (True, "ll", {}, LOW_LATENCY),
    (True, "ht", {}, ORDINARY),
    (True, None, {"layout": "padded", "num_leaves": 8}, LOW_LATENCY),
    (True, None, {"layout": "rank"}, ORDINARY),
    (True, None, {"num_leaves": 9}, ORDINARY),
    (False, None, {}, ORDINARY),
    (False, "ht", {}, ORDINARY),
])
def test_targets(has_buffers, mode, options, expected):
    group = run.group_of(CASE, "native", has_buffers)
    assert targets(group, layer(group, mode, **options), *layer_inputs()) == expected


def test_larger_groups_choose_the_ordinary_path(monkeypatch):
    """Than are measured to be faster on the other; asking for that works nevertheless."""
    monkeypatch.setattr(low_latency, "AUTOMATIC_TOKENS", CASE.max_tokens_per_rank - 1)
    group = group_of(CASE)
    assert targets(group, layer(group, None), *layer_inputs()) == ORDINARY
    assert targets(group, layer(group, "ll"), *layer_inputs()) == LOW_LATENCY


def test_targets_of_two_phases():
    """XLA must neither merge nor drop nor repeat them."""
    group = group_of(CASE)
    found = targets(group, functools.partial(layer_overlapped, group, CASE), micro_batches(CASE),
                    order_of(CASE))
    assert found == {f"low_latency_{op}_{phase}": True for op in ("dispatch", "combine")
                     for phase in ("start", "done")}


def test_targets_of_a_gradient():
    """The forward pass alone is on the path."""
    group = group_of(CASE)
    f = jax.grad(lambda x, topk_idx: jnp.sin(layer(group, "ll")(x, topk_idx)[0]).sum())
    found = set(targets(group, f, *layer_inputs()))
    assert found == {"low_latency_dispatch", "low_latency_combine", "dispatch", "combine"}


def test_sums_of_several_dtypes_are_not_on_the_path():
    group = group_of(CASE)

    def f(topk_idx, rows):
        return jax_ep.combine(rows, jax_ep.prepare(group, topk_idx, capacity=CASE.capacity,
                                                   expert_alignment=8))

    rows = [rows_of(CASE, np.float32), rows_of(CASE, np.float16)]
    assert "combine" in targets(group, f, cases.routing("uniform", CASE), rows)
    assert "low_latency_combine" in targets(group, f, cases.routing("uniform", CASE), rows[:1])


def test_other_backends_run_the_ordinary_operations():
    group = group_of(CASE)
    assert targets(group, layer(group, "ll"), *layer_inputs(), platform="cpu") == ORDINARY
    f = functools.partial(layer_overlapped, group, CASE), micro_batches(CASE), order_of(CASE)
    assert targets(group, *f, platform="cpu") == ORDINARY
    reference = group_of(CASE, "xla")
    assert not targets(reference, layer(reference, "ll"), *layer_inputs())


@pytest.mark.parametrize("max_tokens, asked, expected", [
    (512, None, True), (513, None, False), (1, None, True), (512, False, False), (8, True, True)])
def test_group_attribute(max_tokens, asked, expected, both_backends):
    mesh = run.make_mesh((1,), (run.AXIS,))
    with jax_ep.Group(mesh, run.AXIS, num_experts=2, num_topk=1, max_tokens_per_rank=max_tokens,
                      max_row_bytes=16, backend=run.backend_name(both_backends),
                      low_latency=asked) as group:
        assert group.low_latency is expected


# Errors, all while tracing.


@pytest.mark.parametrize("value, error, parts", [
    (True, ValueError, ["low_latency", "512", "513"]), (1, TypeError, ["low_latency", "1"])])
def test_group_errors(value, error, parts):
    mesh = run.make_mesh((1,), (run.AXIS,))
    with pytest.raises(error) as info:
        jax_ep.Group(mesh, run.AXIS, num_experts=2, num_topk=1, max_tokens_per_rank=513,
                     max_row_bytes=16, backend="xla", low_latency=value)
    assert_names(info, parts)


def assert_names(info, parts):
    for part in parts:
        assert part in str(info.value), f"{part!r} missing in: {info.value}"


def trace(group, f, *args):
    return jax.eval_shape(run.per_rank(group, f), *args)


OPERATIONS = {
    "prepare_and_dispatch": lambda group, x, idx, **options: jax_ep.prepare_and_dispatch(
        group, x, idx, mode="ll", **options),
    "dispatch_start": jax_ep.dispatch_start,
    "combine": lambda group, x, idx, **options: jax_ep.combine(
        rows_for(group, x, idx, **options), jax_ep.prepare(group, idx, **options), mode="ll"),
    "combine_start": lambda group, x, idx, **options: jax_ep.combine_start(
        rows_for(group, x, idx, **options), jax_ep.prepare(group, idx, **options)),
}


def rows_for(group, x, idx, **options):
    return jax_ep.dispatch(x, jax_ep.prepare(group, idx, **options))[0]


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("has_buffers, x, options, parts", [
    (False, lambda x: x, {}, ["low_latency=True", "512", "max_tokens_per_rank"]),
    (True, lambda x: x, {"layout": "rank"}, ["layouts expert and padded", "rank"]),
    (True, lambda x: [x] * 9, {}, ["8 leaves", "9"]),
    (True, lambda x: [], {}, ["leaves", "0"]),
])
def test_not_on_the_path(op, has_buffers, x, options, parts):
    group = run.group_of(CASE, "native", has_buffers)
    tokens, topk_idx = layer_inputs()
    with pytest.raises(ValueError) as info:
        trace(group, lambda t, i: OPERATIONS[op](group, x(t), i, **options), tokens, topk_idx)
    assert_names(info, [op, *parts])


@pytest.mark.parametrize("op", ["combine", "combine_start"])
def test_sums_of_several_dtypes_are_refused(op):
    group, (x, topk_idx) = group_of(CASE), layer_inputs()
    with pytest.raises(ValueError, match=rf"{op}.* one dtype, got bfloat16, float32"):
        trace(group, lambda x, i: OPERATIONS[op](group, [x, x.astype(jnp.bfloat16)], i), x,
              topk_idx)


@pytest.mark.parametrize("mode", ["LL", "low_latency", 1])
def test_unknown_mode(mode):
    group, args = group_of(CASE), layer_inputs()
    with pytest.raises(ValueError, match="mode must be None or one of"):
        trace(group, layer(group, mode), *args)
    with pytest.raises(ValueError, match="mode must be None or one of"):
        trace(group, lambda x, i: jax_ep.combine(rows_for(group, x, i), jax_ep.prepare(group, i),
                                                 mode=mode), *args)


@pytest.mark.parametrize("op", ["prepare_and_dispatch", "dispatch_start"])
@pytest.mark.parametrize("change, error, parts", [
    (dict(x=np.zeros((NUM_RANKS, 9, 4), np.float32)), ValueError, ["x", "(9, 4)", "5"]),
    (dict(x=np.zeros((NUM_RANKS, 5, 4096), np.float32)), ValueError,
     ["16384", "max_row_bytes=8192"]),
    (dict(idx=np.zeros((NUM_RANKS, 5, 2), np.int32)), ValueError, ["topk_idx", "(5, 2)", "3"]),
    (dict(idx=np.zeros((NUM_RANKS, 5, 3), np.float32)), TypeError, ["topk_idx", "float32"]),
    (dict(topk_weights=np.zeros((5, 2), np.float32)), ValueError, ["topk_weights", "(5, 2)"]),
    (dict(layout="token"), ValueError, ["layout", "token"]),
    (dict(capacity=-1), ValueError, ["capacity", "-1"]),
    (dict(quantize="int8"), ValueError, ["quantize", "int8"]),
])
def test_arguments_of_dispatch(op, change, error, parts):
    """As prepare and dispatch refuse them."""
    group, (x, topk_idx) = group_of(CASE), layer_inputs()
    options = dict(x=x, idx=topk_idx) | change
    with pytest.raises(error) as info:
        trace(group, lambda x, idx: OPERATIONS[op](group, x, idx, **options), options.pop("x"),
              options.pop("idx"))
    assert_names(info, parts)


def test_arguments_of_combine_start():
    """As combine refuses them."""
    group, (x, topk_idx) = group_of(CASE), layer_inputs()
    for rows, error in ((lambda r: r[1:], ValueError), (lambda r: r.astype(np.int32), TypeError)):
        with pytest.raises(error, match="rows"):
            trace(group, lambda x, i: jax_ep.combine_start(
                rows(rows_for(group, x, i)), jax_ep.prepare(group, i)), x, topk_idx)
    with pytest.raises(TypeError, match="handle"):
        trace(group, lambda x: jax_ep.combine_start(x, "handle"), x)


def test_pendings_do_not_mix():
    group, (x, topk_idx) = group_of(CASE), layer_inputs()

    def pendings(x, topk_idx):
        dispatch = jax_ep.dispatch_start(group, x, topk_idx)
        rows, _, handle = jax_ep.dispatch_done(dispatch)
        return dispatch, jax_ep.combine_start(rows, handle)

    for wrong, f in {
        "dispatch_done takes what dispatch_start returns, got CombinePending":
            lambda one, two: jax_ep.dispatch_done(two),
        "combine_done takes what combine_start returns, got DispatchPending":
            lambda one, two: jax_ep.combine_done(one),
        "dispatch_done takes what dispatch_start returns, got tuple":
            lambda one, two: jax_ep.dispatch_done((one, two)),
        "pending must be of dispatch_start or combine_start, got Array|pending must be":
            lambda one, two: jax_ep.after(one.ticket, two),
    }.items():
        with pytest.raises(TypeError, match=wrong):
            trace(group, lambda *args: f(*pendings(*args)), x, topk_idx)


def test_pendings_of_other_groups_are_other_trees():
    """So that no loop and no branch can take one for the other."""
    groups, (x, topk_idx) = (group_of(CASE), group_of(CASE, "xla")), layer_inputs()
    trees = [jax.tree.structure(trace(
        group, lambda x, i: jax_ep.dispatch_start(group, x, i, **options), x, topk_idx))
        for group in groups for options in ({}, {"capacity": 3}, {"quantize": "fp8"})]
    assert len(set(trees)) == len(trees)


def test_done_of_a_closed_group():
    mesh, (x, topk_idx) = run.make_mesh((NUM_RANKS,), (run.AXIS,)), layer_inputs()
    group = jax_ep.Group(mesh, run.AXIS, num_experts=CASE.num_experts, num_topk=CASE.num_topk,
                         max_tokens_per_rank=8, max_row_bytes=16, backend="xla")
    pending = trace(group, lambda x, i: jax_ep.dispatch_start(group, x, i), x, topk_idx)
    group.close()
    with pytest.raises(RuntimeError, match="closed"):
        trace(group, jax_ep.dispatch_done, pending)


def test_done_in_another_mesh():
    group, (x, topk_idx) = group_of(CASE), layer_inputs()
    pending = trace(group, lambda x, i: jax_ep.dispatch_start(group, x, i), x, topk_idx)
    other = run.make_mesh((NUM_RANKS,), ("model",))
    f = jax.shard_map(jax_ep.dispatch_done, mesh=other, in_specs=P("model"), out_specs=P("model"))
    with pytest.raises(ValueError, match="mesh"):
        jax.eval_shape(f, pending)


@pytest.mark.parametrize("transform", ["derivative", "vmap"])
@pytest.mark.parametrize("op", ["dispatch_start", "combine_start"])
def test_two_phases_are_for_inference(op, transform):
    group, (x, topk_idx) = group_of(CASE), layer_inputs()

    def f(x, topk_idx):
        pending = OPERATIONS[op](group, x, topk_idx)
        done = jax_ep.dispatch_done if op == "dispatch_start" else jax_ep.combine_done
        return sum(a.sum() for a in jax.tree.leaves(done(pending)) if a.dtype == np.float32)

    instead = {"dispatch_start": "prepare_and_dispatch", "combine_start": "combine"}[op]
    wrong = {"derivative": jax.grad(f),
             "vmap": lambda x, i: jax.vmap(lambda x: f(x, i))(jnp.stack([x, x]))}[transform]
    with pytest.raises(NotImplementedError, match=rf"{op} .*use {instead}\n"):
        trace(group, wrong, x, topk_idx)


def test_outside_shard_map():
    group, (x, topk_idx) = group_of(CASE), layer_inputs()
    for op in ("prepare_and_dispatch", "dispatch_start"):
        with pytest.raises(ValueError, match=f"{op} must be called inside jax.shard_map"):
            OPERATIONS[op](group, x[0], topk_idx[0])
