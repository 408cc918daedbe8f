"""Say which GPU of the machine a process means by a number, so that ranks can compare."""

from __future__ import annotations

import ctypes
import os

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def of(number: int) -> str:
    """Return what two processes of a host have in common if they see the same GPU.

    The UUID, as CUDA's driver gives it; a launcher that confines each process to its own GPUs may
    call all of them 0. Without the driver, the number and the variable that says which are visible.

    Args:
        number: of the GPU among those that this process sees, >= 0.

    **Ranks:** local. **Cost:** none on the GPU: no context is made.
    """
    if uuid := _uuid(number):
        return f"the GPU {uuid}"
    seen = next((f"{name}={os.environ[name]}" for name in VISIBLE if name in os.environ), "")
    return f"the GPU {number}" + f" of {seen}" * bool(seen)


def _uuid(number: int) -> str:
    """Return the UUID in hexadecimal digits; empty if there is no driver of CUDA."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        # The second form names the slice of a GPU that MIG has divided
        get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        failed = (
            cuda.cuInit(0)
            or cuda.cuDeviceGet(ctypes.byref(device), number)
            or get_uuid(ctypes.byref(uuid), device)
        )
    except (OSError, AttributeError):
        return ""
    return "" if failed else bytes(uuid).hex()
