"""Lookup of devices by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tvmconv.devices import rpc
from tvmconv.devices.arch import Arch
from tvmconv.devices.cuda import device as cuda
from tvmconv.devices.device import Device, DeviceNotFoundError
from tvmconv.devices.opencl import device as opencl
from tvmconv.errors import DeviceError

_BACKENDS: dict[str, Callable[[], Sequence[Device]]] = {
    "cuda": cuda.list_cuda_devices,
    "opencl": opencl.list_opencl_devices,
}


def find_device(text: str) -> Device:
    """Return the device with a name.

    `text`: "cuda:N" or "opencl:N" (N is 0 if omitted), "rpc:KEY" for the first worker under that key, an architecture
        to compile for such as "sm_90", or "auto" for the first CUDA GPU or else the first OpenCL device. With a GPU
        driver that cannot be used, "auto" is an error.

    Example:
        >>> find_device("sm_90").limits.max_threads
        1024
    """
    if text == "auto":
        return _find_best_device()
    if match := re.fullmatch(r"(cuda|opencl)(?::([0-9]{1,9}))?", text):
        devices = _BACKENDS[match[1]]()
        if int(match[2] or 0) >= len(devices):
            available = ", ".join(device.text for device in devices)
            raise DeviceError(f"no device {text!r}: there {'is' if len(devices) == 1 else 'are'} {available}")
        return devices[int(match[2] or 0)]
    if match := re.fullmatch(r"rpc:(\S+)", text):
        return rpc.list_rpc_devices(match[1])[0]
    if re.fullmatch(r"sm_[0-9]{2,3}a?", text):
        return Arch(text)
    raise DeviceError(
        f"unknown device {text!r}: expected auto, cuda:N, opencl:N, rpc:KEY, or an architecture to compile for such as "
        "sm_90"
    )


def _find_best_device() -> Device:
    reasons: list[str] = []
    for devices in _BACKENDS.values():
        try:
            return devices()[0]
        except DeviceNotFoundError as error:
            if error.has_driver:  # do not silently replace a GPU by the CPU because software is missing
                raise
            reasons.append(str(error))
    raise DeviceError("; ".join(reasons))
