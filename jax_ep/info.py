"""What this machine offers jax_ep: `python -m jax_ep.info`."""

import importlib
import importlib.metadata
import platform
import shutil
import types

import jax

import jax_ep
from jax_ep import backends, memory


def report() -> str:
    """Versions, devices, native libraries, and the backend that a Group would use, with why."""
    lines = [f"jax_ep      {jax_ep.__version__}"]
    lines.append(f"python      {platform.python_version()} ({platform.machine()})")
    for name in ("jax", "jaxlib", "numpy", "ml_dtypes", "flax", "optax"):
        lines.append(f"{name:<11} {_version(name)}")

    lines.append("")
    for name, found in (("cpu", backends.has_cpu()), ("cuda", backends.has_cuda())):
        lines.append(f"native {name:<4} {'built' if found else 'not built'}")
    lines.append(f"nvcc        {shutil.which('nvcc') or 'not found'} (needed only to build)")

    lines += _cuda_lines()
    lines.append("")
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX_PLATFORMS asks for what is not here
        lines.append(f"devices     none: {str(error) or type(error).__name__}")
        return "\n".join(lines)
    lines.append(f"devices     {len(devices)} on platform {devices[0].platform!r}")
    for kind in dict.fromkeys(device.device_kind for device in devices):
        count = sum(device.device_kind == kind for device in devices)
        lines.append(f"            {count} x {kind}")
    lines.append(
        f"processes   {jax.process_count()}, with {len(jax.local_devices())} devices in this one"
    )
    for num_devices in dict.fromkeys((1, len(devices))):
        name, reason = backends.choose(devices[:num_devices], None)
        lines.append(f"backend     {name!r} for a Group over {num_devices} devices: {reason}")
    return "\n".join(lines)


def _cuda_lines() -> list[str]:
    """What the CUDA runtime says: versions, GPUs, and how their ranks would reach each other."""
    if not backends.has_cuda():
        return []
    native = importlib.import_module("jax_ep._native._cuda")
    machine = native.machine_info()
    driver = machine["driver_version"]
    lines = [
        "",
        f"CUDA        {_cuda_version(machine['runtime_version'])} in the module; "
        + (f"driver for up to {_cuda_version(driver)}" if driver else "no driver"),
    ]
    if machine["obstacle"] is not None:
        return [*lines, f"GPUs        none: {machine['obstacle']}"]
    gpus = machine["devices"]
    for i, gpu in enumerate(gpus):
        capability = ".".join(map(str, gpu["compute_capability"]))
        lines.append(
            f"GPU {i:<7} {gpu['name']}, {gpu['pci_bus_id']}, sm {capability}, "
            f"{gpu['num_sms']} SMs, {gpu['total_bytes'] >> 30} GiB"
        )
    unreachable = [
        f"{i} to {j}"
        for i, gpu in enumerate(gpus)
        for j, reached in enumerate(gpu["peer_access"])
        if not reached
    ]
    missing = f"but not from {', '.join(unreachable)}" if unreachable else "between all of them"
    lines.append(f"            peer access {missing}")
    return lines + _memory_lines(native, len(gpus))


def _memory_lines(native: types.ModuleType, num_gpus: int) -> list[str]:
    """How ranks on these GPUs can share memory, and how a Group over them would."""
    try:
        ranks = [memory.reach(native, gpu, subgroup=0, rank=gpu) for gpu in range(num_gpus)]
        kind, reason = memory.choose(ranks)
    except RuntimeError as error:
        return [f"memory      none for a Group over the GPUs here: {error}"]
    fabric, domain = (
        "; ".join(dict.fromkeys(texts))
        for texts in (
            (f"no: {r.fabric_obstacle}" if r.fabric_obstacle else "yes" for r in ranks),
            (r.nvlink_domain or f"none: {r.domain_obstacle}" for r in ranks),
        )
    )
    return [
        f"memory      {kind!r} for a Group over the GPUs here: {reason}",
        "            'ipc' is peer access in a process and CUDA IPC in a host, 'fabric' is fabric "
        f"handles in an NVLink domain; {memory.VARIABLE} forces one",
        f"            fabric handles: {fabric}",
        f"            NVLink domain across hosts: {domain}",
    ]


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    print(report())
