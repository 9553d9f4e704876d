"""What the processes of test_multiprocess.py run; each asserts on its own part."""

import functools
import time

import jax
import jax_ep
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits


def make_group(case, **options):
    mesh = Mesh(np.array(jax.devices()), (run.AXIS,))
    settings = dict(num_experts=case.num_experts, num_topk=case.num_topk,
                    max_tokens_per_rank=case.max_tokens_per_rank, max_row_bytes=256)
    return jax_ep.Group(mesh, run.AXIS, **(settings | options))


def spread(group, array):
    """A global array of which each process makes its part."""
    sharding = NamedSharding(group.mesh, P(run.AXIS))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def assert_local(actual, expected):
    """The addressable shards of a global array equal their parts of the expected one."""
    for shard in actual.addressable_shards:
        assert_same_bits(shard.data, expected[shard.index], str(shard.index))


def layer(group, case, x, topk_idx, weights):
    handle = run.prepare(group, case, topk_idx)
    rows, row_weights = jax_ep.dispatch(x, handle, weights)
    return rows, row_weights, handle.slots, jax_ep.combine(rows, handle)


def exchange():
    """Forward and backward of the reference across processes, against the oracle."""
    assert jax.process_count() > 1
    case = Case(num_ranks=len(jax.devices()), num_topk=3).with_capacity("tight")
    topk_idx = cases.routing("uniform", case)
    x = cases.floats(np.float32, (case.num_ranks, case.num_tokens, 8))
    weights = cases.floats(np.float32, topk_idx.shape)
    plan = oracle.prepare(case.oracle_config, topk_idx)
    expected = oracle.dispatch(plan, x)
    with make_group(case, backend="xla") as group:
        args = [spread(group, a) for a in (x, topk_idx, weights)]
        f = run.per_rank(group, functools.partial(layer, group, case))
        rows, row_weights, slots, y = jax.jit(f)(*args)
        assert_local(rows, expected)
        assert_local(row_weights, oracle.dispatch_weights(plan, weights))
        assert_local(slots, plan.slots)
        assert_local(y, oracle.combine(plan, expected))
        grad = jax.jit(jax.grad(lambda *args: f(*args)[0].sum()))(*args)
        assert_local(grad, oracle.combine(plan, np.ones_like(expected)))


def default_backend():
    """In several CPU processes the reference is chosen, with a reason."""
    with make_group(Case(num_ranks=len(jax.devices()))) as group:
        assert group.backend == "xla"
        assert "process" in group.backend_reason, group.backend_reason


def cpu_backend_wants_one_process():
    with pytest.raises(ValueError, match="one process|single process"):
        make_group(Case(num_ranks=len(jax.devices())), backend="cpu")


def disagree():
    """Both processes learn which setting differs, and the values."""
    case = Case(num_ranks=len(jax.devices()), num_topk=2 + jax.process_index())
    with pytest.raises((ValueError, RuntimeError), match="num_topk") as info:
        make_group(case, backend="xla", timeout_s=20)
    assert "2" in str(info.value) and "3" in str(info.value), info.value
    # The next Group, on which they agree, works.
    make_group(Case(num_ranks=len(jax.devices())), backend="xla").close()


def one_process_makes_no_group():
    """The waiting process gets an error within the time limit that names the missing one."""
    if jax.process_index() == 0:
        with pytest.raises(Exception, match="process") as info:
            make_group(Case(num_ranks=len(jax.devices())), backend="xla", timeout_s=3)
        assert "1" in str(info.value), info.value


def fail_or_hang():
    """For the test of the launcher itself."""
    assert jax.process_index() == 0, "wrong on purpose"
    time.sleep(1000)
