"""Exact arithmetic of the reduction tree: rounding to a row dtype, and fused multiply-add."""

from __future__ import annotations

import fractions
import math

import numpy as np


def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """float64 rows are summed in float64, all others in float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def round_to(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """To nearest even; overflow as the dtype has it (infinity, or NaN in float8_e4m3fn)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once, all operands of one dtype, float32 or float64."""
    a, b, c = np.broadcast_arrays(a, b, c)
    assert a.dtype == b.dtype == c.dtype
    if c.dtype == np.float32:
        return _fma_float32(a, b, c)
    assert c.dtype == np.float64
    return np.reshape([_fma_float64(*args) for args in zip(a.flat, b.flat, c.flat)],
                      c.shape).astype(np.float64)


def _fma_float32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The product is exact in float64; the sum is made in float64 rounded to odd.

    Rounding to odd (an inexact result takes the neighbour with an odd last bit) with 53 bits and
    then to nearest with 24 equals one rounding: an odd 53-bit value is never halfway.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        product = a.astype(np.float64) * b.astype(np.float64)
        addend = c.astype(np.float64)
        total = product + addend
        # Knuth's two-sum: total + error is the exact sum.
        other = total - product
        error = (product - (total - other)) + (addend - other)
        odd = (total.view(np.int64) & 1).astype(bool)
        move = np.isfinite(total) & (error != 0) & ~odd
        total = np.where(move, np.nextafter(total, np.copysign(np.inf, error)), total)
        return total.astype(np.float32)


def _fma_float64(a: np.float64, b: np.float64, c: np.float64) -> float:
    a, b, c = float(a), float(b), float(c)
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        with np.errstate(invalid="ignore", over="ignore"):
            # c decides only where the product is finite, so the product must not overflow here.
            product = a * b if not (math.isfinite(a) and math.isfinite(b)) else 0.0
            return float(np.float64(product) + np.float64(c))
    exact = fractions.Fraction(a) * fractions.Fraction(b) + fractions.Fraction(c)
    if exact == 0:
        # Signs of zero are as in the plain sum: -0 only where both addends are -0.
        product_zero = math.copysign(0.0, a) * math.copysign(1.0, b)
        if a == 0 or b == 0:
            return product_zero + c
        return 0.0
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return math.inf if exact > 0 else -math.inf
