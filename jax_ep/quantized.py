"""What `dispatch(..., quantize=)` makes of a leaf: fp8 values, their scales, and the way back."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Columns that share a scale: kBlockColumns in csrc/core/quantize.h.
BLOCK = 128
# The dtypes that are cast; leaves of others travel as they are.
CAST_DTYPES = tuple(np.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32))
SCALE_DTYPES = {
    "fp8": np.dtype(jnp.float32),
    "fp8_e8m0": np.dtype(jnp.float8_e8m0fnu),
    "fp8_round_scale": np.dtype(jnp.float32),
}
_PACKED = 4  # e8m0 scales in an int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Dispatched rows in float8_e4m3fn, with a scale for every 128 columns. A pytree.

    Values and scales carry no gradient. That of the rows goes through `straight_through`, which is
    zero and has the derivative that the unquantised rows would have: whoever computes with the
    values adds it (`dequantize` does), or, in a `jax.custom_vjp` of (values, scales,
    straight_through), returns the gradient of the rows as the cotangent of `straight_through`.

    Attributes:
      values: float8_e4m3fn [capacity, ..., H], or [E_local, C, ..., H] in layout "padded".
      scales: [capacity, ..., ceil(H / 128)], float32, or float8_e8m0fnu with "fp8_e8m0". The rows
        are about `values * scales`; the last block of columns may be short.
      straight_through: zeros of the shape of `values` in the dtype of the tokens.
    """

    values: jax.Array
    scales: jax.Array
    straight_through: jax.Array

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """values * scales, computed in float32, with the derivative of the unquantised rows.

        Args:
          dtype: of the result; None is that of the tokens.
        """
        values, scales = lax.stop_gradient((self.values, self.scales))
        dtype = self.straight_through.dtype if dtype is None else dtype
        scales = jnp.repeat(scales.astype(jnp.float32), BLOCK, axis=-1)[..., : values.shape[-1]]
        rows = values.astype(jnp.float32) * scales
        return rows.astype(dtype) + self.straight_through.astype(dtype)

    def packed_scales(self) -> jax.Array:
        """The scales of quantize="fp8_e8m0", four in an int32: what DeepEP packs UE8M0 scales to.

        Returns:
          int32 [capacity, ..., ceil(blocks / 4)], or [E_local, C, ...]: the first block of 128
          columns in the lowest byte; the last int32 filled up with zero bytes.

        Raises:
          TypeError: the scales are float32.
        """
        if self.scales.dtype != jnp.float8_e8m0fnu:
            raise TypeError(
                f'packed_scales is for quantize="fp8_e8m0", and the scales are {self.scales.dtype}'
            )
        scales = lax.bitcast_convert_type(lax.stop_gradient(self.scales), jnp.uint8)
        *lead, blocks = scales.shape
        words = -(-blocks // _PACKED)
        scales = jnp.pad(scales, [(0, 0)] * len(lead) + [(0, words * _PACKED - blocks)])
        return lax.bitcast_convert_type(scales.reshape(*lead, words, _PACKED), jnp.int32)


def dequantize_tree(rows: Any) -> Any:
    """The pytree `rows` with every `Quantized` in it dequantised to the dtype of its tokens."""

    def is_quantized(leaf):
        return isinstance(leaf, Quantized)

    return jax.tree.map(
        lambda leaf: leaf.dequantize() if is_quantized(leaf) else leaf, rows, is_leaf=is_quantized)


def check(quantize: str, leaves: Sequence[jax.Array]) -> None:
    """Raises ValueError for an unknown cast, and for leaves [T, ...] that it is not for."""
    if quantize not in SCALE_DTYPES:
        raise ValueError(
            f"quantize must be None or one of {tuple(SCALE_DTYPES)}, got {quantize!r}")
    cast = [leaf for leaf in leaves if is_cast(leaf, quantize)]
    if not cast:
        names = ", ".join(dtype.name for dtype in CAST_DTYPES)
        raise ValueError(f"quantize={quantize!r} needs a leaf of x of dtype {names}, got "
                         f"{[leaf.dtype.name for leaf in leaves]}")
    for leaf in cast:
        if leaf.ndim < 2:
            raise ValueError(f"quantize={quantize!r} casts leaves [T, ..., H] of x, got "
                             f"{leaf.dtype} of shape {leaf.shape}")


def is_cast(leaf: Any, quantize: str) -> bool:
    """Whether a leaf of the payload is cast; `quantize` is "none" or a key of SCALE_DTYPES."""
    return quantize != "none" and leaf.dtype in CAST_DTYPES


def row_parts(leaf: Any, quantize: str) -> list[tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype, per row, of the one or two arrays that travel for a leaf [T, ...]."""
    shape = leaf.shape[1:]
    if not is_cast(leaf, quantize):
        return [(shape, leaf.dtype)]
    *lines, columns = shape
    scales = (*lines, -(-columns // BLOCK))
    return [(shape, np.dtype(jnp.float8_e4m3fn)), (scales, SCALE_DTYPES[quantize])]
