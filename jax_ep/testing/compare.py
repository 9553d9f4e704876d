"""Comparison of arrays bit by bit, with the place and the values of the first differences."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def assert_same_bits(actual: Any, expected: Any, what: str = "array") -> None:
    """Same dtype, shape and bits, NaN payloads and signs of zero included. Pytrees allowed."""
    _assert_trees(actual, expected, what, canonical_nan=False)


def assert_same_values(actual: Any, expected: Any, what: str = "array") -> None:
    """As assert_same_bits, but any NaN equals any other: arithmetic does not specify which one."""
    _assert_trees(actual, expected, what, canonical_nan=True)


def _assert_trees(actual: Any, expected: Any, what: str, canonical_nan: bool) -> None:
    actual_leaves, actual_tree = jax.tree_util.tree_flatten_with_path(actual)
    expected_leaves, expected_tree = jax.tree_util.tree_flatten_with_path(expected)
    assert actual_tree == expected_tree, f"{what}: tree {actual_tree}, expected {expected_tree}"
    for (path, a), (_, e) in zip(actual_leaves, expected_leaves):
        _assert_leaf(np.asarray(a), np.asarray(e), what + jax.tree_util.keystr(path), canonical_nan)


def _assert_leaf(actual: np.ndarray, expected: np.ndarray, what: str, canonical_nan: bool) -> None:
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    if not actual.size:
        return
    differs = (_bytes(actual) != _bytes(expected)).any(axis=-1)
    if canonical_nan:
        differs &= ~(_isnan(actual) & _isnan(expected))
    if differs.any():
        places = np.argwhere(differs)
        lines = [f"  {tuple(map(int, p))}: {actual[tuple(p)]!r}, expected {expected[tuple(p)]!r}"
                 for p in places[:5]]
        raise AssertionError(f"{what}: {len(places)} of {actual.size} elements differ\n"
                             + "\n".join(lines))


def _bytes(array: np.ndarray) -> np.ndarray:
    """The array with a last axis of its elements' bytes."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat.reshape(*array.shape, array.dtype.itemsize)


def _isnan(array: np.ndarray) -> np.ndarray:
    return array != array
