"""dispatch: exact copies of the tokens in their rows, zeros elsewhere, for any payload."""

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from jax_ep.testing import cases, oracle
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits
from jax_ep.testing.run import runner


def check(case, backend, topk_idx, x, topk_weights=None, what=""):
    run = runner(case, backend)
    plan = oracle.prepare(case.oracle_config, topk_idx)
    rows, row_weights = run.dispatch(run.prepare(topk_idx), x, topk_weights)
    expected = jax.tree.map(lambda leaf: oracle.dispatch(plan, leaf), x)
    assert_same_bits(rows, expected, f"{case} {what} rows")
    if topk_weights is None:
        assert row_weights is None
    else:
        assert_same_bits(row_weights, oracle.dispatch_weights(plan, topk_weights),
                         f"{case} {what} row_weights")


def weights_of(case, dtype=np.float32, seed=0):
    shape = (case.num_ranks, case.num_tokens, case.num_topk)
    return cases.floats(dtype, shape, seed)


def check_all_routings(case, backend):
    for seed, (kind, topk_idx) in enumerate(cases.routings(case)):
        check(case, backend, topk_idx, cases.payload(case, seed), weights_of(case, seed=seed), kind)


@pytest.mark.parametrize("case", cases.quick_matrix(), ids=str)
def test_rows(case, both_backends):
    check_all_routings(case, both_backends)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.matrix() + cases.odd_sizes(), ids=str)
def test_rows_in_the_matrix(case, backend):
    check_all_routings(case, backend)


def test_without_weights(backend):
    case = Case(num_topk=3).with_capacity("tight")
    x = cases.floats(np.float32, (2, case.num_tokens, 4))
    check(case, backend, cases.routing("duplicates", case), x)


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_weights_keep_their_dtype(layout, backend):
    case = Case(layout=layout, num_topk=3).with_capacity("tight")
    x = cases.floats(np.float32, (2, case.num_tokens, 4))
    for dtype in (ml_dtypes.bfloat16, np.float16):
        check(case, backend, cases.routing("unrouted", case), x, weights_of(case, dtype))


def test_weights_are_copied_bit_for_bit(backend):
    case = Case(num_topk=3).with_capacity("tight")
    x = cases.floats(np.float32, (2, case.num_tokens, 4))
    weights = cases.any_bits(np.float32, (2, case.num_tokens, case.num_topk))
    check(case, backend, cases.routing("uniform", case), x, weights)


@pytest.mark.parametrize("tree", [
    lambda x: (x["fp8"], x["scales"]),
    lambda x: {"a": [x["ids"], None], "b": (x["mask"],)},
    lambda x: x["complex"],
], ids=["fp8_scales", "nested", "bare"])
def test_pytrees(tree, backend):
    case = Case()
    check(case, backend, cases.routing("uniform", case), tree(cases.payload(case)))


def test_rows_of_zero_bytes_and_of_odd_bytes(backend):
    case = Case()
    lead = (2, case.num_tokens)
    x = {"none": np.zeros((*lead, 0), np.float32),
         "one": cases.any_bits(np.int8, (*lead, 1)),
         "hidden_not_a_multiple_of_anything": cases.any_bits(np.uint8, (*lead, 257))}
    check(case, backend, cases.routing("uniform", case), x)


def test_wide_dtypes(backend):
    with jax.enable_x64(True):
        case = Case(num_topk=3)
        lead = (2, case.num_tokens)
        x = [cases.any_bits(dtype, (*lead, 3), seed)
             for seed, dtype in enumerate((np.float64, np.int64, np.uint64, np.complex128))]
        topk_idx = cases.routing("uniform", case)
        check(case, backend, topk_idx, x, weights_of(case, np.float64))
        check(case, backend, topk_idx.astype(np.int64), x)


def test_handle_is_reused(backend):
    """A cached handle serves many dispatches, all in flight at once."""
    case = Case(num_ranks=4, num_topk=3).with_capacity("tight")
    run, topk_idx = runner(case, backend), cases.routing("uniform", case)
    handle = run.prepare(topk_idx)
    inputs = [cases.floats(np.float32, (4, case.num_tokens, 8), seed) for seed in range(20)]
    outputs = [run.dispatch(handle, x)[0] for x in inputs]
    plan = oracle.prepare(case.oracle_config, topk_idx)
    for x, rows in zip(inputs, outputs):
        assert_same_bits(rows, oracle.dispatch(plan, x))


@pytest.mark.slow
@hypothesis.given(st.integers(0, 10**6), st.sampled_from(cases.ROUTINGS))
def test_any_bits(seed, kind):
    case = Case(num_topk=3, expert_alignment=8).with_capacity("tight")
    topk_idx = cases.routing(kind, case, seed)
    for backend in ("native", "xla"):
        check(case, backend, topk_idx, cases.payload(case, seed), weights_of(case, seed=seed))
