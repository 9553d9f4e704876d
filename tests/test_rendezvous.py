"""The native CPU backend's rendezvous: a rank that never calls is an error, not a hang."""

import functools
import re
import time

import jax
import jax.numpy as jnp
import jax_ep
import numpy as np
import pytest

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits

CASE = Case(num_ranks=4, num_topk=2)
TIMEOUT_S = 1.5
MISSING = (1, 3)

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the cpu backend")


def prepare(group, x, handle):
    return run.prepare(group, CASE, handle.topk_idx).slots


def dispatch(group, x, handle):
    return jax_ep.dispatch(x, handle)[0]


def combine(group, x, handle):
    return jax_ep.combine(jnp.ones((*CASE.row_dims, 4)), handle)


@pytest.mark.parametrize("op", [prepare, dispatch, combine])
def test_missing_ranks_are_named(op):
    handle = run.runner(CASE, "native").prepare(cases.routing("uniform", CASE))
    x = cases.floats(np.float32, (4, CASE.num_tokens, 4))
    with jax_ep.Group(run.make_mesh((4,), (run.AXIS,)), run.AXIS, num_experts=CASE.num_experts,
                      num_topk=CASE.num_topk, max_tokens_per_rank=CASE.max_tokens_per_rank,
                      max_row_bytes=64, backend="cpu", timeout_s=TIMEOUT_S) as group:
        handle = jax.jit(run.per_rank(group, functools.partial(run.prepare, group, CASE)))(
            handle.topk_idx)

        def f(x, handle):
            rank = jax.lax.axis_index(run.AXIS)
            absent = functools.reduce(jnp.logical_or, [rank == r for r in MISSING])
            result = jax.eval_shape(functools.partial(op, group), x, handle)
            return jax.lax.cond(absent, lambda: jnp.zeros(result.shape, result.dtype),
                                lambda: op(group, x, handle))

        program = jax.jit(run.per_rank(group, f, check_vma=False))
        program = program.lower(x, handle).compile()
        start = time.monotonic()
        with pytest.raises(Exception) as info:
            jax.block_until_ready(program(x, handle))
        elapsed = time.monotonic() - start
    message = str(info.value)
    assert TIMEOUT_S * 0.9 <= elapsed < TIMEOUT_S + 5, elapsed
    assert op.__name__ in message and run.AXIS in message, message
    named = re.search(r"rank (\d).*missing[^\d]*([\d, and]*\d)", message, re.DOTALL)
    assert named, message
    assert int(named[1]) not in MISSING, message
    assert tuple(map(int, re.findall(r"\d+", named[2]))) == MISSING, message


def test_other_groups_work_after_a_timeout():
    """Runs after the tests above in this file, in the same process."""
    topk_idx = cases.routing("uniform", CASE)
    x = cases.floats(np.float32, (4, CASE.num_tokens, 4))
    runner = run.runner(CASE, "native")
    rows, _ = runner.dispatch(runner.prepare(topk_idx), x)
    assert_same_bits(rows, oracle.dispatch(oracle.prepare(CASE.oracle_config, topk_idx), x))
