"""List of available and unavailable devices with remedies; it does not import TVM."""

from __future__ import annotations

from dataclasses import dataclass

from tvmconv.devices.cuda import device as cuda
from tvmconv.devices.device import Device, DeviceNotFoundError
from tvmconv.devices.opencl import device as opencl


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
    for kind, devices in (("cuda", cuda.list_cuda_devices), ("opencl", opencl.list_opencl_devices)):
        try:
            statuses += [DeviceStatus(device.text, device.name, device) for device in devices()]
        except DeviceNotFoundError as error:
            statuses.append(DeviceStatus(kind, reason=error.reason, remedy=error.remedy))
    return [*statuses, _describe_compiler()]


def _describe_compiler() -> DeviceStatus:
    from tvmconv.compiler import nvrtc

    if cause := nvrtc.explain_unavailability():
        reason, _, remedy = cause.partition("; ")
        return DeviceStatus("sm_NN", reason=reason, remedy=remedy)
    return DeviceStatus("sm_NN", name=f"NVRTC {nvrtc.get_version()}, to compile for any architecture that it knows")
