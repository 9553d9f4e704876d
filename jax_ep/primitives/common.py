"""Abstract values, batching and derivatives that the primitives share."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec

from jax_ep import varying
from jax_ep.group import Group
from jax_ep.handle import Handle, HandleSpec

# The handle's arrays that are operands of dispatch and combine, in this order, before the payload.
NUM_ROUTING = 5


def routing_operands(handle: Handle) -> tuple[jax.Array, ...]:
    """topk_idx, slots, row_source, row_topk_idx (in layout rank, else nothing), recv_slots."""
    row_topk_idx = handle.row_topk_idx
    if row_topk_idx is None:
        # Read by nobody. A constant of equal elements would be a kernel of its own for XLA.
        row_topk_idx = np.arange(1, handle.spec.group.num_topk + 1, dtype=np.int32)[None]
    return handle.topk_idx, handle.slots, handle.row_source, row_topk_idx, handle.recv_slots


def no_row_topk_idx(spec: HandleSpec) -> tuple[int, int]:
    """The shape that stands for no row_topk_idx. Not empty: as an argument of a compiled program an
    empty array crashes jax 0.11.2 in several GPU processes."""
    return (1, spec.group.num_topk)


def vary(spec: HandleSpec, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Marks all operands as varying over the group's axes and over any axis that one varies over.

    A token that is the same on several ranks is dispatched by each of them, so that its cotangent
    is a sum over them; the cast is what makes JAX take that sum.
    """
    operands = [jnp.asarray(x) for x in operands]
    axes = varying.axes_of(operands) | set(spec.group.axis_names)
    return [varying.vary(x, axes) for x in operands]


def check_handle(handle: Handle) -> None:
    """Raises TypeError for what is not a handle."""
    if not isinstance(handle, Handle):
        raise TypeError(f"handle must be a jax_ep.Handle, of prepare, got {handle!r}")


def row_bytes(shape: Sequence[int], dtype) -> int:
    """Bytes of one row, which has this shape and dtype."""
    return math.prod(shape) * dtype.itemsize


def check_row_bytes(name: str, total: int, group: Group) -> None:
    """Raises ValueError where a row of all leaves together is larger than the group allows."""
    if total > group.max_row_bytes:
        raise ValueError(
            f"a row of {name} has {total} bytes (all leaves together), more than the group's "
            f"max_row_bytes={group.max_row_bytes}"
        )


def check_whole_bytes(name: str, leaf: jax.Array) -> None:
    """Raises TypeError for dtypes that are packed below a byte, or that have no bytes to move."""
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"{name} has a leaf of dtype {dtype}; pass its raw data instead")
    packed = jnp.issubdtype(dtype, jnp.number) and jax.dtypes.itemsize_bits(dtype) < 8
    if packed:
        raise TypeError(f"{name} has a leaf of dtype {dtype}; bitcast it to uint8 first")


def result_aval(like, shape: Sequence[int], dtype) -> jax.core.ShapedArray:
    """An abstract value of `shape` and `dtype` that varies over the same mesh axes as `like`."""
    sharding = like.sharding.update(spec=PartitionSpec(*(None,) * len(shape)))
    return like.update(shape=tuple(shape), dtype=np.dtype(dtype), weak_type=False, sharding=sharding)


def register_batching(primitive: Primitive) -> None:
    """vmap runs the operation once per batch element, in order."""

    def batch(operands, dims, **params):
        batched = [
            jnp.moveaxis(x, dim, 0)
            for x, dim in zip(operands, dims)
            if dim is not None
        ]

        def one(elements):
            elements = iter(elements)
            full = [
                x if dim is None else next(elements)
                for x, dim in zip(operands, dims)
            ]
            return primitive.bind(*full, **params)

        results = jax.lax.map(one, batched)
        return results, [0] * len(results)

    batching.primitive_batchers[primitive] = batch


def zero_tangent(primal) -> ad.Zero:
    """The symbolic zero tangent of `primal`."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def is_zero(x) -> bool:
    """Whether a tangent or cotangent is a symbolic zero."""
    return type(x) in (ad.Zero, SymbolicZero)


def pick_nonzero(values: Sequence) -> tuple[list[int], list]:
    """Indices and values of those that are not symbolic zeros."""
    kept = [i for i, x in enumerate(values) if not is_zero(x)]
    return kept, [values[i] for i in kept]
