"""combine: the reduction tree, bit for bit."""

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from jax_ep.testing import cases, oracle
from jax_ep.testing.cases import FLOAT_DTYPES, Case
from jax_ep.testing.compare import assert_same_values
from jax_ep.testing.run import runner


def random_rows(case, dims=(5,), seed=0, dtypes=FLOAT_DTYPES.values(), values=cases.floats):
    """One leaf of rows per dtype; rows without a source hold junk as well."""
    return {np.dtype(dtype).name: values(dtype, (case.num_ranks, *case.row_dims, *dims), seed + i)
            for i, dtype in enumerate(dtypes)}


def random_weights(case, dtype=np.float32, seed=0):
    return cases.floats(dtype, (case.num_ranks, *case.row_dims), seed + 100)


def check(case, backend, topk_idx, rows, row_weights=None, what=""):
    run = runner(case, backend)
    y = run.combine(run.prepare(topk_idx), rows, row_weights)
    plan = oracle.prepare(case.oracle_config, topk_idx)
    what = f"{case} {what} y"
    if row_weights is not None and backend == "xla":
        jax.tree.map(lambda a, r: check_bounds(plan, np.asarray(a), r, row_weights, what), y, rows)
    else:
        expected = jax.tree.map(lambda leaf: oracle.combine(plan, leaf, row_weights), rows)
        assert_same_values(y, expected, what)


def check_bounds(plan, y, rows, row_weights, what):
    """The reference's compiler may fuse a multiply-add or not, and nothing else."""
    lower, upper = oracle.combine_bounds(plan, rows, row_weights)
    assert y.dtype == lower.dtype and y.shape == lower.shape, what
    lower, y, upper = (a.astype(np.float64) for a in (lower, y, upper))
    # NaN is how float8_e4m3fn overflows; one end alone overflows only at the edge of its range.
    overflows = np.isnan(lower).astype(int) + np.isnan(upper)
    ok = np.where(overflows == 2, np.isnan(y), (overflows == 1) | ((lower <= y) & (y <= upper)))
    for i in np.flatnonzero(~ok)[:1]:
        lower, y, upper = (a.flat[i] for a in (lower, y, upper))
        raise AssertionError(f"{what} {rows.dtype} element {i}: not {lower} <= {y} <= {upper}")


def check_all_routings(case, backend, dtypes=FLOAT_DTYPES.values()):
    for seed, (kind, topk_idx) in enumerate(cases.routings(case)):
        rows = random_rows(case, seed=seed, dtypes=dtypes)
        check(case, backend, topk_idx, rows, what=kind)
        if case.layout != "rank":
            check(case, backend, topk_idx, rows, random_weights(case, seed=seed), kind)


@pytest.mark.parametrize("case", cases.quick_matrix(), ids=str)
def test_sums(case, both_backends):
    check_all_routings(case, both_backends)


MATRIX = list(enumerate(cases.matrix() + cases.odd_sizes()))


@pytest.mark.slow
@pytest.mark.parametrize("i, case", MATRIX, ids=str)
def test_sums_in_the_matrix(i, case, backend):
    """Two dtypes each, in turn: each costs the reference's compiler seconds."""
    dtypes = list(FLOAT_DTYPES.values())
    check_all_routings(case, backend, (dtypes[i % 5], dtypes[(i + 2) % 5]))


# Every token has several pairs on each rank, so that order and rounding show.
DEEP = Case(num_ranks=3, experts_per_rank=1, num_topk=8, num_tokens=6)
DEEP_DTYPES = (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)


def test_deep_sums(backend):
    topk_idx = cases.routing("uniform", DEEP)
    for seed in range(5):
        rows = random_rows(DEEP, (17,), seed, DEEP_DTYPES)
        check(DEEP, backend, topk_idx, rows)
        check(DEEP, backend, topk_idx, rows, random_weights(DEEP, seed=seed))


@pytest.mark.parametrize("weight_dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_weight_dtypes(weight_dtype, backend):
    """Weights of any float dtype are converted to the accumulator type."""
    case = Case(num_topk=4)
    rows = random_rows(case, dtypes=(np.float32, ml_dtypes.bfloat16))
    check(case, backend, cases.routing("duplicates", case), rows,
          random_weights(case, weight_dtype))


def test_float64_rows_are_summed_in_float64(backend):
    with jax.enable_x64(True):
        case = Case(num_topk=6)
        topk_idx = cases.routing("uniform", case)
        rows = {"a": cases.any_bits(np.uint64, (2, *case.row_dims, 3)) / np.float64(3 * 2**60),
                "b": random_rows(case)["bfloat16"]}
        check(case, backend, topk_idx, rows)
        check(case, backend, topk_idx, rows, random_weights(case, np.float64) / 3)
        if backend == "native":
            check(case, backend, topk_idx, rows, random_weights(case))


def test_leaves_of_all_ranks(backend):
    case = Case(num_topk=3)
    topk_idx = cases.routing("uniform", case)
    rows = [random_rows(case, dims, dtypes=(ml_dtypes.bfloat16,))
            for dims in ((), (1,), (2, 3), (2, 1, 3), (0,), (257,))]
    check(case, backend, topk_idx, (rows, {"again": rows[2]}), random_weights(case))


def fill_padding(plan, leaf, value):
    """The leaf with `value` in every row that has no source."""
    leaf = leaf.copy()
    leaf[plan.row_source < 0] = value
    return leaf


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_nan_in_rows_without_source_stays_there(layout, backend):
    case = Case(layout=layout, num_topk=3, expert_alignment=8).with_capacity("tight")
    for kind, topk_idx in cases.routings(case):
        plan = oracle.prepare(case.oracle_config, topk_idx)
        rows = {name: fill_padding(plan, leaf, np.nan)
                for name, leaf in random_rows(case, dtypes=DEEP_DTYPES[:2]).items()}
        y = runner(case, backend).combine(runner(case, backend).prepare(topk_idx), rows)
        assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in y.values()), kind
        check(case, backend, topk_idx, rows, what=kind)
        if layout != "rank":
            weights = random_weights(case)
            clean = runner(case, backend).combine(
                runner(case, backend).prepare(topk_idx),
                {name: fill_padding(plan, leaf, 0) for name, leaf in rows.items()}, weights)
            junk = runner(case, backend).combine(
                runner(case, backend).prepare(topk_idx), rows, fill_padding(plan, weights, np.nan))
            assert_same_values(junk, clean, kind)


def special_rows(case, seed, subnormals):
    """Zeros of both signs, infinities, NaN and the ends of the ranges, in every dtype."""
    rng = np.random.default_rng(seed)
    rows = {}
    for name, dtype in FLOAT_DTYPES.items():
        info = ml_dtypes.finfo(dtype)
        values = [0.0, -0.0, np.nan, info.max, info.min, info.tiny, -info.tiny, 1.0, info.eps]
        if name != "float8_e4m3fn":
            values += [np.inf, -np.inf]
        if subnormals:
            values += [info.smallest_subnormal, -info.smallest_subnormal]
        values = np.array([float(v) for v in values])
        # Half of the draws are zeros, so that single specials and sums of zeros occur.
        draws = rng.choice(values, (case.num_ranks, *case.row_dims, 40))
        zeros = rng.choice([0.0, -0.0], draws.shape)
        rows[name] = np.where(rng.random(draws.shape) < 0.5, zeros, draws).astype(dtype)
    return rows


def test_zeros_infinities_nan_and_overflow(backend):
    case = Case(num_ranks=2, num_topk=4, num_tokens=6)
    for seed in range(4):
        check(case, backend, cases.routing("duplicates", case, seed),
              special_rows(case, seed, subnormals=False))


def test_weighted_zeros_infinities_nan_and_overflow():
    case = Case(num_ranks=2, num_topk=4, num_tokens=6)
    for seed in range(4):
        weights = special_rows(case, seed + 50, subnormals=False)["float32"][..., 0]
        check(case, "native", cases.routing("duplicates", case, seed),
              special_rows(case, seed, subnormals=False), weights)


def test_subnormals():
    case = Case(num_ranks=2, num_topk=4, num_tokens=6)
    for seed in range(4):
        topk_idx = cases.routing("duplicates", case, seed)
        rows = special_rows(case, seed, subnormals=True)
        check(case, "native", topk_idx, rows)
        check(case, "native", topk_idx, rows, random_weights(case, seed=seed))


def test_subnormals_of_the_small_types_in_the_reference():
    """Those of float16 and float8 are normal in float32. XLA on CPU flushes float32's to zero."""
    case = Case(num_ranks=2, num_topk=4, num_tokens=6)
    for seed in range(4):
        rows = special_rows(case, seed, subnormals=True)
        small = {name: rows[name] for name in ("float16", "float8_e4m3fn", "float8_e5m2")}
        check(case, "xla", cases.routing("duplicates", case, seed), small)


@hypothesis.given(st.integers(0, 10**6))
def test_any_bits_native(seed):
    topk_idx = cases.routing("duplicates", DEEP, seed)
    rows = random_rows(DEEP, seed=seed, values=cases.any_bits)
    check(DEEP, "native", topk_idx, rows)
    check(DEEP, "native", topk_idx, rows, random_weights(DEEP, seed=seed))


def test_same_bits_every_time(backend):
    run, topk_idx = runner(DEEP, backend), cases.routing("uniform", DEEP)
    handle, rows = run.prepare(topk_idx), random_rows(DEEP, dtypes=DEEP_DTYPES)
    weights = random_weights(DEEP)
    results = [run.combine(handle, rows, weights) for _ in range(20)]  # all in flight
    for result in results[1:]:
        assert_same_values(result, results[0])
