"""The operator `tvmconv::conv`: a convolution with its epilogue, as one kernel that was built before, by its name.

It is defined, not decorated, as what it costs to call decides where kernels take microseconds. It launches on the
stream that PyTorch is at, takes all memory from PyTorch, and keeps no tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tvmconv.errors import Error
from tvmconv.torch.signature import ConvSignature, parse_signature

NAMESPACE = "tvmconv"
# What it calls `workload` is the name of a kernel: the workload's text, and what tells the kernel from others.
SCHEMA = "conv(Tensor x, Tensor weight, Tensor? bias, Tensor? add, str workload) -> Tensor"

# From x, weight, bias and residual, which lie as the form says, to the output.
Launcher = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], torch.Tensor]


class _TrackedWeight:
    """A weight that tells when it ends.

    Attributes:
        refresh_callbacks: what brings it up to date.
        packed_by_launcher: what launchers have made of it, each by itself, with the version of the weight that it was
            made of.
    """

    def __init__(self) -> None:
        self.refresh_callbacks: list[Callable[[], None]] = []
        self.packed_by_launcher: dict[Launcher, tuple[int, Any]] = {}


_launchers: dict[tuple[str, torch.device], tuple[Launcher, ConvSignature]] = {}
_tracked_weights: dict[int, _TrackedWeight] = {}  # by the address of the weight
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(SCHEMA, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))


def install_kernel(name: str, device: torch.device, launcher_function: Launcher) -> None:
    """Have the operator run a kernel on a device, from now on and in the whole process.

    Args:
        name: of the kernel: the text of its workload, `KERNEL_NAME_SEPARATOR`, and what tells it from others.
        device: PyTorch's.
        launcher_function: what runs it.
    """
    _launchers[name, device] = launcher_function, parse_signature(name)


def remove_kernel(name: str, device: torch.device) -> None:
    """End that."""
    _launchers.pop((name, device), None)


def is_kernel_installed(name: str, device: torch.device) -> bool:
    """Whether the operator runs a kernel on a device."""
    return (name, device) in _launchers


def find_launcher(name: str, device: torch.device) -> Launcher:
    """What runs a kernel on a device.

    Raises:
        Error: nothing does.
    """
    return _find_installed(name, device)[0]


def _find_installed(name: str, device: torch.device) -> tuple[Launcher, ConvSignature]:
    entry = _launchers.get((name, device))
    if entry is None:
        raise Error(f"no kernel for {name} on {device} is loaded in this process: optimize or load the model here")
    return entry


def register_weight_refresh(weight: torch.Tensor, refresh: Callable[[], None]) -> None:
    """As long as there is a weight, have a function called before a kernel reads it: to bring it up to date."""
    pointer = weight.data_ptr()
    _tracked_weights.setdefault(pointer, _TrackedWeight()).refresh_callbacks.append(refresh)
    weakref.finalize(weight, _unregister_refresh, pointer, refresh)


def _unregister_refresh(pointer: int, refresh: Callable[[], None]) -> None:
    if tracked := _tracked_weights.get(pointer):
        tracked.refresh_callbacks = [callback for callback in tracked.refresh_callbacks if callback is not refresh]
        if not tracked.refresh_callbacks:
            del _tracked_weights[pointer]


def packed_weight_cache(weight: torch.Tensor) -> dict[Launcher, tuple[int, Any]] | None:
    """Where launchers keep what they make of a weight, as long as it lives; None for one of which that is not known."""
    tracked = _tracked_weights.get(weight.data_ptr())
    return None if tracked is None else tracked.packed_by_launcher


def _run_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None, workload: str
) -> torch.Tensor:
    launcher_function, signature = _find_installed(workload, x.device)
    _check_tensors(signature, x, weight, bias, add)
    if tracked := _tracked_weights.get(weight.data_ptr()):
        for refresh in tracked.refresh_callbacks:
            refresh()
    to_layout = signature.to_kernel_layout
    return launcher_function(to_layout(x), to_layout(weight), bias, add if add is None else to_layout(add))


def _check_tensors(
    signature: ConvSignature, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None
) -> None:
    """See that the tensors are those of the workload; raises Error."""
    if (
        x.shape == signature.x_shape
        and weight.shape == signature.weight_shape
        and x.dtype == weight.dtype == signature.dtype
        and x.device == weight.device
        and (bias is None) != signature.takes_bias
        and (bias is None or (bias.dtype == signature.bias_dtype and bias.device == x.device and bias.is_contiguous()))
        and (add is None) != signature.takes_add
        and (
            add is None
            or (add.shape == signature.output_shape and add.dtype == signature.dtype and add.device == x.device)
        )
    ):
        return
    tensors: Mapping[str, Any] = {"x": x, "weight": weight, "bias": bias, "add": add}
    description = ", ".join(
        f"{name} {_describe_tensor(tensor)}" for name, tensor in tensors.items() if tensor is not None
    )
    raise Error(f"{signature.workload.text} does not take {description}")


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _make_fake_output(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None, workload: str
) -> torch.Tensor:
    return parse_signature(workload).allocate_output(x.device)


_library.impl("conv", _run_conv, "CPU")
_library.impl("conv", _run_conv, "CUDA")
torch.library.register_fake(f"{NAMESPACE}::conv", _make_fake_output, lib=_library)

conv = torch.ops.tvmconv.conv.default
