"""Mesh axes that a value varies over, as shard_map's check_vma tracks them."""

from collections.abc import Iterable, Sequence

import jax


def axes_of(values: Iterable[jax.Array]) -> set[str]:
    """The axes that any of `values` varies over."""
    return set().union(*(jax.typeof(x).mat.varying for x in values))


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`x`, marked as varying over `axes` too."""
    missing = tuple(sorted(set(axes) - jax.typeof(x).mat.varying, key=str))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_like(x: jax.Array, *values: jax.Array) -> jax.Array:
    """`x`, marked as varying over the axes of `values` too."""
    return vary(x, axes_of(values))
