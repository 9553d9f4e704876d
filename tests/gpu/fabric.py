"""What the processes of test_fabric.py run beside tests."""

import jax

from jax_ep import backends


def probe():
    """Prints why memory of this process's GPUs cannot be exported by a fabric handle, if so."""
    native = backends.load_cuda()
    for device in jax.local_devices():
        obstacle = native.reach(device.local_hardware_id)["fabric_obstacle"]
        print("FABRIC:", obstacle or "works", flush=True)
