"""What can run or be compiled for here, and what cannot, with the remedy. Needs no TVM."""

from __future__ import annotations

from dataclasses import dataclass

from tvmconv.devices.cuda import device as cuda
from tvmconv.devices.device import Device, DeviceNotFoundError
from tvmconv.devices.opencl import device as opencl


@dataclass(frozen=True)
class DeviceStatus:
    """A device that is there, or a kind of device that is not.

    Attributes:
        text: how to name it: "cuda:0"; for what is not there its kind, "cuda"; "sm_NN" for compiling only.
        name: the driver's name, or the compiler's; None for what is not there.
        device: the device; None for what is not there and for compiling only.
        reason: why it is not there; None for what is.
        remedy: what to do about it; None for what is.
    """

    text: str
    name: str | None = None
    device: Device | None = None
    reason: str | None = None
    remedy: str | None = None


def list_devices() -> list[DeviceStatus]:
    """All devices: those of CUDA, those of OpenCL, then the compiler for architectures without a device."""
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
