"""What the tests of ranks on GPUs share. Every process of an arrangement calls it together."""

import functools
import itertools
import re

import jax
import jax_ep
import numpy as np
import pytest
from jax_ep import bootstrap

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits

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
    """A Group without the low-latency path, unless asked for."""
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
