"""The whole MoE layer for a given expert function, and the usual expert function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.group import Group
from jax_ep.handle import Handle
from jax_ep.primitives.combine import combine
from jax_ep.primitives.dispatch import dispatch
from jax_ep.primitives.prepare import prepare
from jax_ep.quantized import dequantize_tree

ExpertFn = Callable[[Any, jax.Array], jax.Array]


def moe(
    group: Group,
    x: Any,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    expert_fn: ExpertFn,
    *,
    capacity: int | None = None,
    expert_alignment: int = 1,
    layout: str = "expert",
    quantize: str | None = None,
) -> tuple[jax.Array, Handle]:
    """Sends tokens to their experts, applies `expert_fn` there and sums the weighted results.

    Called inside `shard_map` over the group's mesh; all shapes are per device.

    Args:
      group: the `Group` whose axis the experts are spread over.
      x: [T, H], or a pytree of [T, ...] such as fp8 rows with their scales.
      topk_idx: int [T, K], the experts of each token; -1 is "not routed".
      topk_weights: float [T, K].
      expert_fn: called once as `expert_fn(rows, group_sizes)` with this device's rows, in the tree
        of x, and the int32 [E_local] rows per local expert. Layout "expert": rows are
        [capacity, H], expert-major, and the result is [capacity, H']. Layout "padded":
        [E_local, C, H] and [E_local, C, H']. Rows without a token are zero on the way in, and what
        the function returns for them is ignored.
      capacity, expert_alignment, layout: as in `prepare`.
      quantize: as in `dispatch`: "fp8", "fp8_e8m0" or "fp8_round_scale" casts x on the way to the
        experts. The expert function gets rows of x's dtype again (`Quantized.dequantize`), and gradients pass the cast
        unchanged. The way back, by combine, is not cast.

    Returns:
      (y [T, H'] in the dtype of the expert function's result, the handle with the counters).

    Raises:
      TypeError, ValueError: from prepare, dispatch and combine; layout "rank"; an expert function
        whose result does not have the rows' leading dimensions.
    """
    if layout not in ("expert", "padded"):
        # In layout "rank" one row serves several experts, so the weights cannot ride on combine.
        raise ValueError(f'moe takes layout "expert" or "padded", got {layout!r}')
    handle = prepare(
        group, topk_idx, layout=layout, capacity=capacity, expert_alignment=expert_alignment)
    rows, row_weights = dispatch(x, handle, topk_weights, quantize=quantize)
    out = expert_fn(dequantize_tree(rows), handle.group_sizes)
    leading = handle.row_source.shape
    if out.shape[:len(leading)] != leading:
        raise ValueError(f"expert_fn must return one result per row, a shape that begins with "
                         f"{leading}, but returned {out.shape}")
    return combine(out, handle, row_weights), handle


def swiglu(
    rows: jax.Array, group_sizes: jax.Array, w_gate_up: jax.Array, w_down: jax.Array
) -> jax.Array:
    """The SwiGLU expert: (silu(rows @ gate) * (rows @ up)) @ down with each row's own expert.

    Products accumulate in float32 and are rounded to the dtype of `rows` after each GEMM.

    Args:
      rows: [capacity, H] sorted by expert (grouped GEMMs by `jax.lax.ragged_dot`), or
        [E_local, C, H] (batched GEMMs).
      group_sizes: int32 [E_local], rows per expert; rows past their sum come out zero. Without
        effect on 3-D rows.
      w_gate_up: [E_local, H, 2 * F], the gate's columns before those of the up projection.
      w_down: [E_local, F, H'].

    Returns:
      rows' leading dimensions + [H'], in the dtype of `rows`.

    Raises:
      ValueError: shapes that do not fit together.
    """
    _check_weights(rows, group_sizes, w_gate_up, w_down)
    w_gate_up, w_down = w_gate_up.astype(rows.dtype), w_down.astype(rows.dtype)
    gate, up = jnp.split(_grouped_dot(rows, w_gate_up, group_sizes), 2, axis=-1)
    hidden = (jax.nn.silu(gate) * up).astype(rows.dtype)
    return _grouped_dot(hidden, w_down, group_sizes).astype(rows.dtype)


def _grouped_dot(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    accumulate = jnp.promote_types(rows.dtype, jnp.float32)
    if rows.ndim == 3:
        return jnp.einsum("ech,ehf->ecf", rows, weights, preferred_element_type=accumulate)
    return jax.lax.ragged_dot(rows, weights, group_sizes, preferred_element_type=accumulate)


def _check_weights(rows, group_sizes, w_gate_up, w_down):
    if rows.ndim not in (2, 3):
        raise ValueError(f"rows must be [capacity, H] or [E_local, C, H], got {rows.shape}")
    num_experts, hidden = group_sizes.shape[0], rows.shape[-1]
    if rows.ndim == 3 and rows.shape[0] != num_experts:
        raise ValueError(f"rows of shape {rows.shape} must have one block for each of the "
                         f"{num_experts} experts in group_sizes")
    if (w_gate_up.ndim != 3 or w_gate_up.shape[:2] != (num_experts, hidden)
            or w_gate_up.shape[2] % 2):
        raise ValueError(f"w_gate_up must have shape [{num_experts}, {hidden}, 2 * F] for "
                         f"{num_experts} local experts and rows {rows.shape}, got "
                         f"{w_gate_up.shape}")
    if w_down.ndim != 3 or w_down.shape[:2] != (num_experts, w_gate_up.shape[2] // 2):
        raise ValueError(f"w_down must have shape [{num_experts}, {w_gate_up.shape[2] // 2}, H'] "
                         f"to follow w_gate_up {w_gate_up.shape}, got {w_down.shape}")
