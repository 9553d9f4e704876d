"""Bad input is refused at trace time, by an error that names the argument and what was wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import jax_ep
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep.testing import cases, run
from jax_ep.testing.cases import Case

CASE = Case(num_ranks=2, num_topk=3, num_tokens=5, spare_tokens=3)
GROUP = dict(num_experts=4, num_topk=3, max_tokens_per_rank=8, max_row_bytes=64)


@pytest.fixture(params=["native", "xla"])
def group(request):
    return run.make_group(2, 4, 3, 8, request.param, max_row_bytes=64)


def array(*shape, dtype=np.float32):
    """A stacked argument: one per rank."""
    return jax.ShapeDtypeStruct((2, *shape), dtype)


def trace(group, f, *args):
    return jax.eval_shape(run.per_rank(group, f), *args)


def handle_of(group, **options):
    return trace(group, lambda idx: jax_ep.prepare(group, idx, **options), IDX)


IDX = array(5, 3, dtype=np.int32)
ROWS = 2 * 5 * 3


@pytest.mark.parametrize("options, error, parts", [
    (dict(num_experts=5), ValueError, ["num_experts", "5", "2"]),
    (dict(num_experts=0), ValueError, ["num_experts", "0"]),
    (dict(num_topk=0), ValueError, ["num_topk", "0"]),
    (dict(max_tokens_per_rank=-1), ValueError, ["max_tokens_per_rank", "-1"]),
    (dict(max_tokens_per_rank=(2**31 - 128) // 6 + 1), ValueError, ["num_topk", "2147483520"]),
    (dict(max_row_bytes=-1), ValueError, ["max_row_bytes", "-1"]),
    (dict(num_experts=4.0), TypeError, ["num_experts"]),
    (dict(backend="gpu"), ValueError, ["backend", "gpu", "xla"]),
    (dict(timeout_s=0), ValueError, ["timeout_s", "0"]),
    (dict(axis_name="model"), ValueError, ["axis_name", "model", "expert"]),
    (dict(axis_name=("expert", "expert")), ValueError, ["axis_name", "expert"]),
    (dict(axis_name=()), ValueError, ["axis_name"]),
    (dict(mesh="expert"), TypeError, ["mesh"]),
])
def test_group(options, error, parts):
    mesh = run.make_mesh((2,), ("expert",))
    options = GROUP | {"mesh": mesh, "axis_name": "expert", "backend": "xla"} | options
    with pytest.raises(error) as info:
        jax_ep.Group(options.pop("mesh"), options.pop("axis_name"), **options)
    assert_names(info, parts)


def assert_names(info, parts):
    for part in parts:
        assert part in str(info.value), f"{part!r} missing in: {info.value}"


@pytest.mark.parametrize("topk_idx, options, error, parts", [
    (array(5, 3), {}, TypeError, ["topk_idx", "float32"]),
    (array(5, 3, dtype=np.bool_), {}, TypeError, ["topk_idx", "bool"]),
    (array(5, dtype=np.int32), {}, ValueError, ["topk_idx", "(5,)"]),
    (array(5, 2, dtype=np.int32), {}, ValueError, ["topk_idx", "(5, 2)", "3"]),
    (array(9, 3, dtype=np.int32), {}, ValueError, ["topk_idx", "(9, 3)", "8"]),
    (IDX, dict(layout="token"), ValueError, ["layout", "token", "expert", "rank", "padded"]),
    (IDX, dict(capacity=-1), ValueError, ["capacity", "-1"]),
    (IDX, dict(capacity=2.5), TypeError, ["capacity", "2.5"]),
    (IDX, dict(expert_alignment=0), ValueError, ["expert_alignment", "0"]),
    (IDX, dict(expert_alignment=1.5), TypeError, ["expert_alignment", "1.5"]),
])
def test_prepare(topk_idx, options, error, parts, group):
    with pytest.raises(error) as info:
        trace(group, lambda idx: jax_ep.prepare(group, idx, **options), topk_idx)
    assert_names(info, parts)


def test_prepare_wants_a_group(group):
    with pytest.raises(TypeError, match="group"):
        trace(group, lambda idx: jax_ep.prepare("expert", idx), IDX)


@pytest.mark.parametrize("x, topk_weights, error, parts", [
    (array(4, 8), None, ValueError, ["x", "(4, 8)", "5"]),
    (array(), None, ValueError, ["x", "()"]),
    ({"a": array(5, 8), "b": array(6)}, None, ValueError, ["x", "(6,)", "5"]),
    (array(5, 17), None, ValueError, ["x", "68", "64", "max_row_bytes"]),
    ([array(5, 8), array(5, 9)], None, ValueError, ["68", "64", "max_row_bytes"]),
    (array(5, 8, dtype=jnp.int4), None, TypeError, ["x", "int4"]),
    (array(5, 8), array(5, 2), ValueError, ["topk_weights", "(5, 2)", "(5, 3)"]),
    (array(5, 8), array(5), ValueError, ["topk_weights", "(5,)", "(5, 3)"]),
    (array(5, 8), array(5, 3, dtype=np.int32), TypeError, ["topk_weights", "int32"]),
])
def test_dispatch(x, topk_weights, error, parts, group):
    with pytest.raises(error) as info:
        trace(group, lambda h, x, w: jax_ep.dispatch(x, h, w), handle_of(group), x, topk_weights)
    assert_names(info, parts)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_wants_a_handle(op, group):
    with pytest.raises(TypeError, match="handle"):
        trace(group, lambda x: getattr(jax_ep, op)(x, "handle"), array(ROWS, 8))


@pytest.mark.parametrize("rows, row_weights, options, error, parts", [
    (array(ROWS - 1, 8), None, {}, ValueError, ["rows", f"({ROWS - 1}, 8)", str(ROWS)]),
    ({"a": array(ROWS, 8), "b": array()}, None, {}, ValueError, ["rows", "()", str(ROWS)]),
    (array(2, 9, 8), None, dict(layout="padded"), ValueError, ["rows", "(2, 9, 8)", "2, 10"]),
    (array(20), None, dict(layout="padded"), ValueError, ["rows", "(20,)", "2, 10"]),
    (array(ROWS, 8, dtype=np.int32), None, {}, TypeError, ["rows", "int32"]),
    (array(ROWS, 8, dtype=np.bool_), None, {}, TypeError, ["rows", "bool"]),
    (array(ROWS, 8, dtype=np.complex64), None, {}, TypeError, ["rows", "complex64"]),
    (array(ROWS, 8, dtype=jnp.float8_e4m3b11fnuz), None, {}, TypeError, ["rows", "e4m3b11fnuz"]),
    (array(ROWS, 8), array(ROWS, 1), {}, ValueError, ["row_weights", f"({ROWS}, 1)", f"({ROWS},)"]),
    (array(2, 10, 8), array(20), dict(layout="padded"), ValueError,
     ["row_weights", "(20,)", "(2, 10)"]),
    (array(ROWS, 8), array(ROWS, dtype=np.int32), {}, TypeError, ["row_weights", "int32"]),
    (array(10, 8), array(10, 3), dict(layout="rank"), ValueError, ["row_weights", "rank"]),
])
def test_combine(rows, row_weights, options, error, parts, group):
    with pytest.raises(error) as info:
        trace(group, lambda h, r, w: jax_ep.combine(r, h, w), handle_of(group, **options), rows,
              row_weights)
    assert_names(info, parts)


def test_outside_shard_map(group):
    with pytest.raises(ValueError, match="shard_map"):
        jax_ep.prepare(group, jnp.zeros((5, 3), jnp.int32))


@pytest.mark.parametrize("shape, names", [((4,), ("expert",)), ((2,), ("model",)),
                                          ((2, 2), ("expert", "data"))])
def test_another_mesh(shape, names, group):
    mesh = run.make_mesh(shape, names)
    f = jax.shard_map(lambda idx: jax_ep.prepare(group, idx[0]).slots[None], mesh=mesh,
                      in_specs=P(names[0]), out_specs=P(names[0]))
    with pytest.raises(ValueError, match="mesh"):
        jax.eval_shape(f, jax.ShapeDtypeStruct((shape[0], 5, 3), np.int32))


@pytest.mark.parametrize("factor", [-1.0, float("nan")])
def test_capacity_factor(factor, group):
    with pytest.raises(ValueError, match="factor"):
        group.capacity(factor)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize("field", ["slots", "row_source", "row_topk_idx", "recv_slots"])
def test_a_handle_of_other_sizes_is_an_error_of_native_backends(field, op):
    """As a program has that was exported where the Group had other settings."""
    layout = "rank" if field == "row_topk_idx" else "expert"
    group = run.make_group(2, 4, 3, 8, "native", max_row_bytes=64)

    def f(x, topk_idx):
        handle = jax_ep.prepare(group, topk_idx, layout=layout)
        short = dataclasses.replace(handle, **{field: getattr(handle, field)[:-1]})
        rows, _ = jax_ep.dispatch(x, short if op == "dispatch" else handle)
        return jax_ep.combine(rows, short) if op == "combine" else rows

    with pytest.raises(jax.errors.JaxRuntimeError) as info:
        jax.block_until_ready(jax.jit(run.per_rank(group, f))(
            np.ones((2, 5, 4), np.float32), cases.routing("uniform", CASE)))
    assert_names(info, [op, field, "elements", "another Group"])


BAD_CHOICES = [4, -2, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("value", BAD_CHOICES)
def test_choice_out_of_range_is_an_error_of_native_backends(value):
    if run.backend_name("native") == "cuda":
        pytest.skip("there it comes with the next call: tests/gpu/test_ranks.py")
    topk_idx = cases.routing("uniform", CASE)
    topk_idx[1, 2, 1] = value
    f = run.runner(CASE, "native").prepare
    with pytest.raises(Exception) as info:
        jax.block_until_ready(f(topk_idx))
    assert_names(info, ["prepare", "topk_idx", str(value), "rank 1", run.AXIS])


@pytest.mark.parametrize("value", BAD_CHOICES)
def test_choice_out_of_range_is_unrouted_in_the_reference(value):
    topk_idx = cases.routing("uniform", CASE)
    unrouted = topk_idx.copy()
    topk_idx[1, 2, 1], unrouted[1, 2, 1] = value, -1
    f = run.runner(CASE, "xla").prepare
    actual, expected = (run.handle_arrays(f(idx)) for idx in (topk_idx, unrouted))
    for name in ("slots", "row_source", "group_sizes", "expert_counts", "num_rows", "num_dropped"):
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
