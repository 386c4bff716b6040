"""The operator `tvmconv::conv`: a convolution with its epilogue, computed by an installed kernel of a given name.

It launches on PyTorch's current stream, allocates all memory from PyTorch, and keeps no tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from tvmconv.errors import Error
from tvmconv.torch.operator_library import define_operator
from tvmconv.torch.signature import ConvSignature, parse_signature

# Function from x, weight, bias and residual, in the signature's layouts, to the output. Launchers of kernels with the
# operation `prelu` take its slopes as a fifth argument.
Launcher = Callable[..., torch.Tensor]


class _TrackedWeight:
    """The callbacks that update a weight whose lifetime is tracked, and packed copies with the weight's version."""

    def __init__(self) -> None:
        self.refresh_callbacks: list[Callable[[], None]] = []
        self.packed_by_launcher: dict[Launcher, tuple[int, Any]] = {}


_launchers: dict[tuple[str, torch.device], tuple[Launcher, ConvSignature]] = {}
_tracked_weights: dict[int, _TrackedWeight] = {}  # by address of the weight


def install_kernel(name: str, device: torch.device, launcher_function: Launcher) -> None:
    """Install a kernel, which the operator runs on PyTorch's device from now on in the whole process.

    Its name is the text of its workload, `KERNEL_NAME_SEPARATOR` and a digest.
    """
    _launchers[name, device] = launcher_function, parse_signature(name)


def remove_kernel(name: str, device: torch.device) -> None:
    """Remove an installed kernel."""
    _launchers.pop((name, device), None)


def is_kernel_installed(name: str, device: torch.device) -> bool:
    """Return whether a kernel is installed on a device."""
    return (name, device) in _launchers


def find_launcher(name: str, device: torch.device) -> Launcher:
    """Return the launcher of an installed kernel; raise Error if there is none."""
    return find_kernel(name, device)[0]


def find_kernel(name: str, device: torch.device) -> tuple[Launcher, ConvSignature]:
    """Return the launcher and the signature of an installed kernel; raise Error if there is none."""
    entry = _launchers.get((name, device))
    if entry is None:
        raise Error(f"no kernel for {name} on {device} is loaded in this process: optimize or load the model here")
    return entry


def register_weight_refresh(weight: torch.Tensor, refresh: Callable[[], None]) -> None:
    """Call a function before any kernel reads a weight, for the lifetime of the weight."""
    pointer = weight.data_ptr()
    _tracked_weights.setdefault(pointer, _TrackedWeight()).refresh_callbacks.append(refresh)
    weakref.finalize(weight, _unregister_refresh, pointer, refresh)


def _unregister_refresh(pointer: int, refresh: Callable[[], None]) -> None:
    if tracked := _tracked_weights.get(pointer):
        tracked.refresh_callbacks = [callback for callback in tracked.refresh_callbacks if callback is not refresh]
        if not tracked.refresh_callbacks:
            del _tracked_weights[pointer]


def refresh_weight(weight: torch.Tensor) -> None:
    """Call the functions that update a weight, before a kernel reads it."""
    if tracked := _tracked_weights.get(weight.data_ptr()):
        for refresh in tracked.refresh_callbacks:
            refresh()


def packed_weight_cache(weight: torch.Tensor) -> dict[Launcher, tuple[int, Any]] | None:
    """Return the dictionary of a weight's packed copies by launcher; None for a weight that is not tracked."""
    tracked = _tracked_weights.get(weight.data_ptr())
    return None if tracked is None else tracked.packed_by_launcher


def _run_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    workload: str,
    slope: torch.Tensor | None = None,
) -> torch.Tensor:
    launcher_function, signature = find_kernel(workload, x.device)
    check_tensors(signature, x, weight, bias, add)
    if signature.quantization_ops:
        raise Error(f"{signature.workload.text}: expected the operator tvmconv::quantized_conv for its epilogue")
    if (slope is None) == signature.takes_slope or (slope is not None and not _is_per_channel(slope, signature, x)):
        description = "no slope" if slope is None else f"a slope {tuple(slope.shape)} of {slope.dtype}"
        raise Error(f"{signature.workload.text} does not take {description}: expected the arguments of its epilogue")
    refresh_weight(weight)
    residual = None if add is None else signature.to_output_layout(add)
    arguments = (signature.to_input_layout(x), signature.to_input_layout(weight), bias, residual)
    return launcher_function(*arguments) if slope is None else launcher_function(*arguments, slope)


def _is_per_channel(tensor: torch.Tensor, signature: ConvSignature, x: torch.Tensor) -> bool:
    """Return whether a tensor has one number per output channel, as kernels read it."""
    is_dense = tensor.is_contiguous() and tensor.device == x.device
    return tensor.shape == (signature.workload.O,) and tensor.dtype == signature.bias_dtype and is_dense


def check_tensors(
    signature: ConvSignature, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None
) -> None:
    """Raise Error if tensors have other shapes, dtypes or devices than a kernel's signature."""
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
            or (add.shape == signature.output_shape and add.dtype == signature.output_dtype and add.device == x.device)
        )
    ):
        return
    description = ", ".join(
        f"{name} {tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
        for name, tensor in (("x", x), ("weight", weight), ("bias", bias), ("add", add))
        if tensor is not None
    )
    raise Error(f"{signature.workload.text} does not take {description}: expected the workload's shapes and dtypes")


def _make_fake_output(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    workload: str,
    slope: torch.Tensor | None = None,
) -> torch.Tensor:
    return parse_signature(workload).allocate_output(x.device)


# The argument `workload` is the name of a kernel: the workload's text and a digest.
conv = define_operator(
    "conv(Tensor x, Tensor weight, Tensor? bias, Tensor? add, str workload, Tensor? slope=None) -> Tensor",
    cpu=_run_conv,
    fake=_make_fake_output,
)
