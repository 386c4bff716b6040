"""The device of a model in PyTorch, and the same device in tvmconv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmconv import devices
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, ModelError


def find_common_device(model: torch.nn.Module, arguments: Sequence[Any]) -> torch.device:
    """Return the one device of all tensors; raise ModelError if there are several or none."""
    tensors = [*model.parameters(), *model.buffers(), *(arg for arg in arguments if isinstance(arg, torch.Tensor))]
    torch_devices = {tensor.device for tensor in tensors}
    if len(torch_devices) != 1:
        names = ", ".join(sorted(map(str, torch_devices))) or "no device"
        raise ModelError(f"the model and its example are on {names}: expected one")
    (torch_device,) = torch_devices
    if torch_device.type not in ("cpu", "cuda"):
        raise ModelError(f"the model is on {torch_device}: expected a GPU or the CPU")
    return torch_device


def find_device_for(torch_device: torch.device, device_text: str | None) -> Device:
    """Return tvmconv's device of a text, by default the same GPU as PyTorch's, or the first OpenCL device for the CPU.

    Raises DeviceError if it does not exist, or is another one than PyTorch's.
    """
    own_text = f"cuda:{torch_device.index}" if torch_device.type == "cuda" else "opencl:0"
    found_device = devices.find_device(device_text or own_text)
    is_same = found_device.text == own_text if torch_device.type == "cuda" else found_device.kind == "opencl"
    if not is_same:
        raise DeviceError(f"the model is on {torch_device}, whose kernels do not run on {found_device.text}")
    return found_device
