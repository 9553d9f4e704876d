"""Work of another stream, as a neighbour on the GPU has it, by the CUDA driver."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence

_BYTES = 64 << 20
_AT_ONCE = 8  # in the stream's queue
_NON_BLOCKING = 1


@contextlib.contextmanager
def on(devices: Sequence[int]) -> Iterator[None]:
    """While it is entered, every one of the CUDA devices fills and copies memory all the time."""
    end = threading.Event()
    errors = []

    def run(device):
        try:
            _keep_busy(device, end)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(device,)) for device in devices]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def _keep_busy(ordinal: int, end: threading.Event) -> None:
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name, *args):
        status = getattr(driver, name)(*args)
        if status:
            raise RuntimeError(f"{name} gave {status}")

    device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    memory = ctypes.c_uint64(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), ordinal)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    for block in memory:
        call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(_BYTES))
    while not end.is_set():
        for i in range(_AT_ONCE):
            call("cuMemsetD32Async", memory[0], ctypes.c_uint(i), ctypes.c_size_t(_BYTES // 4),
                 stream)
            call("cuMemcpyDtoDAsync_v2", memory[1], memory[0], ctypes.c_size_t(_BYTES), stream)
        call("cuStreamSynchronize", stream)
    for block in memory:
        call("cuMemFree_v2", block)
    call("cuStreamDestroy_v2", stream)
    call("cuDevicePrimaryCtxRelease_v2", device)
