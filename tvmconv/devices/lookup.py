"""Lookup of devices by name, and the list of all with remedies for missing ones; it does not import TVM."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvmconv.compiler import nvrtc
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


@dataclass(frozen=True)
class DeviceStatus:
    """An available device, or the reason why a kind of device is unavailable."""

    text: str  # name such as "cuda:0"; the kind, such as "cuda", if unavailable; "sm_NN" for the compiler
    name: str | None = None  # name that the driver or compiler reports; None if unavailable
    device: Device | None = None  # device; None if unavailable and for the compiler
    reason: str | None = None  # reason why it is unavailable; None if available
    remedy: str | None = None  # instruction that makes it available; None if available


def list_devices() -> list[DeviceStatus]:
    """Return the status of all CUDA devices, all OpenCL devices, and the compiler for other architectures."""
    statuses: list[DeviceStatus] = []
    for kind, devices in _BACKENDS.items():
        try:
            statuses += [DeviceStatus(device.text, device.name, device) for device in devices()]
        except DeviceNotFoundError as error:
            statuses.append(DeviceStatus(kind, reason=error.reason, remedy=error.remedy))
    if cause := nvrtc.explain_unavailability():
        reason, _, remedy = cause.partition("; ")
        compiler = DeviceStatus("sm_NN", reason=reason, remedy=remedy)
    else:
        name = f"NVRTC {nvrtc.get_version()}, to compile for any architecture that it knows"
        compiler = DeviceStatus("sm_NN", name=name)
    return [*statuses, compiler]


def find_device(text: str) -> Device:
    """Return the device with a name.

    `text`: "cuda:N" or "opencl:N" (N is 0 if omitted), "rpc:KEY" for the first worker under that key, an architecture
        to compile for such as "sm_90", or "auto" for the first CUDA GPU or else the first OpenCL device. With a GPU
        driver that cannot be used, "auto" is an error.

    Examples:
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
