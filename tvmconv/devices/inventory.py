"""What can run or be compiled for here, and what cannot, with the remedy. Needs no TVM."""

from __future__ import annotations

from dataclasses import dataclass

from tvmconv.devices.base import AbsentError, Device
from tvmconv.devices.cuda import device as cuda
from tvmconv.devices.opencl import device as opencl


@dataclass(frozen=True)
class Entry:
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


def inventory() -> list[Entry]:
    """All devices: those of CUDA, those of OpenCL, then the compiler for architectures without a device."""
    entries: list[Entry] = []
    for kind, devices in (("cuda", cuda.devices), ("opencl", opencl.devices)):
        try:
            entries += [Entry(device.text, device.name, device) for device in devices()]
        except AbsentError as absent:
            entries.append(Entry(kind, reason=absent.reason, remedy=absent.remedy))
    return [*entries, _compiler()]


def _compiler() -> Entry:
    from tvmconv.compiler import nvrtc

    if cause := nvrtc.unavailable():
        reason, _, remedy = cause.partition("; ")
        return Entry("sm_NN", reason=reason, remedy=remedy)
    return Entry("sm_NN", name=f"NVRTC {nvrtc.version()}, to compile for any architecture that it knows")
