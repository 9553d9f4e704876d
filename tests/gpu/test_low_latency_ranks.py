"""What only GPUs have of the low-latency path: order, load, replayed graphs, tickets, failures.

Runs in every process of an arrangement of ranks at once; see jax_ep.testing.gpus.
"""

import dataclasses
import functools
import re
import time

import jax
import jax.numpy as jnp
import jax_ep
import load
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.compare import assert_same_bits
from ranks import (
    TIMEOUT_S,
    all_ranks,
    assert_next_group_works,
    assert_useless,
    error_of,
    everyone,
    inputs,
    local_ranks,
    make_group,
    news_from,
)

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="the cuda backend")

make_group = functools.partial(make_group, low_latency=True)


def plan_options(case):
    return dict(layout=case.layout, capacity=case.capacity, expert_alignment=case.expert_alignment)


def ordinary(group, case, x, topk_idx, weights, quantize=None):
    return jax_ep.prepare_and_dispatch(group, x, topk_idx, weights, **plan_options(case),
                                       quantize=quantize, mode="ht")


def fused(group, case, x, topk_idx, weights, quantize=None):
    return jax_ep.prepare_and_dispatch(group, x, topk_idx, weights, **plan_options(case),
                                       quantize=quantize, mode="ll")


def started(group, case, x, topk_idx, weights=None, quantize=None):
    return jax_ep.dispatch_start(group, x, topk_idx, weights, **plan_options(case),
                                 quantize=quantize)


def split(*args):
    return jax_ep.dispatch_done(started(*args))


def split_combine(*args):
    return jax_ep.combine_done(jax_ep.combine_start(*args))


WAYS = {
    "ordinary": (ordinary, functools.partial(jax_ep.combine, mode="ht")),
    "fused": (fused, functools.partial(jax_ep.combine, mode="ll")),
    "split": (split, split_combine),
}


def on_ranks(group, f):
    return jax.jit(run.per_rank(group, f))


def local_values(array):
    """The part of a stacked array that this process has, without a word to the others."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def placed(group, *arrays):
    """The arrays on the ranks' devices, in the same buffers whenever they are used."""
    sharding = NamedSharding(group.mesh, PartitionSpec(run.AXIS))
    return [jax.make_array_from_callback(a.shape, sharding, lambda index, a=a: a[index])
            for a in arrays]


def hash_of(tree):
    """A uint32 that every single changed bit changes."""
    total = jnp.uint32(0)
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").reshape(-1)
        odd = 2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1
        total = (2 * i + 3) * total + (bits.astype(jnp.uint32) * odd).sum(dtype=jnp.uint32)
    return total


def test_starts_and_dones_stay_around_the_compute():
    """In XLA's schedule. A fast Fourier transform is never fused with anything."""
    case = all_ranks()
    x, topk_idx = inputs(case)

    def f(x, topk_idx):
        pending = started(group, case, x, topk_idx)
        first = jnp.fft.fft(jax_ep.after(pending, x)).real
        rows, _, handle = jax_ep.dispatch_done(pending, after=first)
        pending = jax_ep.combine_start(rows, handle)
        second = jnp.fft.fft(jax_ep.after(pending, first)).real
        return jax_ep.combine_done(pending, after=second), second

    with make_group(case) as group:
        text = on_ranks(group, f).lower(x, topk_idx).compile().as_text()
    assert "is_scheduled=true" in text
    order = re.findall(r"= .* (fft)\(|custom_call_target=\"jax_ep_cuda_low_latency_(\w+)\"", text)
    assert [fft or call for fft, call in order] == [
        "dispatch_start", "fft", "dispatch_done", "combine_start", "fft", "combine_done"]


@pytest.mark.parametrize("layout", ["expert", "padded"])
def test_repeated_runs_under_load(layout):
    """200 runs, each routing twice, while another stream uses the GPU: equal hashes in all ways."""
    case = all_ranks(experts_per_rank=8, num_topk=4, num_tokens=96, layout=layout)
    case = case.with_capacity("tight")

    def f(x, topk_idx, weights):
        def hash_by(dispatch, combine):
            rows, row_weights, handle = dispatch(group, case, x, topk_idx, weights)
            cast, _, again = dispatch(group, case, x, topk_idx, weights, "fp8")
            return hash_of((rows, row_weights, handle, combine(rows, handle, row_weights), cast,
                            again.slots))

        return jnp.stack([hash_by(*way) for way in WAYS.values()])

    x = cases.floats(ml_dtypes.bfloat16, (case.num_ranks, case.num_tokens, 1024))
    with make_group(case, max_row_bytes=2048) as group:
        program = on_ranks(group, f)
        before = None
        everyone()
        with load.on([device.local_hardware_id for device in jax.local_devices()]):
            for step in range(200):
                topk_idx = cases.routing(cases.ROUTINGS[step // 2 % len(cases.ROUTINGS)], case,
                                         step // 2)
                hashes = local_values(program(x, topk_idx, cases.floats(
                    np.float32, topk_idx.shape, step // 2)))
                assert (hashes == hashes[:, :1]).all(), (step, hashes)
                if step % 2:
                    assert (hashes == before).all(), (step, hashes, before)
                before = hashes
        group.check()


STEPS, ROUNDS = 100, 100


def test_ten_thousand_steps():
    """With command buffers switched on these are replays of one CUDA graph."""
    case = all_ranks(experts_per_rank=4, num_topk=3, num_tokens=16)

    def steps(dispatch, combine, x, topk_idx, weights, state):
        def step(i, state):
            number, y, total = state
            routing = jnp.where(topk_idx < 0, -1, (topk_idx + 7 * number + i) % case.num_experts)
            rows, row_weights, handle = dispatch(group, case, x + y / 16, routing, weights)
            y = combine(rows, handle, row_weights)
            return number, y, 31 * total + hash_of((handle.slots, rows, y))

        number, y, total = jax.lax.fori_loop(0, STEPS, step, state)
        return number + 1, y, total

    x = cases.floats(np.float32, (case.num_ranks, case.num_tokens, 64)) / 16
    topk_idx = cases.routing("unrouted", case)
    weights = np.random.default_rng(0).random(topk_idx.shape, np.float32) / 3
    start = (np.zeros(case.num_ranks, np.int32), np.zeros_like(x),
             np.zeros(case.num_ranks, np.uint32))
    with make_group(case) as group:
        arrays = placed(group, x, topk_idx, weights)
        results = {}
        for name, rounds in {"ordinary": 1, "fused": ROUNDS, "split": ROUNDS}.items():
            program = on_ranks(group, functools.partial(steps, *WAYS[name]))
            state = tuple(placed(group, *start))
            for i in range(rounds):
                state = program(*arrays, state)
                if i in (0, rounds - 1):
                    results[name, i] = [local_values(part) for part in state]
        group.check()
    assert_same_bits(results["fused", 0], results["ordinary", 0])
    assert_same_bits(results["split", 0], results["ordinary", 0])
    assert_same_bits(results["split", ROUNDS - 1], results["fused", ROUNDS - 1])


@pytest.mark.parametrize("way", ["fused", "split"])
def test_results_do_not_depend_on_the_number_of_sms(way):
    case = all_ranks(num_topk=4, num_tokens=37, experts_per_rank=3)
    x, topk_idx = inputs(case, hidden=24)
    weights = cases.floats(np.float32, topk_idx.shape)
    plan = oracle.prepare(case.oracle_config, topk_idx)
    rows = oracle.dispatch(plan, x)
    expected = rows, oracle.combine(plan, rows, oracle.dispatch_weights(plan, weights))

    def f(x, topk_idx, weights):
        dispatch, combine = WAYS[way]
        rows, row_weights, handle = dispatch(group, case, x, topk_idx, weights)
        return rows, combine(rows, handle, row_weights)

    for num_sms in (1, 2, 5, None):
        with make_group(case, num_sms=num_sms) as group:
            assert_same_bits(on_ranks(group, f)(x, topk_idx, weights), expected,
                             f"num_sms={num_sms}")


def test_pending_between_programs():
    """Started by one, done by another; a second done of the same is an error."""
    case = all_ranks()
    x, topk_idx = inputs(case)
    with make_group(case, timeout_s=TIMEOUT_S) as group:
        pending = on_ranks(group, functools.partial(started, group, case))(x, topk_idx)
        done = on_ranks(group, lambda pending: jax_ep.dispatch_done(pending)[0])
        plan = oracle.prepare(case.oracle_config, topk_idx)
        assert_same_bits(done(pending), oracle.dispatch(plan, x))
        assert_ticket_is_refused(group, done, pending)
    assert_next_group_works(case)


def assert_ticket_is_refused(group, program, *args):
    """On all ranks, by each itself or by the news of another one; the results are poison."""
    everyone()
    assert_useless(program, *args, error="must be closed")
    text = error_of(group)
    assert re.search(f"in flight|{news_from(range(jax.device_count()))}", text), text
    everyone()


def ticket_used_twice(group, case, x, topk_idx):
    pending = started(group, case, x, topk_idx)
    rows, _, _ = jax_ep.dispatch_done(pending)
    return jax_ep.dispatch_done(pending, after=rows)[0]


def ticket_of_a_combine_used_twice(group, case, x, topk_idx):
    rows, _, handle = fused(group, case, x, topk_idx, None)
    pending = jax_ep.combine_start(rows, handle)
    return jax_ep.combine_done(pending, after=jax_ep.combine_done(pending))


@pytest.mark.parametrize("wrong", [ticket_used_twice, ticket_of_a_combine_used_twice])
def test_tickets(wrong):
    case = all_ranks()
    x, topk_idx = inputs(case)
    with make_group(case, timeout_s=TIMEOUT_S) as group:
        program = on_ranks(group, functools.partial(wrong, group, case))
        program = program.lower(x, topk_idx).compile()
        everyone()
        try:
            jax.block_until_ready(program(x, topk_idx))
        except jax.errors.JaxRuntimeError as error:
            assert "must be closed" in str(error), error
        assert_ticket_is_refused(group, program, x, topk_idx)
    assert_next_group_works(case)


@pytest.mark.parametrize("op", ["dispatch", "combine", "split dispatch", "split combine"])
def test_a_rank_that_does_something_else(op):
    """An error in time on every rank, and no wrong results; then a new Group works."""
    num_ranks = len(jax.devices())
    if num_ranks == 1:
        pytest.skip("needs two ranks")
    case = all_ranks(num_topk=2 * num_ranks)  # all experts: every rank waits for all others
    x, topk_idx = inputs(case)
    kind = op.split()[-1]
    dispatch, combine = WAYS["split" if op.startswith("split") else "fused"]

    def f(x, topk_idx, rows, handle):
        def usual():
            return (dispatch(group, case, x, topk_idx, None)[0].sum() if kind == "dispatch"
                    else combine(rows, handle).sum())

        def other():
            return jax_ep.dispatch(x, handle)[0].sum()

        return jax.lax.cond(jax.lax.axis_index(run.AXIS) == num_ranks - 1, other, usual)

    with make_group(case, timeout_s=TIMEOUT_S) as group:
        handle = on_ranks(group, functools.partial(run.prepare, group, case))(topk_idx)
        rows = np.zeros((num_ranks, *case.row_dims, 8), np.float32)
        program = jax.jit(run.per_rank(group, f, check_vma=False))
        program = program.lower(x, topk_idx, rows, handle).compile()
        everyone()
        start = time.monotonic()
        try:
            totals = jax.block_until_ready(program(x, topk_idx, rows, handle))
            assert all(np.isnan(shard.data).all() for shard in totals.addressable_shards)
        except jax.errors.JaxRuntimeError as error:
            assert "must be closed" in str(error), error
        assert time.monotonic() - start < TIMEOUT_S + 5
        text = error_of(group)
        expected = rf"runs (low-latency )?\w+.* while rank [0-9]+ runs|waited {TIMEOUT_S:g} s"
        assert re.search(f"{expected}|{news_from(range(num_ranks))}", text), text
        everyone()
    assert_next_group_works(case)


@pytest.mark.parametrize("way", ["fused", "split"])
def test_ranks_that_disagree_and_exchange_nothing(way):
    """They notice although no rank has a row for another."""
    num_ranks = len(jax.devices())
    if num_ranks == 1:
        pytest.skip("needs two ranks")
    case = all_ranks()
    odd = dataclasses.replace(case, expert_alignment=2)
    x, topk_idx = inputs(case)
    topk_idx[:] = -1
    dispatch, _ = WAYS[way]

    def f(x, topk_idx):
        return jax.lax.cond(jax.lax.axis_index(run.AXIS) == num_ranks - 1,
                            lambda: dispatch(group, odd, x, topk_idx, None)[0].sum(),
                            lambda: dispatch(group, case, x, topk_idx, None)[0].sum())

    with make_group(case, timeout_s=TIMEOUT_S) as group:
        program = jax.jit(run.per_rank(group, f, check_vma=False)).lower(x, topk_idx).compile()
        everyone()
        start = time.monotonic()
        try:
            totals = jax.block_until_ready(program(x, topk_idx))
            assert all(np.isnan(shard.data).all() for shard in totals.addressable_shards)
        except jax.errors.JaxRuntimeError as error:
            assert "must be closed" in str(error), error
        assert time.monotonic() - start < TIMEOUT_S
        text = error_of(group)
        expected = r"runs another (prepare_and_dispatch|dispatch_start)"
        assert re.search(f"{expected}|{news_from(range(num_ranks))}", text), text
        everyone()
    assert_next_group_works(case)


def test_all_that_follows_a_failure_is_poison():
    """Of every operation and of tickets: no row, scale, weight or sum is left out."""
    case = all_ranks(num_topk=3, num_tokens=37)
    x, topk_idx = inputs(case, hidden=24)
    topk_idx[0, 0, 0] = case.num_experts  # there is no such expert
    args = x, topk_idx, cases.floats(np.float32, topk_idx.shape)

    def f(x, topk_idx, weights):
        tree = {"f32": x, "bf16": x.astype(jnp.bfloat16), "ids": topk_idx[:, 0]}
        results = []
        for dispatch, combine in (WAYS["fused"], WAYS["split"]):
            rows, row_weights, handle = dispatch(group, case, tree, topk_idx, weights)
            cast = [dispatch(group, case, x, topk_idx, weights, kind)[0]
                    for kind in oracle.QUANTIZE]
            ones = jnp.ones((*case.row_dims, 5))
            results += [rows, row_weights, [(c.values, c.scales) for c in cast],
                        combine(ones, handle), combine([ones, ones], handle, ones[..., 0])]
        return results

    with make_group(case, timeout_s=TIMEOUT_S) as group:
        program = on_ranks(group, f).lower(*args).compile()
        everyone()
        try:
            jax.block_until_ready(program(*args))
        except jax.errors.JaxRuntimeError as error:
            assert "must be closed" in str(error), error
        text = error_of(group)
        if 0 in local_ranks():
            assert f"rank 0 has a topk_idx of {case.num_experts}, outside" in text
        else:
            assert re.search(news_from([0]), text), text
        everyone()
        assert_useless(program, *args, error="must be closed")
        everyone()
    assert_next_group_works(case)
