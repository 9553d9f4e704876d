"""dispatch(..., quantize=): fp8 values and scales bit for bit, derivatives that pass the cast."""

import functools
import math

import jax
import jax.numpy as jnp
import jax_ep
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits
from jax_ep.testing.jaxprs import count_ops

KINDS = oracle.QUANTIZE
DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def activations(dtype, shape, seed=0):
    """Blocks of all magnitudes that the dtype has, and some with special values."""
    rng = np.random.default_rng([seed, 3])
    *lead, num_columns = shape
    info = ml_dtypes.finfo(dtype)
    exponents = rng.integers(info.minexp - info.nmant, info.maxexp, (*lead, -(-num_columns // 128)))
    scales = np.repeat(np.exp2(exponents.astype(np.float64)), 128, axis=-1)[..., :num_columns]
    with np.errstate(over="ignore"):
        x = (rng.uniform(-1, 1, shape) * scales).astype(dtype)
    special = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, info.max, info.smallest_subnormal]
    for value in special:
        x[tuple(rng.integers(0, size) for size in shape)] = value
        x[tuple(rng.integers(0, size) for size in lead)] = value
    return x


@functools.cache
def program(case, backend, quantize):
    group = run.group_of(case, backend)
    return run.jit(run.per_rank(
        group,
        lambda handle, x, weights=None: jax_ep.dispatch(x, handle, weights, quantize=quantize)))


def expected_rows(plan, x, quantize):
    """The oracle's rows of a dict of leaves."""
    rows = {}
    for name, leaf in x.items():
        if leaf.dtype not in DTYPES:
            rows[name] = oracle.dispatch(plan, leaf)
            continue
        values, scales = (oracle.dispatch(plan, part) for part in oracle.quantize(leaf, quantize))
        rows[name] = jax_ep.Quantized(values, scales, np.zeros(values.shape, leaf.dtype))
    return rows


def check(case, backend, quantize, topk_idx, x, weights=None):
    plan = oracle.prepare(case.oracle_config, topk_idx)
    handle = run.runner(case, backend).prepare(topk_idx)
    rows, row_weights = program(case, backend, quantize)(handle, x, weights)
    assert_same_bits(rows, expected_rows(plan, x, quantize), f"{case} {quantize} rows")
    if weights is None:
        assert row_weights is None
    else:
        assert_same_bits(row_weights, oracle.dispatch_weights(plan, weights))


# Short, whole and odd blocks.
COLUMNS = (1, 127, 128, 130, 264, 320)


def payload(case, columns, seed):
    """Every dtype that is cast, and leaves that are not."""
    lead = (case.num_ranks, case.num_tokens)
    leaves = {f"{dtype.name}_{count}": activations(dtype, (*lead, count), seed)
              for dtype in DTYPES for count in columns}
    return leaves | {
        "lines": activations(np.float32, (*lead, 2, 3, 129), seed),
        "ids": np.arange(math.prod(lead), dtype=np.int32).reshape(lead),
        "bytes": cases.any_bits(np.uint8, (*lead, 7), seed),
        "fp8": cases.any_bits(E4M3, (*lead, 5), seed),
    }


def check_payload(case, backend, quantize, columns):
    for seed, kind in enumerate(("uniform", "unrouted", "empty_rank")):
        topk_idx = cases.routing(kind, case, seed)
        weights = cases.floats(ml_dtypes.bfloat16, topk_idx.shape, seed)
        check(case, backend, quantize, topk_idx, payload(case, columns, seed), weights)


QUICK = [Case(num_ranks=2, num_topk=3, expert_alignment=8).with_capacity("tight"),
         Case(num_ranks=3, layout="rank").with_capacity("tight"),
         Case(num_ranks=2, layout="padded")]


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_rows(case, quantize, backend):
    check_payload(case, backend, quantize, COLUMNS)


MATRIX = [Case(**{"num_ranks": s["num_ranks"], "layout": s["layout"]}).with_capacity(s["capacity"])
          for s in cases.covering({"num_ranks": (1, 2, 3, 8), "layout": oracle.LAYOUTS,
                                   "capacity": cases.CAPACITIES})]


@pytest.mark.slow
@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_rows_in_the_matrix(case, quantize, backend):
    check_payload(case, backend, quantize, (130,))


def cast(x, backend, quantize):
    """Values and scales of x [T, H], cast on the way to the one rank that there is."""
    x = np.asarray(x)
    case = Case(num_ranks=1, experts_per_rank=1, num_topk=1, num_tokens=len(x), spare_tokens=0)
    handle = run.runner(case, backend).prepare(np.zeros((1, len(x), 1), np.int32))
    rows, _ = program(case, backend, quantize)(handle, x[None])
    return np.asarray(rows.values[0]), np.asarray(rows.scales[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantize", KINDS)
def test_all_numbers_of_half_precision(dtype, quantize, both_backends):
    """Every bit pattern (of float32: its upper half), in blocks of neighbours and of strangers."""
    patterns = np.arange(2**16, dtype=np.uint16).reshape(-1, 128)
    x = np.concatenate([patterns, patterns.T.reshape(-1, 128)])
    if dtype == np.float32:
        x = x.astype(np.uint32) << 16 | 0x7fff
    x = x.view(dtype)
    assert_same_bits(cast(x, both_backends, quantize), oracle.quantize(x, quantize))


@pytest.mark.parametrize("quantize", KINDS)
def test_rounding_at_every_tie_of_e4m3(quantize, both_backends):
    """With 448 in the block the scale is 1 and the cast is that of ml_dtypes, ties to even."""
    numbers = np.arange(0x7f, dtype=np.uint8).view(E4M3).astype(np.float32)
    ties = (numbers[1:] + numbers[:-1]) / 2
    points = np.concatenate([numbers, ties, np.nextafter(ties, np.float32(0)),
                             np.nextafter(ties, np.float32(np.inf))])
    points = np.concatenate([points, -points])
    x = np.concatenate([points, np.zeros(-len(points) % 127, np.float32)]).reshape(-1, 127)
    x = np.concatenate([x, np.full((len(x), 1), 448, np.float32)], axis=1)
    values, scales = cast(x, both_backends, quantize)
    assert_same_bits(values, x.astype(E4M3))
    np.testing.assert_array_equal(scales.astype(np.float32), 1)


def bits(scales):
    return scales.view({4: np.uint32, 1: np.uint8}[scales.dtype.itemsize])[:, 0]


@pytest.mark.parametrize("quantize, nan", [
    ("fp8", 0x7fc00000), ("fp8_e8m0", 0xff), ("fp8_round_scale", 0x7fc00000)])
def test_nan_or_infinity_makes_its_block_nan(quantize, nan, both_backends):
    x = np.ones((4, 130), np.float32)
    x[:, 5] = np.nan, -np.nan, np.inf, -np.inf
    values, scales = cast(x, both_backends, quantize)
    assert (values.view(np.uint8)[:, :128] == 0x7f).all()
    assert (bits(scales[:, :1]) == nan).all()
    # The block beside it is not touched.
    assert_same_bits((values[:, 128:], scales[:, 1:]), oracle.quantize(x[:, 128:], quantize))
    assert np.isfinite(scales[:, 1].astype(np.float32)).all()


@pytest.mark.parametrize("quantize", KINDS)
def test_least_scale(quantize, both_backends):
    """That of 2^-107: zeros and smaller numbers have it, and subnormals are zeros of their sign."""
    tiny = np.finfo(np.float32).smallest_subnormal
    largest_subnormal = np.nextafter(np.float32(2**-126), np.float32(0))
    x = np.zeros((5, 3), np.float32)
    x[1:, 0] = -0.0, tiny, -largest_subnormal, 2**-108
    values, scales = cast(x, both_backends, quantize)
    np.testing.assert_array_equal(values.view(np.uint8)[:4, 0], [0, 0x80, 0, 0x80])
    assert not values.view(np.uint8)[:, 1:].any()
    if quantize == "fp8":
        np.testing.assert_array_equal(scales, np.float32(2**-107) * np.float32(1 / 448))
    else:
        np.testing.assert_array_equal(scales.astype(np.float32), np.float32(2**-115))


@pytest.mark.parametrize("quantize", ["fp8_e8m0", "fp8_round_scale"])
def test_scale_is_the_least_power_of_two_that_fits(quantize, both_backends):
    above = np.nextafter(np.float32(448), np.float32(np.inf))
    largest = np.finfo(np.float32).max
    x = np.array([[448], [above], [224], [-448 * 2.0**100], [1], [largest]], np.float32)
    values, scales = cast(x, both_backends, quantize)
    np.testing.assert_array_equal(scales[:, 0].astype(np.float32),
                                  np.exp2(np.float32([0, 1, -1, 100, -8, 120])))
    np.testing.assert_array_equal(values[:, 0].astype(np.float32), [448, 224, 448, -448, 256, 256])


def test_rounded_scales_are_those_of_e8m0(both_backends):
    """In another dtype, and with the same values."""
    x = activations(np.float32, (9, 300))
    (values, scales), (e8m0_values, e8m0_scales) = (
        cast(x, both_backends, kind) for kind in ("fp8_round_scale", "fp8_e8m0"))
    assert scales.dtype == np.float32
    assert_same_bits(values, e8m0_values)
    np.testing.assert_array_equal(scales, e8m0_scales.astype(np.float32))


@pytest.mark.parametrize("num_columns, words", [(512, 1), (1, 1), (513, 2), (7168, 14), (0, 0)])
def test_packed_scales(num_columns, words):
    """Four to an int32, the first in the lowest byte, zeros at the end."""
    x = (np.random.default_rng(0).normal(size=(3, num_columns)) * 3).astype(np.float32)
    values, scales = oracle.quantize(x, "fp8_e8m0")
    packed = jax.jit(jax_ep.Quantized.packed_scales)(jax_ep.Quantized(values, scales, x))
    padded = np.zeros((3, 4 * words), np.uint8)
    padded[:, :scales.shape[1]] = scales.view(np.uint8)
    assert packed.dtype == np.int32
    np.testing.assert_array_equal(packed, padded.reshape(3, words, 4) @ (1 << np.arange(0, 32, 8)))


def test_packed_scales_are_e8m0():
    x = np.ones((3, 128), np.float32)
    with pytest.raises(TypeError, match="fp8_e8m0.*float32"):
        jax_ep.Quantized(*oracle.quantize(x, "fp8_round_scale"), x).packed_scales()


def test_columns_of_a_model(backend):
    """H = 2880 of gpt-oss: 22 blocks and a half."""
    x = activations(ml_dtypes.bfloat16, (6, 2880))
    values, scales = cast(x, backend, "fp8")
    assert scales.shape == (6, 23)
    assert_same_bits((values, scales), oracle.quantize(x, "fp8"))


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("num_tokens, shape", [(0, (130,)), (5, (0,)), (5, (2, 0)), (5, (0, 130))])
def test_nothing_to_cast(num_tokens, shape, quantize, both_backends):
    case = Case(num_tokens=num_tokens)
    x = {"x": np.zeros((2, num_tokens, *shape), np.float32)}
    check(case, both_backends, quantize, cases.routing("uniform", case), x)


def test_float64_travels_as_it_is(backend):
    case = Case()
    with jax.enable_x64(True):
        x = {"a": activations(np.float32, (2, 5, 9)), "b": cases.floats(np.float64, (2, 5, 4))}
        check(case, backend, "fp8", cases.routing("uniform", case), x)


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize(dtype, quantize):
    x = (np.random.default_rng(0).normal(size=(8, 300)) * 3).astype(dtype)
    values, scales = oracle.quantize(x, quantize)
    rows = jax_ep.Quantized(values, scales, np.zeros(x.shape, dtype))
    product = values.astype(np.float32) * np.repeat(scales.astype(np.float32), 128, 1)[:, :300]
    assert_same_bits(rows.dequantize(), product.astype(dtype))
    assert_same_bits(rows.dequantize(jnp.float32), product)
    # Three bits of mantissa, in a block whose largest number is near 448.
    np.testing.assert_allclose(product, x.astype(np.float32), rtol=2**-4, atol=1e-3)


# Derivatives.

HIDDEN = 130
CASE = Case(num_ranks=2, num_topk=3).with_capacity("tight")


def layer_inputs(dtype=np.float32, case=CASE, seed=0):
    topk_idx = cases.routing("unrouted", case, seed)
    x = cases.floats(dtype, (case.num_ranks, case.num_tokens, HIDDEN), seed)
    return topk_idx, x, cases.floats(np.float32, topk_idx.shape, seed + 1)


def on_ranks(backend, f, case=CASE):
    """f(handle, *args) per rank, of stacked topk_idx and args."""
    group = run.group_of(case, backend)
    return run.per_rank(
        group, lambda topk_idx, *args: f(run.prepare(group, case, topk_idx), *args))


def linear_layer(quantize):
    """Linear in x, and the rows leave by a number, so that their cotangent is theirs alone."""
    def f(handle, x, weights, cotangent):
        rows, row_weights = jax_ep.dispatch(x, handle, weights, quantize=quantize)
        rows = rows if quantize is None else rows.dequantize()
        return jnp.vdot(rows, cotangent) + jnp.sin(row_weights).sum()

    return f


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantize", KINDS)
def test_gradient_of_a_linear_loss_is_the_unquantised_one(quantize, dtype, backend):
    topk_idx, x, weights = layer_inputs(dtype)
    cotangent = cases.floats(dtype, (2, *CASE.row_dims, HIDDEN), 5)

    def gradients(quantize):
        f = on_ranks(backend, linear_layer(quantize))
        return jax.jit(jax.grad(lambda *args: f(topk_idx, *args, cotangent).sum(), (0, 1)))(
            x, weights)

    x_bar, weights_bar = gradients(quantize)
    plan = oracle.prepare(CASE.oracle_config, topk_idx)
    assert_same_bits(x_bar, oracle.combine(plan, cotangent))
    assert np.abs(weights_bar).max() > 0
    assert_same_bits((x_bar, weights_bar), gradients(None))


def test_gradient_is_taken_where_the_cast_rows_are(backend):
    """That of sin(dequantised) is cos(dequantised), and not cos of the tokens."""
    topk_idx, x, weights = layer_inputs()

    def f(handle, x):
        rows, _ = jax_ep.dispatch(x, handle, quantize="fp8")
        return jnp.sin(rows.dequantize()).sum()

    grad = jax.jit(jax.grad(lambda x: on_ranks(backend, f)(topk_idx, x).sum()))(x)
    values, scales = oracle.quantize(x, "fp8")
    cast_x = values.astype(np.float32) * np.repeat(scales, 128, axis=-1)[..., :HIDDEN]
    plan = oracle.prepare(CASE.oracle_config, topk_idx)
    expected = oracle.combine(plan, oracle.dispatch(plan, np.cos(cast_x)))
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)


def test_one_dispatch_and_one_combine_as_without_a_cast(backend):
    topk_idx, x, weights = layer_inputs()
    cotangent = np.ones((2, *CASE.row_dims, HIDDEN), np.float32)

    def ops(quantize):
        f = on_ranks(backend, linear_layer(quantize))
        return count_ops(jax.grad(lambda x, w: f(topk_idx, x, w, cotangent).sum(), (0, 1)),
                         x, weights)

    assert ops("fp8")["combine"] == ops(None)["combine"] == 1


def test_jvp(backend):
    topk_idx, x, weights = layer_inputs()
    x = {"x": x, "ids": topk_idx, "halves": x[..., :3].astype(np.float16)}
    tangent = {"x": cases.floats(np.float32, x["x"].shape, 9),
               "ids": np.zeros(topk_idx.shape, jax.dtypes.float0),
               "halves": cases.floats(np.float16, x["halves"].shape, 10)}
    weights_tangent = cases.floats(np.float32, weights.shape, 11)

    f = on_ranks(backend, lambda handle, x, w: jax_ep.dispatch(x, handle, w, quantize="fp8"))
    args, tangents = (topk_idx, x, weights), (
        np.zeros(topk_idx.shape, jax.dtypes.float0), tangent, weights_tangent)
    primals, (rows, row_weights) = jax.jvp(jax.jit(f), args, tangents)
    plan = oracle.prepare(CASE.oracle_config, topk_idx)
    assert_same_bits(primals[0], expected_rows(plan, x, "fp8"))
    for name in ("x", "halves"):
        assert_same_bits(rows[name].straight_through, oracle.dispatch(plan, tangent[name]))
        assert not np.asarray(rows[name].values, np.float32).any()
        assert not np.asarray(rows[name].scales).any()
    assert_same_bits(row_weights, oracle.dispatch_weights(plan, weights_tangent))


def test_derivative_of_leaves_that_are_not_cast(backend):
    with jax.enable_x64(True):
        topk_idx, x, _ = layer_inputs()
        wide = cases.floats(np.float64, (2, CASE.num_tokens, 3))
        cotangent = cases.floats(np.float64, (2, *CASE.row_dims, 3), 5)

        def f(handle, x, wide, cotangent):
            rows, _ = jax_ep.dispatch((x, wide), handle, quantize="fp8_e8m0")
            return jnp.vdot(rows[1], cotangent)

        grads = jax.jit(jax.grad(
            lambda *args: on_ranks(backend, f)(topk_idx, *args, cotangent).sum(), (0, 1)))(x, wide)
        plan = oracle.prepare(CASE.oracle_config, topk_idx)
        assert_same_bits(grads, (np.zeros_like(x), oracle.combine(plan, cotangent)))


def test_custom_vjp_of_an_fp8_gemm(backend):
    """The row gradient leaves as the cotangent of straight_through."""
    topk_idx, x, _ = layer_inputs(ml_dtypes.bfloat16)
    w = cases.floats(np.float32, (HIDDEN, 4))

    def gemm(values, scales, straight_through, w):
        del straight_through
        scales = jnp.repeat(scales.astype(jnp.float32), 128, axis=-1)[..., :HIDDEN]
        return (values.astype(jnp.float32) * scales) @ w

    fp8_gemm = jax.custom_vjp(gemm)

    def backward(saved, out_bar):
        values, scales, w = saved
        return (jnp.zeros_like(values), jnp.zeros_like(scales),
                (out_bar @ w.T).astype(jnp.bfloat16), jnp.zeros_like(w))

    fp8_gemm.defvjp(lambda v, s, t, w: (gemm(v, s, t, w), (v, s, w)), backward)

    def loss(gemm, handle, x):
        rows, _ = jax_ep.dispatch(x, handle, quantize="fp8")
        return gemm(rows).sum()

    def gradient(gemm):
        f = on_ranks(backend, functools.partial(loss, gemm))
        return jax.jit(jax.grad(lambda x: f(topk_idx, x).astype(jnp.float32).sum()))(x)

    custom = gradient(lambda r: fp8_gemm(r.values, r.scales, r.straight_through, w))
    plan = oracle.prepare(CASE.oracle_config, topk_idx)
    rows_bar = (np.ones((2, *CASE.row_dims, 4), np.float32) @ w.T).astype(ml_dtypes.bfloat16)
    np.testing.assert_allclose(custom.astype(np.float32),
                               oracle.combine(plan, rows_bar).astype(np.float32), rtol=2e-2)
    plain = gradient(lambda r: r.dequantize().astype(jnp.float32) @ w)
    np.testing.assert_allclose(custom.astype(np.float32), plain.astype(np.float32), rtol=2e-2)


# Transformations.


def layer(quantize):
    def f(handle, x, weights):
        rows, row_weights = jax_ep.dispatch(x, handle, weights, quantize=quantize)
        return jax_ep.combine(jnp.tanh(rows.dequantize()), handle, row_weights)

    return f


@pytest.mark.parametrize("quantize", KINDS)
def test_vmap(quantize, backend):
    topk_idx, _, weights = layer_inputs()
    batch = np.stack([layer_inputs(seed=seed)[1] for seed in range(3)], axis=1)

    def gradient(handle, x, weights):
        return jax.grad(lambda x: layer(quantize)(handle, x, weights).sum())(x)

    def batched(handle, batch, weights):
        return jax.vmap(gradient, (None, 0, None))(handle, batch, weights)

    one = jax.jit(on_ranks(backend, gradient))
    many = np.asarray(jax.jit(on_ranks(backend, batched))(topk_idx, batch, weights))
    for i in range(3):
        np.testing.assert_allclose(many[:, i], one(topk_idx, batch[:, i], weights), rtol=1e-5,
                                   atol=1e-6)


@pytest.mark.parametrize("quantize", KINDS)
def test_scan_and_checkpoint(quantize, backend):
    """Layers in a scan, and the values of every one out of it, with and without remat."""
    topk_idx, x, weights = layer_inputs()

    def loss(remat, handle, x, weights):
        def body(x, _):
            rows, row_weights = jax_ep.dispatch(x, handle, weights, quantize=quantize)
            y = jax_ep.combine(jnp.tanh(rows.dequantize()), handle, row_weights)
            return y, rows

        body = jax.checkpoint(body, prevent_cse=False) if remat else body
        y, rows = jax.lax.scan(body, x, length=3)
        return y.sum() + rows.dequantize().sum()

    def unrolled(handle, x, weights):
        total = 0
        for _ in range(3):
            rows, row_weights = jax_ep.dispatch(x, handle, weights, quantize=quantize)
            total += rows.dequantize().sum()
            x = jax_ep.combine(jnp.tanh(rows.dequantize()), handle, row_weights)
        return x.sum() + total

    def gradients(loss):
        return jax.jit(on_ranks(backend, jax.grad(loss, (1, 2))))(topk_idx, x, weights)

    expected = gradients(unrolled)
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in expected)
    for remat in (False, True):
        for a, e in zip(gradients(functools.partial(loss, remat)), expected):
            np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)


def test_checkpoint_dispatches_again(backend):
    topk_idx, x, weights = layer_inputs()
    f = on_ranks(backend, lambda *args: jax.checkpoint(layer("fp8"))(*args).sum())
    ops = count_ops(jax.grad(lambda x: f(topk_idx, x, weights).sum()), x)
    # Forward, once more for the backward pass, and combine's transpose.
    assert (ops["dispatch"], ops["combine"]) == (3, 2)


def test_shared_tokens(backend):
    """Tokens alike on all ranks: outputs vary over the axis, the gradient is the sum over ranks."""
    group = run.group_of(CASE, backend)
    topk_idx, x, _ = layer_inputs()
    x = x[0]

    def f(x, topk_idx):
        handle = run.prepare(group, CASE, topk_idx[0])
        rows, _ = jax_ep.dispatch(x, handle, quantize="fp8")
        return jax.tree.map(lambda a: a[None], rows)

    def shard_map(f, out_specs):
        return jax.shard_map(f, mesh=group.mesh, in_specs=(P(), P(run.AXIS)), out_specs=out_specs)

    for name in ("values", "scales", "straight_through"):
        with pytest.raises(ValueError, match="out_specs"):
            jax.eval_shape(shard_map(lambda *args: getattr(f(*args), name), P()), x, topk_idx)

    def loss(x, topk_idx):
        return jax.lax.psum(f(x, topk_idx).dequantize().sum(), run.AXIS)

    grad = jax.jit(jax.grad(shard_map(loss, P())))(x, topk_idx)
    placed = (oracle.prepare(CASE.oracle_config, topk_idx).slots >= 0).sum((0, 2))
    np.testing.assert_array_equal(grad, np.tile(placed[:, None], HIDDEN))


# Layers.


@pytest.mark.parametrize("quantize", KINDS)
def test_moe(quantize, backend):
    """Expert functions get rows in x's dtype; values and gradients are near those without a cast."""
    topk_idx, x, weights = layer_inputs(ml_dtypes.bfloat16)
    group = run.group_of(CASE, backend)

    def gradients(quantize):
        def expert_fn(rows, group_sizes):
            assert rows.dtype == jnp.bfloat16
            return rows.astype(jnp.float32) ** 2

        def loss(topk_idx, x, weights):
            y, _ = jax_ep.moe(group, x, topk_idx, weights, expert_fn, capacity=CASE.capacity,
                              quantize=quantize)
            return y.sum()

        f = run.per_rank(group, loss)
        return jax.jit(jax.value_and_grad(lambda *args: f(topk_idx, *args).sum(), (0, 1)))(
            x, weights)

    (loss, actual), (plain_loss, expected) = gradients(quantize), gradients(None)
    assert loss != plain_loss
    for a, e in zip(actual, expected):
        a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
        assert np.linalg.norm(a - e) < 0.05 * np.linalg.norm(e)


@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_flax_layer(module):
    """The layer's input is cast, and its experts' and its own inputs' gradients are there."""
    pytest.importorskip("flax")
    from flax import nnx

    import jax_ep.flax

    group = run.group_of(CASE, "native")
    x = cases.floats(np.float32, (2 * CASE.num_tokens, HIDDEN))

    def results(quantize):
        config = jax_ep.flax.MoEConfig(group, HIDDEN, 8, quantize=quantize)
        if module == "nnx":
            graph, params = nnx.split(jax_ep.flax.nnx.MoE(config, rngs=nnx.Rngs(0)))
            apply = lambda params, x: nnx.merge(graph, params)(x)[0]
        else:
            moe = jax_ep.flax.linen.MoE(config)
            params = moe.init(jax.random.key(0), x)
            apply = lambda params, x: moe.apply(params, x)[0]
        y, vjp = jax.vjp(jax.jit(apply), params, x)
        return [y, *jax.tree.leaves(vjp(jnp.ones_like(y)))]

    for a, e in zip(results("fp8"), results(None), strict=True):
        error = np.linalg.norm(a - e) / np.linalg.norm(e)
        assert 0 < error < 0.1


def test_attribute_of_the_cuda_call():
    """The enum Quantize of csrc/core/quantize.h."""
    topk_idx, x, weights = layer_inputs()
    for number, quantize in enumerate((None, *KINDS)):
        f = on_ranks("native", lambda handle, x: jax_ep.dispatch(x, handle, quantize=quantize)[0])
        text = jax.jit(f).trace(topk_idx, x).lower(lowering_platforms=("cuda",)).as_text()
        assert f"quantize = {number} : i32" in text


# Errors.


def trace(x, backend="native", max_row_bytes=8192, **options):
    group = run.make_group(2, 4, 3, 8, backend, max_row_bytes=max_row_bytes)

    def f(topk_idx, x):
        return jax_ep.dispatch(x, jax_ep.prepare(group, topk_idx), **options)[0]

    topk_idx = jax.ShapeDtypeStruct((2, 5, 3), np.int32)
    return jax.eval_shape(run.per_rank(group, f), topk_idx, x)


def array(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct((2, *shape), dtype)


@pytest.mark.parametrize("x, quantize, parts", [
    (array(5, 8), "int8", ["quantize", "int8", "fp8_e8m0", "fp8_round_scale"]),
    (array(5, 8), True, ["quantize", "True"]),
    (array(5, 8), "none", ["quantize", "none"]),
    ([array(5, 8), array(5, dtype=np.float16)], "fp8", ["float16", "(5,)", "H"]),
    (array(5, 8, dtype=np.int32), "fp8", ["fp8", "int32", "bfloat16"]),
    ((array(5, 8, dtype=E4M3), array(5, 1, dtype=np.uint8)), "fp8", ["float8_e4m3fn", "uint8"]),
    ([], "fp8", ["leaf"]),
])
def test_errors(x, quantize, parts, both_backends):
    with pytest.raises(ValueError) as info:
        trace(x, both_backends, quantize=quantize)
    for part in parts:
        assert part in str(info.value), f"{part!r} missing in: {info.value}"


def test_row_bytes_are_those_that_travel():
    x = [array(5, 128), array(5, 129, dtype=ml_dtypes.bfloat16), array(5, dtype=np.int32)]
    for quantize, scale_bytes in (("fp8", 4), ("fp8_e8m0", 1), ("fp8_round_scale", 4)):
        row_bytes = 128 + scale_bytes + 129 + 2 * scale_bytes + 4
        trace(x, max_row_bytes=row_bytes, quantize=quantize)
        with pytest.raises(ValueError, match=f"{row_bytes} bytes .* max_row_bytes={row_bytes - 1}"):
            trace(x, max_row_bytes=row_bytes - 1, quantize=quantize)


def test_derivative_needs_room_for_rows_that_are_not_cast():
    group = run.make_group(2, 4, 3, 8, "native", max_row_bytes=200)

    def f(topk_idx, x):
        rows, _ = jax_ep.dispatch(x, jax_ep.prepare(group, topk_idx), quantize="fp8")
        return rows.dequantize().sum()

    topk_idx, x = jax.ShapeDtypeStruct((2, 5, 3), np.int32), array(5, 128)
    jax.eval_shape(run.per_rank(group, f), topk_idx, x)
    with pytest.raises(ValueError, match="derivative of x has 512 bytes"):
        jax.eval_shape(run.per_rank(group, jax.grad(f, 1)), topk_idx, x)
