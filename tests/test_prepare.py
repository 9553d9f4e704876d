"""prepare: the row of every pair, bit for bit as the oracle has it."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jax_ep.testing import cases, oracle
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits
from jax_ep.testing.run import handle_arrays, runner


def check(case, backend, topk_idx, what=""):
    handle = runner(case, backend).prepare(topk_idx)
    expected = oracle.prepare(case.oracle_config, np.asarray(topk_idx))
    assert_same_bits(handle_arrays(handle), expected.fields(), f"{case} {what} handle")
    return handle


def check_all_routings(case, backend):
    for kind, topk_idx in cases.routings(case):
        check(case, backend, topk_idx, kind)


@pytest.mark.parametrize("case", cases.quick_matrix(), ids=str)
def test_handle(case, both_backends):
    check_all_routings(case, both_backends)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.matrix() + cases.odd_sizes(), ids=str)
def test_handle_in_the_matrix(case, backend):
    check_all_routings(case, backend)


def test_static_fields(backend):
    case = Case(layout="padded", num_topk=3, capacity=4, expert_alignment=8)
    handle = check(case, backend, cases.routing("uniform", case))
    assert handle.group is runner(case, backend).group
    assert (handle.layout, handle.capacity, handle.expert_alignment) == ("padded", 4, 8)


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_default_capacity_is_the_worst_case(layout, backend):
    case = Case(layout=layout, num_topk=3, expert_alignment=8)
    handle = check(case, backend, cases.routing("uniform", case))
    group = runner(case, backend).group
    worst = group.worst_case_capacity(
        case.num_tokens, layout=layout, expert_alignment=case.expert_alignment)
    assert handle.capacity == worst == handle.row_source.shape[-1]
    assert not np.asarray(handle.num_dropped).any()


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_any_integer_dtype(dtype, backend):
    case = Case()
    check(case, backend, cases.routing("unrouted", case).astype(dtype))


def test_same_result_every_time(backend):
    case = Case(num_ranks=4, experts_per_rank=2, num_topk=3).with_capacity("tight")
    topk_idx = cases.routing("uniform", case)
    handles = [runner(case, backend).prepare(topk_idx) for _ in range(30)]  # all in flight
    for handle in handles[1:]:
        assert_same_bits(handle_arrays(handle), handle_arrays(handles[0]))


PROPERTY_CASES = [
    Case(num_ranks=4, experts_per_rank=2, num_topk=3, expert_alignment=8).with_capacity("tight"),
    Case(num_ranks=2, layout="rank", num_topk=3).with_capacity("tight"),
    Case(num_ranks=2, layout="padded").with_capacity("tight"),
]


@pytest.mark.parametrize("case", PROPERTY_CASES, ids=str)
def test_any_routing(case, backend):
    shape = (case.num_ranks, case.num_tokens, case.num_topk)

    @hypothesis.given(hnp.arrays(np.int32, shape,
                                 elements=st.integers(-1, case.num_experts - 1)))
    def run(topk_idx):
        check(case, backend, topk_idx)

    run()


@pytest.mark.slow
def test_any_shape(backend):
    """Few examples: each compiles a program."""

    @hypothesis.settings(max_examples=8)
    @hypothesis.given(
        st.sampled_from(cases.RANKS), st.integers(1, 4), st.integers(1, 6), st.integers(0, 9),
        st.sampled_from(oracle.LAYOUTS), st.one_of(st.none(), st.integers(0, 40)),
        st.integers(1, 130), st.sampled_from(cases.ROUTINGS))
    def run(num_ranks, experts, topk, tokens, layout, capacity, alignment, kind):
        case = Case(num_ranks=num_ranks, experts_per_rank=experts, num_topk=topk,
                    num_tokens=tokens, layout=layout, capacity=capacity,
                    expert_alignment=alignment, spare_tokens=1)
        check(case, backend, cases.routing(kind, case))

    run()
