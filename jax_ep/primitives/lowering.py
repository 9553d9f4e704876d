"""How every primitive lowers: FFI custom calls where native, the reference elsewhere."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

# There is no public way to bind mesh axes while a primitive is being lowered, which the
# reference's collectives need.
from jax._src.core import extend_axis_env_nd

from jax_ep import overlap
from jax_ep.group import LAYOUTS
from jax_ep.handle import HandleSpec


def register(
    primitive: Primitive,
    op: str,
    reference: Callable,
    *,
    platforms: Sequence[str] = ("cpu", "cuda"),
    has_side_effect: bool = False,
) -> None:
    """Registers the lowering rules of `primitive`.

    On `platforms` it becomes the FFI custom call `jax_ep_<platform>_<op>`, unless its group asks
    for the reference; on every other platform `reference(*operands, spec=, **params)`.
    Every primitive has a param `spec`; its other params become FFI attributes as they are. A param
    `low_latency` is none: on cuda it chooses the call `low_latency_<op>`, with the same results.
    With has_side_effect XLA neither merges, moves out of loops nor drops the call.
    """

    def lower_reference(ctx, *operands, spec, low_latency=False, **params):
        del low_latency
        with extend_axis_env_nd(list(spec.group.mesh.shape.items())):
            return mlir.lower_fun(reference)(ctx, *operands, spec=spec, **params)

    def native_rule(platform: str):
        def lower(ctx, *operands, spec, low_latency=False, **params):
            if spec.group.backend == "xla":
                return lower_reference(ctx, *operands, spec=spec, **params)
            path = "low_latency_" if low_latency and platform == "cuda" else ""
            target = f"jax_ep_{platform}_{path}{op}"
            (position,) = _lower_position(ctx, spec)
            position_aval = jax.core.ShapedArray((2,), np.int32)
            # Compute does not overlap with what is in a command buffer.
            asynchronous = spec.group.overlap and platform == "cuda"
            rule = jax.ffi.ffi_lowering(
                f"{target}_uncaptured" if asynchronous else target, has_side_effect=has_side_effect
            )
            call = functools.partial(
                rule,
                ctx.replace(avals_in=[position_aval, *ctx.avals_in]),
                **_attributes(spec),
                **{name: _ATTRIBUTE_VALUES.get(value, value) for name, value in params.items()},
            )
            if asynchronous:
                return overlap.on_collective_stream(ctx, target, call, [position, *operands])
            return call(position, *operands)

        return lower

    mlir.register_lowering(primitive, lower_reference)
    for platform in platforms:
        mlir.register_lowering(primitive, native_rule(platform), platform=platform)


# How params are spelt as FFI attributes: the enums Values of xla_ffi/decode.h and Quantize of
# csrc/core/quantize.h.
_ATTRIBUTE_VALUES = {
    "none": np.int32(0),
    "weights": np.int32(1),
    "returned": np.int32(2),
    "fp8": np.int32(1),
    "fp8_e8m0": np.int32(2),
    "fp8_round_scale": np.int32(3),
}


def _attributes(spec: HandleSpec) -> dict:
    """The FFI attributes that all operations have. BindCommon of xla_ffi/decode.h reads them."""
    return {
        "group": np.int64(spec.group.id),
        "layout": np.int32(LAYOUTS.index(spec.layout)),
        "capacity": np.int64(spec.capacity),
        "expert_alignment": np.int64(spec.expert_alignment),
    }


def _lower_position(ctx, spec: HandleSpec):
    """int32[2]: which of the mesh's independent EP groups this device is in, and its rank there."""

    def position():
        axis_names = spec.group.axis_names
        others = tuple(name for name in spec.group.mesh.axis_names if name not in axis_names)
        subgroup = jax.lax.axis_index(others) if others else np.int32(0)
        return [jnp.stack([jnp.int32(subgroup), jax.lax.axis_index(axis_names)])]

    with extend_axis_env_nd(list(spec.group.mesh.shape.items())):
        return mlir.lower_fun(position)(ctx.replace(avals_in=[], avals_out=None))
