"""The oracle itself against cases computed by hand."""

import fractions
import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ep.testing import cases, oracle
from jax_ep.testing.rounding import fma

# Two ranks, two experts each, T = 3, K = 2: experts 0, 1 on rank 0 and 2, 3 on rank 1.
TOPK_IDX = np.array([[[0, 2], [1, 1], [-1, 3]],
                     [[0, 1], [3, 0], [-1, -1]]])


def plan_of(**settings):
    return oracle.prepare(oracle.Config(num_experts=4, max_tokens_per_rank=10, **settings),
                          TOPK_IDX)


def test_expert_layout():
    plan = plan_of()
    # Worst case: R*T*K = 12 rows. Rank 0: expert 0 gets (0,0,0), (1,0,0), (1,1,1);
    # expert 1 gets (0,1,0), (0,1,1), (1,0,1). Rank 1: expert 2 (0,0,1); expert 3 (0,2,1), (1,1,0).
    assert plan.row_source.shape == (2, 12)
    assert plan.expert_counts.tolist() == [[3, 3], [1, 2]]
    assert plan.group_sizes.tolist() == [[3, 3], [1, 2]]
    assert plan.num_rows.tolist() == [6, 3]
    assert plan.num_dropped.tolist() == [0, 0]
    assert plan.slots.tolist() == [[[0, 0], [3, 4], [-1, 1]], [[1, 5], [2, 2], [-1, -1]]]
    # (src * 10 + t) * 2 + k
    assert plan.row_source[0].tolist() == [0, 20, 23, 2, 3, 21] + [-1] * 6
    assert plan.row_source[1].tolist() == [1, 5, 22] + [-1] * 9
    assert plan.row_topk_idx is None


def test_expert_layout_aligned():
    plan = plan_of(expert_alignment=4)
    assert plan.row_source.shape == (2, 12 + 2 * 3)
    assert plan.expert_counts.tolist() == [[3, 3], [1, 2]]
    assert plan.group_sizes.tolist() == [[4, 4], [4, 4]]
    assert plan.num_rows.tolist() == [8, 8]
    assert plan.slots.tolist() == [[[0, 0], [4, 5], [-1, 4]], [[1, 6], [5, 2], [-1, -1]]]


def test_expert_layout_drops():
    plan = plan_of(expert_alignment=4, capacity=5)
    # Rank 0 keeps the three rows of expert 0 and one of expert 1; rank 1 expert 2 and one of 3.
    assert plan.slots.tolist() == [[[0, 0], [4, -1], [-1, 4]], [[1, -1], [-1, 2], [-1, -1]]]
    assert plan.num_dropped.tolist() == [2, 1]
    assert plan.expert_counts.tolist() == [[3, 3], [1, 2]]
    assert plan.group_sizes.tolist() == [[4, 1], [4, 1]]
    assert plan.num_rows.tolist() == [5, 5]


def test_capacity_zero():
    plan = plan_of(capacity=0)
    assert (plan.slots == -1).all()
    assert plan.num_dropped.tolist() == [6, 3]
    assert plan.group_sizes.tolist() == [[0, 0], [0, 0]]


def test_rank_layout():
    plan = plan_of(layout="rank")
    # Rows of rank 0: tokens (0,0), (0,1), (1,0), (1,1). Of rank 1: (0,0), (0,2), (1,1).
    assert plan.row_source.tolist() == [[0, 1, 10, 11, -1, -1], [0, 2, 11, -1, -1, -1]]
    assert plan.row_topk_idx[0, :4].tolist() == [[0, -1], [1, 1], [0, 1], [-1, 0]]
    assert plan.row_topk_idx[1, :3].tolist() == [[-1, 0], [-1, 1], [1, -1]]
    assert (plan.row_topk_idx[0, 4:] == -1).all() and (plan.row_topk_idx[1, 3:] == -1).all()
    assert plan.slots.tolist() == [[[0, 0], [1, 1], [-1, 1]], [[2, 2], [2, 3], [-1, -1]]]
    assert plan.group_sizes.tolist() == [[3, 3], [1, 2]]
    assert plan.num_rows.tolist() == [4, 3]


def test_rank_layout_drops_all_pairs_of_a_row():
    plan = plan_of(layout="rank", capacity=2)
    assert plan.slots.tolist() == [[[0, 0], [1, 1], [-1, 1]], [[-1, -1], [-1, -1], [-1, -1]]]
    assert plan.num_dropped.tolist() == [3, 1]
    assert plan.group_sizes.tolist() == [[1, 2], [1, 1]]
    assert plan.num_rows.tolist() == [2, 2]


def test_padded_layout():
    plan = plan_of(layout="padded", capacity=2)
    assert plan.row_source.tolist() == [[[0, 20], [2, 3]], [[1, -1], [5, 22]]]
    assert plan.slots.tolist() == [[[0, 0], [2, 3], [-1, 2]], [[1, -1], [3, -1], [-1, -1]]]
    assert plan.num_dropped.tolist() == [2, 0]
    assert plan.group_sizes.tolist() == [[2, 2], [1, 2]]
    assert plan_of(layout="padded").row_source.shape == (2, 2, 6)


def test_dispatch():
    x = np.array([[10, 11, 12], [20, 21, 22]])
    weights = np.arange(12, dtype=np.float32).reshape(2, 3, 2) + 1
    plan = plan_of()
    assert oracle.dispatch(plan, x)[0].tolist() == [10, 20, 21, 11, 11, 20] + [0] * 6
    assert oracle.dispatch(plan, x)[1].tolist() == [10, 12, 21] + [0] * 9
    assert oracle.dispatch_weights(plan, weights)[0].tolist() == [1, 7, 10, 3, 4, 8] + [0] * 6
    plan = plan_of(layout="rank", capacity=3)
    assert oracle.dispatch(plan, x).tolist() == [[10, 11, 20], [10, 12, 21]]
    assert oracle.dispatch_weights(plan, weights)[0].tolist() == [[1, 0], [3, 4], [7, 8]]
    assert oracle.dispatch_weights(plan, weights)[1].tolist() == [[0, 2], [0, 6], [9, 0]]
    plan = plan_of(layout="padded", capacity=2)
    assert oracle.dispatch(plan, x).tolist() == [[[10, 20], [11, 11]], [[10, 0], [12, 21]]]


def test_combine():
    plan = plan_of()
    rows = np.zeros((2, 12), np.float32)
    rows[0, :6] = [1, 2, 3, 4, 5, 6]
    rows[1, :3] = [10, 20, 30]
    rows[0, 6:] = rows[1, 3:] = np.nan
    assert oracle.combine(plan, rows).tolist() == [[1 + 10, 4 + 5, 20], [2 + 6, 30 + 3, 0]]
    weights = np.full((2, 12), 2, np.float32)
    assert oracle.combine(plan, rows, weights).tolist() == [[22, 18, 40], [16, 66, 0]]


def test_combine_counts_a_row_of_layout_rank_once():
    plan = plan_of(layout="rank")
    rows = np.array([[1, 2, 3, 4, 9, 9], [10, 20, 30, 9, 9, 9]], np.float32)
    assert oracle.combine(plan, rows).tolist() == [[1 + 10, 2, 20], [3, 4 + 30, 0]]


def test_combine_rounds_each_partial_to_the_row_dtype():
    # One token; experts 0, 0, 1, 1 on two ranks. In bfloat16 256 + 1 is a tie and rounds to 256,
    # so the partials are 256 and 1, whose sum rounds to 256. Without rounding: 258.
    plan = oracle.prepare(oracle.Config(num_experts=2, max_tokens_per_rank=1),
                          np.array([[[0, 0, 1, 1]], [[-1, -1, -1, -1]]]))
    rows = np.zeros((2, 8), ml_dtypes.bfloat16)
    rows[0, :2] = [256, 1]
    rows[1, :2] = [0.5, 0.5]
    assert oracle.combine(plan, rows)[0, 0] == 256
    assert oracle.combine(plan, rows.astype(np.float32))[0, 0] == 258


def test_combine_order():
    # In float32 2^24 + 1 is 2^24: the order of a rank's pairs and that of ranks both show.
    def total(idx, rows):
        plan = oracle.prepare(oracle.Config(num_experts=2, max_tokens_per_rank=1),
                              np.array([[idx], [[-1] * len(idx)]]))
        return oracle.combine(plan, np.array(rows, np.float32))[0, 0]

    big = 2.0**24
    assert total([0, 0, 0], [[big, 1, -big], [0, 0, 0]]) == 0
    assert total([0, 0, 0], [[big, -big, 1], [0, 0, 0]]) == 1
    # Rank 0 first, though k says otherwise: (big - big) + 1.
    assert total([1, 0, 0], [[big, -big, 0], [1, 0, 0]]) == 1


def test_combine_signed_zero_overflow_nan():
    plan = oracle.prepare(oracle.Config(num_experts=1, max_tokens_per_rank=1),
                          np.array([[[0, 0]]]))

    def total(values, dtype):
        return oracle.combine(plan, np.array([values]).astype(dtype))[0, 0]

    assert not np.signbit(total([-0.0, -0.0], np.float32))  # the sum starts at +0
    assert total([60000, 60000], np.float16) == np.inf
    assert np.isnan(total([448, 448], ml_dtypes.float8_e4m3fn))
    assert total([57344, 57344], ml_dtypes.float8_e5m2) == np.inf
    assert np.isnan(total([np.inf, -np.inf], np.float32))
    assert total([2.0**-149, 2.0**-149], np.float32) == 2.0**-148


def exact_fma_float32(a, b, c):
    """The two float32 neighbours of the exact value, the nearer, the even one on a tie."""
    exact = fractions.Fraction(a) * fractions.Fraction(b) + fractions.Fraction(c)
    near = np.float32(float(exact))
    candidates = [np.nextafter(near, np.float32(-np.inf)), near,
                  np.nextafter(near, np.float32(np.inf))]
    return min(candidates, key=lambda v: (abs(fractions.Fraction(float(v)) - exact),
                                          int(v.view(np.int32)) & 1))


# Far from overflow, down to subnormal results.
finite = st.floats(width=32, min_value=-2.0**60, max_value=2.0**60)


@given(finite, finite, finite)
def test_fma_float32(a, b, c):
    assert fma(*map(np.float32, (a, b, c))) == exact_fma_float32(a, b, c)


def test_fma_has_one_rounding():
    ulp = np.float32(2.0**-23)
    one = np.float32(1)
    # (1 + u)(1 - u) - 1 = -u^2, which a rounded product loses.
    assert fma(one + ulp, one - ulp, -one) == -(ulp * ulp)
    # The product 1 + 2^-11 + 2^-24 is halfway in float32; 2^-60 decides, and float64 loses it.
    factor = np.float32(1 + 2.0**-12)
    assert fma(factor, factor, np.float32(2.0**-60)) == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert fma(factor, factor, np.float32(-2.0**-60)) == np.float32(1 + 2.0**-11)
    double = np.float64(1 + 2.0**-52)
    assert fma(double, double, np.float64(-1)) == 2.0**-51 + 2.0**-104


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fma_special_values(dtype):
    values = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.0**-149]
    for a, b, c in itertools.product(values, repeat=3):
        a, b, c = dtype(a), dtype(b), dtype(c)
        with np.errstate(invalid="ignore"):
            # Exact here in any precision, so the plain expression is right.
            plain = dtype(np.float64(a) * np.float64(b) + np.float64(c))
        np.testing.assert_array_equal(fma(a, b, c), plain)
        assert np.signbit(fma(a, b, c)) == np.signbit(plain) or np.isnan(plain)


@given(st.integers(0, 10**6))
def test_bounds_hold_the_fused_result(seed):
    case = cases.Case(num_topk=4)
    plan = oracle.prepare(case.oracle_config, cases.routing("duplicates", case, seed))
    rows = cases.floats(np.float32, (2, *case.row_dims, 3), seed)
    weights = cases.floats(np.float32, (2, *case.row_dims), seed + 1)
    lower, upper = oracle.combine_bounds(plan, rows, weights)
    y = oracle.combine(plan, rows, weights)
    assert (lower <= y).all() and (y <= upper).all()
    assert (upper - lower <= 8 * np.spacing(np.abs(rows).max() * np.abs(weights).max())).all()


@pytest.mark.parametrize("case", cases.matrix(), ids=str)
def test_slots_and_row_source_are_inverse(case):
    for kind, topk_idx in cases.routings(case):
        plan = oracle.prepare(case.oracle_config, topk_idx)
        routed = (topk_idx >= 0).sum()
        assert routed == plan.expert_counts.sum()
        assert routed == (plan.slots >= 0).sum() + plan.num_dropped.sum(), kind
        if case.layout == "rank":
            continue
        assert (plan.row_source >= 0).sum() == (plan.slots >= 0).sum()
        for src, t, k, dst, row in plan.placed_pairs():
            pair = (src * case.max_tokens_per_rank + t) * case.num_topk + k
            assert plan.row_source[(dst, *row)] == pair


def test_matrix_covers_all_pairs():
    factors = {"a": (1, 2, 3), "b": (1, 2), "c": (1, 2, 3)}
    chosen = cases.covering(factors)
    assert len(chosen) < 18
    for one, two in itertools.combinations(factors, 2):
        pairs = {(setting[one], setting[two]) for setting in chosen}
        assert pairs == set(itertools.product(factors[one], factors[two]))
