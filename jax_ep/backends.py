"""Which backend runs a Group, and the native modules behind it."""

import functools
import importlib
import types
from collections.abc import Sequence

import jax


NAMES = ("cuda", "cpu", "xla")


_OLDEST_COMPUTE_CAPABILITY = (8, 0)  # A100, as bazel/cuda.bzl compiles for


@functools.cache
def load_cpu() -> types.ModuleType:
    """The CPU backend's native module, its FFI types and targets registered with XLA.

    Call it once a CPU backend of JAX exists: registrations made earlier are replayed in an order
    that XLA refuses (targets before the types that they use).

    Raises:
      ImportError: the native module was not built.
    """
    module = importlib.import_module("jax_ep._native._cpu")
    for name, type_ in module.types().items():
        jax.ffi.register_ffi_type(name, type_, platform="cpu")
    for name, target in module.targets().items():
        jax.ffi.register_ffi_target(name, target, platform="cpu")
    return module


def has_cpu() -> bool:
    """Whether the CPU backend's native module is there."""
    return importlib.util.find_spec("jax_ep._native._cpu") is not None


@functools.cache
def load_cuda() -> types.ModuleType:
    """The CUDA backend's native module, its FFI targets registered with XLA.

    Raises:
      ImportError: the native module was not built.
    """
    module = importlib.import_module("jax_ep._native._cuda")
    for name, target in module.targets().items():
        jax.ffi.register_ffi_target(name, target, platform="CUDA")
    return module


def has_cuda() -> bool:
    """Whether the CUDA backend's native module is there, whatever it finds when it runs."""
    return importlib.util.find_spec("jax_ep._native._cuda") is not None


def choose(devices: Sequence[jax.Device], backend: str | None) -> tuple[str, str]:
    """The backend for a Group over `devices`, and the reason in words.

    Raises:
      ValueError: `backend` is unknown, or cannot run on these devices.
    """
    if backend is not None and backend not in NAMES:
        raise ValueError(f"backend must be one of {NAMES} or None, got {backend!r}")
    if backend == "xla":
        return backend, "asked for"
    platform = devices[0].platform
    native = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}.get(platform)
    obstacle = _obstacle(native, devices)
    if backend is None:
        if obstacle is None:
            return native, f"native on platform {platform!r}"
        return "xla", f"{obstacle} (platform {platform!r})"
    if backend != native:
        raise ValueError(
            f"backend={backend!r} does not run on the mesh's devices, whose platform is "
            f"{platform!r}; use backend=None, or 'xla' for the reference"
        )
    if obstacle is not None:
        raise ValueError(f"backend={backend!r} is not possible here: {obstacle}")
    return backend, "asked for"


def _obstacle(native: str | None, devices: Sequence[jax.Device]) -> str | None:
    """Why the native backend cannot run, or None."""
    if native is None:
        return "this platform has no native backend"
    return _cuda_obstacle(devices) if native == "cuda" else _cpu_obstacle(devices)


def _cuda_obstacle(devices: Sequence[jax.Device]) -> str | None:
    for device in devices:
        capability = getattr(device, "compute_capability", None)
        try:
            new_enough = tuple(map(int, capability.split("."))) >= _OLDEST_COMPUTE_CAPABILITY
        except (AttributeError, ValueError):
            return f"{device} ({device.device_kind}) is not an NVIDIA GPU"
        if not new_enough:
            oldest = ".".join(map(str, _OLDEST_COMPUTE_CAPABILITY))
            return (
                f"{device} ({device.device_kind}) has compute capability {capability}, and the "
                f"kernels need {oldest} or newer"
            )
    if not has_cuda():
        return (
            "the native module jax_ep._native._cuda is not built (run `make setup` where nvcc is)"
        )
    return None


def _cpu_obstacle(devices: Sequence[jax.Device]) -> str | None:
    num_processes = len({device.process_index for device in devices})
    if num_processes > 1:
        return (
            "the cpu backend needs all devices of the mesh in one process, and they are in "
            f"{num_processes} processes"
        )
    if not has_cpu():
        return "the native module jax_ep._native._cpu is not built (run `make setup`)"
    return None
