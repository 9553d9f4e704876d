"""What only GPUs have: workspaces, SM counts, failures of a rank, replayed graphs, large arrays.

Runs in every process of an arrangement of ranks at once; see jax_ep.testing.gpus.
"""

import functools
import itertools
import os
import re
import time

import jax
import jax.numpy as jnp
import jax_ep
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax_ep import backends, bootstrap, memory

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="the cuda backend")

TIMEOUT_S = 3.0
_barriers = itertools.count()


def everyone(value=None):
    """The values of all processes; none returns before all have come."""
    processes = list(range(jax.process_count()))
    if len(processes) == 1:
        return [value]
    return bootstrap.exchange(f"test_ranks/{next(_barriers)}", value, jax.process_index(),
                              processes, 60)


def all_ranks(**options):
    """A case with a rank on every device."""
    return Case(num_ranks=len(jax.devices()), **options)


def make_group(case, **options):
    settings = dict(num_experts=case.num_experts, num_topk=case.num_topk,
                    max_tokens_per_rank=case.max_tokens_per_rank, max_row_bytes=256,
                    backend="cuda", low_latency=False)
    mesh = run.make_mesh((case.num_ranks,), (run.AXIS,))
    return jax_ep.Group(mesh, run.AXIS, **(settings | options))


def layer(group, case, x, topk_idx):
    handle = run.prepare(group, case, topk_idx)
    rows, _ = jax_ep.dispatch(x, handle)
    return rows, jax_ep.combine(rows, handle)


def program_of(group, case):
    return jax.jit(run.per_rank(group, functools.partial(layer, group, case)))


def inputs(case, seed=0, hidden=8):
    x = cases.floats(np.float32, (case.num_ranks, case.num_tokens, hidden), seed)
    return x, cases.routing("uniform", case, seed)


def check(case, x, topk_idx, rows, y, what=""):
    plan = oracle.prepare(case.oracle_config, topk_idx)
    expected = oracle.dispatch(plan, x)
    assert_same_bits(rows, expected, f"{what} rows")
    assert_same_bits(y, oracle.combine(plan, expected), f"{what} y")


def test_attributes():
    case = all_ranks()
    with make_group(case) as group:
        local, ranks = jax.local_device_count(), jax.device_count()
        between_processes = {"": "CUDA IPC", "ipc": "CUDA IPC", "fabric": "fabric handles"}[
            os.environ.get(memory.VARIABLE, "")]
        expected = {name for name, taken in [("peer access", local > 1),
                                             (between_processes, local < ranks)] if taken}
        assert set(group.transport.split(" + ")) == (expected or {"one rank"})
        assert 1 <= group.num_sms <= 32
        assert group.workspace_bytes >= 1 << 20
        assert len(set(everyone(group.num_sms))) == 1
        group.check()


def test_too_many_sms():
    with pytest.raises(ValueError, match="num_sms=1000"):
        make_group(all_ranks(), num_sms=1000)


def test_a_hundred_groups_leak_nothing():
    case = all_ranks()
    devices = [device.local_hardware_id for device in jax.local_devices()]

    def free_bytes():
        everyone()
        return sum(map(backends.load_cuda().free_bytes, devices))

    make_group(case).close()
    before = free_bytes()
    for _ in range(100):
        make_group(case).close()
    after = free_bytes()
    everyone()
    assert before - after < 64 << 20, f"{before} bytes were free, then {after}"


def test_many_groups_at_once():
    case = all_ranks(num_topk=2)
    groups = [make_group(case) for _ in range(5)]
    x, topk_idx = inputs(case)
    results = [program_of(group, case)(x, topk_idx) for group in groups]
    for result in results:
        check(case, x, topk_idx, *result)
    for group in groups:
        group.close()


def test_too_little_memory():
    """An error with the numbers, on all processes; then the next Group works."""
    case = all_ranks()
    with pytest.raises(RuntimeError, match=r"\d+ MiB of its \d+ MiB are free"):
        make_group(case, num_topk=1, max_tokens_per_rank=1 << 22, max_row_bytes=1 << 22)
    with make_group(case) as group:
        x, topk_idx = inputs(case)
        check(case, x, topk_idx, *program_of(group, case)(x, topk_idx))


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_results_do_not_depend_on_the_number_of_sms(layout):
    """Those of every operation, bit for bit."""
    case = all_ranks(num_topk=4, num_tokens=37, experts_per_rank=3, layout=layout)
    x, topk_idx = inputs(case, hidden=24)
    weights = cases.floats(np.float32, topk_idx.shape)

    def f(x, topk_idx, weights):
        handle = run.prepare(group, case, topk_idx)
        rows, row_weights = jax_ep.dispatch(x, handle, weights)
        cast, _ = jax_ep.dispatch(x, handle, quantize="fp8")
        sums = [jax_ep.combine(rows, handle)]
        if layout != "rank":
            sums.append(jax_ep.combine(rows, handle, row_weights))
        return handle.slots, rows, row_weights, cast, sums

    expected = None
    for num_sms in (1, 2, 5, None):
        with make_group(case, num_sms=num_sms) as group:
            results = jax.jit(run.per_rank(group, f))(x, topk_idx, weights)
            results = jax.tree.map(np.asarray, results)
        check(case, x, topk_idx, results[1], results[-1][0], f"num_sms={num_sms}")
        expected = results if expected is None else expected
        assert_same_bits(results, expected, f"num_sms={num_sms}")


def test_changing_routing_in_one_program():
    """With command buffers switched on these are replays of one CUDA graph."""
    case = all_ranks(num_topk=3).with_capacity("tight")
    with make_group(case) as group:
        program = program_of(group, case)
        for seed in range(1000):
            args = inputs(case, seed)
            results = program(*args)
            if seed % 50 == 0:
                check(case, *args, *results, f"step {seed}")
        group.check()
        check(case, *args, *results, "the last step")


def test_independent_operations_in_one_program():
    """Nothing but XLA orders them; it must not run two of a Group at once, nor may a CUDA graph."""
    case = all_ranks(num_topk=3, num_tokens=64)
    batches = [inputs(case, seed) for seed in range(4)]
    with make_group(case) as group:
        program = jax.jit(run.per_rank(
            group, lambda *batches: [layer(group, case, *batch) for batch in batches]))
        for step in range(100):
            results = program(*batches)
            if step % 20 == 0:
                for i, (batch, result) in enumerate(zip(batches, results, strict=True)):
                    check(case, *batch, *result, f"step {step}, batch {i}")
        group.check()


def value(rank, token, hidden):
    """What element `hidden` of a token is; sums of a few are exact."""
    return ((rank * 31 + token * 7 + hidden) % 1024).astype(jnp.float32)


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_rows_beyond_two_gigabytes(layout):
    """Checked on the device, by a formula for every element."""
    hidden, num_topk, num_ranks = 7168, 10, len(jax.devices())
    case = Case(num_ranks=num_ranks, experts_per_rank=16, num_topk=num_topk, layout=layout,
                num_tokens=(8192 if layout == "expert" else 81920) // num_ranks)
    assert case.row_dims[0] * hidden * 4 > 1 << 31

    def f(rank):
        tokens, columns = jnp.arange(case.num_tokens), jnp.arange(hidden)
        x = value(rank, tokens[:, None], columns)
        step = jnp.arange(num_topk) * (case.num_experts // num_topk)
        topk_idx = (tokens[:, None] * 5 + rank + step) % case.num_experts
        handle = run.prepare(group, case, topk_idx)
        rows, _ = jax_ep.dispatch(x, handle)
        source = handle.row_source // (num_topk if layout == "expert" else 1)
        expected = value((source // case.max_tokens_per_rank)[:, None],
                         (source % case.max_tokens_per_rank)[:, None], columns)
        wrong = (rows != jnp.where(handle.row_source[:, None] >= 0, expected, 0)).sum()
        y = jax_ep.combine(rows, handle)
        copies = num_topk
        if layout == "rank":
            targets = topk_idx // case.experts_per_rank
            copies = jnp.any(targets[:, :, None] == jnp.arange(num_ranks), axis=1).sum(1)[:, None]
        return wrong, (y != x * copies).sum(), handle.num_rows

    with make_group(case, max_row_bytes=hidden * 4) as group:
        results = jax.jit(run.per_rank(group, f))(np.arange(num_ranks, dtype=np.int32))
        wrong_rows, wrong_sums, num_rows = map(np.asarray, results)
        group.check()
    assert not wrong_rows.any() and not wrong_sums.any(), (wrong_rows, wrong_sums)
    if layout == "expert":
        assert num_rows.sum() == num_ranks * case.num_tokens * num_topk


def routing_of(group, case):
    """A program of prepare alone, with results that hold nothing but -1 where it gives up."""
    def f(topk_idx):
        handle = run.prepare(group, case, topk_idx)
        return handle.slots, handle.row_source

    return jax.jit(run.per_rank(group, f))


def local_ranks():
    return [i for i, device in enumerate(jax.devices())
            if device.process_index == jax.process_index()]


def error_of(group):
    """What `check` raises. A group that has failed says that it must be closed."""
    with pytest.raises(RuntimeError, match="must be closed") as info:
        group.check()
    return str(info.value)


def news_from(ranks):
    """A pattern: that a rank here stopped because one of `ranks` had failed."""
    here, there = ("|".join(map(str, some)) for some in (local_ranks(), ranks))
    return (rf"on axis {run.AXIS}: rank ({here}) stopped because rank ({there}) had failed; "
            "its own error says why")


def assert_useless(program, *args, error):
    """The program raises `error`; or all bytes of its results on this process's ranks are 0xff.

    The latter where no handler has run since the group became useless: XLA had launched everything
    before, or replays it as a CUDA graph.
    """
    try:
        results = jax.block_until_ready(program(*args))
    except jax.errors.JaxRuntimeError as raised:
        assert re.search(error, str(raised)), raised
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        for shard in leaf.addressable_shards:
            data = np.ascontiguousarray(shard.data).reshape(-1).view(np.uint8)
            wrong = np.flatnonzero(data != 0xff)
            assert not wrong.size, (f"{jax.tree_util.keystr(path)} of {shard.device}: "
                                    f"{wrong.size} of {data.size} bytes, the first {wrong[0]}")


def assert_next_group_works(case):
    x, topk_idx = inputs(case)
    with make_group(case) as group:
        check(case, x, topk_idx, *program_of(group, case)(x, topk_idx))
        group.check()


def with_odd_rank(rank, op, group, x, handle):
    """A program in which `rank` runs `op` and all others a dispatch."""
    def f(x, handle):
        return jax.lax.cond(jax.lax.axis_index(run.AXIS) == rank, lambda: op(x, handle),
                            lambda: jax_ep.dispatch(x, handle)[0].sum())

    return jax.jit(run.per_rank(group, f, check_vma=False)).lower(x, handle).compile()


def ranks_with_numbers(program, *args):
    """The local ranks whose result is a number; others have NaN, or the program has failed."""
    try:
        shards = program(*args).addressable_shards
        return {shard.index[0].start for shard in shards if not np.isnan(shard.data).any()}
    except jax.errors.JaxRuntimeError as error:
        assert "must be closed" in str(error), error
        return set()


@pytest.mark.parametrize("what", ["nothing", "combine"])
def test_a_rank_that_does_something_else(what):
    """An error in time on every rank that takes part, and no wrong results; then a new Group works.

    A rank says what it found, or, where another one's news came first, who had failed.
    """
    num_ranks = len(jax.devices())
    if num_ranks == 1:
        pytest.skip("needs two ranks")
    case = all_ranks(num_topk=2 * num_ranks)  # all experts: every rank waits for all others
    last = num_ranks - 1
    op = {"nothing": lambda x, handle: 0 * x.sum(),
          "combine": lambda x, handle: jax_ep.combine(
              jnp.ones((*case.row_dims, 8)), handle).sum()}[what]
    found, failing = {
        "nothing": (f"rank [0-9]+ waited {TIMEOUT_S:g} s in vain for rank {last}'s data",
                    range(last)),
        "combine": ("rank [0-9]+ runs (dispatch while rank [0-9]+ runs combine|"
                    "combine while rank [0-9]+ runs dispatch)", range(num_ranks)),
    }[what]
    victims = set(local_ranks()) & set(failing)
    x, topk_idx = inputs(case)
    with make_group(case, timeout_s=TIMEOUT_S) as group:
        handle = jax.jit(run.per_rank(group, functools.partial(run.prepare, group, case)))(topk_idx)
        program = with_odd_rank(last, op, group, x, handle)
        # Compiled by all together, as XLA may need it; with a failed Group tracing raises.
        routing = routing_of(group, case).lower(topk_idx).compile()
        everyone()
        start = time.monotonic()
        assert not victims & ranks_with_numbers(program, x, handle)
        assert time.monotonic() - start < TIMEOUT_S + 5
        text = ""
        if victims:
            text = error_of(group)
            assert re.search(f"{found}|{news_from(failing)}", text), text
        if jax.local_device_count() == 1:  # else `check` may hide the error of another rank here
            assert any(re.search(found, theirs) for theirs in everyone(text))
        everyone()
        start = time.monotonic()
        assert not victims & ranks_with_numbers(program, x, handle)
        # Who did nothing learns of it by its next operation.
        assert_useless(routing, topk_idx, error="must be closed")
        error_of(group)
        assert time.monotonic() - start < TIMEOUT_S + 5
        everyone()
    assert_next_group_works(case)


def with_wrong_choice(topk_idx, case):
    """Rank 0 names an expert that there is not."""
    topk_idx = topk_idx.copy()
    topk_idx[0, 0, 0] = case.num_experts
    return topk_idx


def assert_wrong_choice_is_told(group, case):
    """By rank 0, and the others say that it was rank 0."""
    text = error_of(group)
    if 0 in local_ranks():
        assert (f"jax_ep prepare on axis {run.AXIS}: rank 0 has a topk_idx of {case.num_experts}, "
                f"outside [-1, {case.num_experts})") in text
    else:
        assert re.search(news_from([0]), text), text


def test_wrong_choice_is_reported():
    case = all_ranks()
    topk_idx = cases.routing("uniform", case)
    with make_group(case, timeout_s=TIMEOUT_S) as group:
        program = routing_of(group, case).lower(topk_idx).compile()
        everyone()
        jax.block_until_ready(program(with_wrong_choice(topk_idx, case)))
        assert_wrong_choice_is_told(group, case)
        assert_useless(program, topk_idx, error="must be closed")
        everyone()
    assert_next_group_works(case)


def late(topk_idx, x):
    """topk_idx, but not before the host has had the time to launch what uses it."""
    a = jnp.zeros((2048, 2048)) + x.ravel()[0]
    for _ in range(30):
        a = jnp.cos(a @ a)
    return topk_idx + (a[0, 0] > 2)


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_all_that_follows_a_failure_is_poison(layout):
    """On all ranks, of every operation and dtype: no row, scale, weight or sum is left out."""
    case = all_ranks(num_topk=3, num_tokens=37, layout=layout)
    x, topk_idx = inputs(case, hidden=24)
    args = x, with_wrong_choice(topk_idx, case), cases.floats(np.float32, topk_idx.shape)

    def f(x, topk_idx, weights):
        handle = run.prepare(group, case, late(topk_idx, x))
        tree = {"f32": x, "bf16": x.astype(jnp.bfloat16), "ids": topk_idx[:, 0]}
        rows, row_weights = jax_ep.dispatch(tree, handle, weights)
        cast = [jax_ep.dispatch(x, handle, quantize=kind)[0] for kind in oracle.QUANTIZE]
        ones = jnp.ones((*case.row_dims, 5))
        sums = [jax_ep.combine([ones, ones.astype(jnp.bfloat16)], handle)]
        if layout != "rank":
            sums.append(jax_ep.combine(ones, handle, ones[..., 0]))
        return rows, row_weights, [(c.values, c.scales) for c in cast], sums

    with make_group(case, timeout_s=TIMEOUT_S) as group:
        program = jax.jit(run.per_rank(group, f)).lower(*args).compile()
        everyone()
        assert_useless(program, *args, error="must be closed")
        assert_wrong_choice_is_told(group, case)
        everyone()
    assert_next_group_works(case)


def test_program_of_a_closed_group():
    """Its handlers raise. With command buffers there may be none, and all that it gives is poison.

    In either case it leaves alone the next Group, which may have got the closed one's memory.
    """
    case = all_ranks(num_topk=3)
    arrays = inputs(case)
    with make_group(case) as group:
        # The same buffers in every call, so that XLA can replay it.
        sharding = NamedSharding(group.mesh, PartitionSpec(run.AXIS))
        x, topk_idx = (jax.make_array_from_callback(a.shape, sharding, lambda index, a=a: a[index])
                       for a in arrays)
        program = program_of(group, case)
        for _ in range(5):
            check(case, *arrays, *program(x, topk_idx))
    closed = f"Group {group.id} is closed"
    everyone()
    for _ in range(3):
        assert_useless(program, x, topk_idx, error=closed)
    with make_group(case) as again:
        program_again = program_of(again, case)
        for _ in range(3):
            assert_useless(program, x, topk_idx, error=closed)
            check(case, *arrays, *program_again(x, topk_idx))
        again.check()
