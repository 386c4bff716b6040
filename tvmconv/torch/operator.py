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
from tvmconv.torch.form import Form, form_of

NAMESPACE = "tvmconv"
# What it calls `workload` is the name of a kernel: the workload's text, and what tells the kernel from others.
SCHEMA = "conv(Tensor x, Tensor weight, Tensor? bias, Tensor? add, str workload) -> Tensor"

# From x, weight, bias and residual, which lie as the form says, to the output.
Launcher = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], torch.Tensor]


class _Watched:
    """A weight that tells when it ends.

    Attributes:
        refresh: what brings it up to date.
        kept: what launchers have made of it, each by itself, with the version of the weight that it was made of.
    """

    def __init__(self) -> None:
        self.refresh: list[Callable[[], None]] = []
        self.kept: dict[Launcher, tuple[int, Any]] = {}


_launchers: dict[tuple[str, torch.device], tuple[Launcher, Form]] = {}
_watched: dict[int, _Watched] = {}  # by the address of the weight
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(SCHEMA, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))


def install(name: str, device: torch.device, launch: Launcher) -> None:
    """Have the operator run a kernel on a device, from now on and in the whole process.

    Args:
        name: of the kernel: the text of its workload, `MARK`, and what tells it from others.
        device: PyTorch's.
        launch: what runs it.
    """
    _launchers[name, device] = launch, form_of(name)


def remove(name: str, device: torch.device) -> None:
    """End that."""
    _launchers.pop((name, device), None)


def installed(name: str, device: torch.device) -> bool:
    """Whether the operator runs a kernel on a device."""
    return (name, device) in _launchers


def launcher(name: str, device: torch.device) -> Launcher:
    """What runs a kernel on a device.

    Raises:
        Error: nothing does.
    """
    return _installed(name, device)[0]


def _installed(name: str, device: torch.device) -> tuple[Launcher, Form]:
    found = _launchers.get((name, device))
    if found is None:
        raise Error(f"no kernel for {name} on {device} is loaded in this process: optimize or load the model here")
    return found


def watch(weight: torch.Tensor, refresh: Callable[[], None]) -> None:
    """As long as there is a weight, have a function called before a kernel reads it: to bring it up to date."""
    pointer = weight.data_ptr()
    _watched.setdefault(pointer, _Watched()).refresh.append(refresh)
    weakref.finalize(weight, _forget, pointer, refresh)


def _forget(pointer: int, refresh: Callable[[], None]) -> None:
    if watched := _watched.get(pointer):
        watched.refresh = [each for each in watched.refresh if each is not refresh]
        if not watched.refresh:
            del _watched[pointer]


def kept(weight: torch.Tensor) -> dict[Launcher, tuple[int, Any]] | None:
    """Where launchers keep what they make of a weight, as long as it lives; None for one of which that is not known."""
    watched = _watched.get(weight.data_ptr())
    return None if watched is None else watched.kept


def _conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None, workload: str
) -> torch.Tensor:
    launch, form = _installed(workload, x.device)
    _check(form, x, weight, bias, add)
    if watched := _watched.get(weight.data_ptr()):
        for refresh in watched.refresh:
            refresh()
    laid = form.laid
    return launch(laid(x), laid(weight), bias, add if add is None else laid(add))


def _check(
    form: Form, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None
) -> None:
    """See that the tensors are those of the workload; raises Error."""
    if (
        x.shape == form.x_shape
        and weight.shape == form.weight_shape
        and x.dtype == weight.dtype == form.dtype
        and x.device == weight.device
        and (bias is None) != form.takes_bias
        and (bias is None or (bias.dtype == form.bias_dtype and bias.device == x.device and bias.is_contiguous()))
        and (add is None) != form.takes_add
        and (add is None or (add.shape == form.output_shape and add.dtype == form.dtype and add.device == x.device))
    ):
        return
    named: Mapping[str, Any] = {"x": x, "weight": weight, "bias": bias, "add": add}
    given = ", ".join(f"{name} {_told(tensor)}" for name, tensor in named.items() if tensor is not None)
    raise Error(f"{form.workload.text} does not take {given}")


def _told(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None, workload: str
) -> torch.Tensor:
    return form_of(workload).output(x.device)


_library.impl("conv", _conv, "CPU")
_library.impl("conv", _conv, "CUDA")
torch.library.register_fake(f"{NAMESPACE}::conv", _fake, lib=_library)

conv = torch.ops.tvmconv.conv.default
