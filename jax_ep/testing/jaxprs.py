"""Looking into jaxprs: which primitives there are, at any depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a (closed) jaxpr and of the jaxprs in their parameters."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from equations(value)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def count_ops(f: Callable, *args: Any) -> dict[str, int]:
    """How often prepare, dispatch and combine occur in the jaxpr of f."""
    names = [e.primitive.name for e in equations(jax.make_jaxpr(f)(*args))]
    return {op: sum(op in name for name in names) for op in ("prepare", "dispatch", "combine")}
