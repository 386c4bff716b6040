"""Targets of TVM by name, as a `tvm.target.Target`, and with tvmconv's device for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv import devices
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, get_first_line

if TYPE_CHECKING:
    from tvm.target import Target

DEFAULT_ARCH = "sm_50"  # TVM's where a target names none and there is no GPU
TVM_TARGET = re.compile(r"llvm\b|\{|\w+/")  # texts that TVM reads: a kind, JSON, or the name of a chip


@dataclass(frozen=True)
class CompileTarget:
    """A target of TVM, and tvmconv's device for it; the device is None for a CPU."""

    target: Target
    device: Device | None


def resolve_target(target: str | Mapping[str, Any] | Target) -> CompileTarget:
    """Return the target and the device of a text such as "sm_90", "cuda:0", "opencl:0", "llvm" or
    "nvidia/nvidia-h100", or of a target or its attributes.

    Raises:
        DeviceError: There is no such device or architecture, or the kind of the target is not cuda, opencl or llvm.
    """
    from tvm.target import Target

    if isinstance(target, str) and not TVM_TARGET.match(target):
        device = devices.find_device(target)
        return CompileTarget(device.make_target(), device)
    if not isinstance(target, (str, Mapping, Target)):
        raise DeviceError(f"target {target!r}: expected a text such as sm_90, or a tvm.target.Target")
    try:
        resolved = target if isinstance(target, Target) else Target(target)
    except (TypeError, ValueError) as error:
        raise DeviceError(f"target {target!r}: {get_first_line(error)}") from error
    match resolved.kind.name:
        case "llvm":
            return CompileTarget(resolved, None)
        case "opencl":
            return CompileTarget(resolved, devices.find_device("opencl:0"))
        case "cuda":
            return CompileTarget(resolved, _find_cuda_device(str(resolved.attrs["arch"])))
    raise DeviceError(f"target {resolved.kind.name}: expected cuda, opencl or llvm")


def _find_cuda_device(arch: str) -> Device:
    """Return the first GPU of an architecture, or the architecture itself where there is none."""
    gpus = [status.device for status in devices.list_devices() if status.device and status.device.kind == "cuda"]
    if arch == DEFAULT_ARCH and not gpus:
        example = 'tvm.target.Target({"kind": "cuda", "arch": "sm_90"})'
        raise DeviceError(f"the target cuda names no architecture, and TVM finds no GPU: expected one, as in {example}")
    return next((gpu for gpu in gpus if str(gpu.arch).rstrip("a") == arch.rstrip("a")), devices.Arch(arch))
