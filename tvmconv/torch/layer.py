"""A convolution of a model with the operations that follow it, run by a tvmconv kernel if there is one, else by
PyTorch.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tvmconv.torch.operator import conv as operator
from tvmconv.torch.operator import register_weight_refresh
from tvmconv.torch.rounding import compensate_truncation
from tvmconv.torch.signature import ACTIVATIONS, compute_strides, lay_out, parse_signature

CONVOLUTIONS = {torch.nn.Conv1d: 1, torch.nn.Conv2d: 2, torch.nn.Conv3d: 3}
NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)

TensorStamp = tuple[weakref.ref[torch.Tensor], int, int]  # a tensor, its address, and its version counter
InputKey = tuple[tuple[int, ...], torch.dtype, torch.device, bool]


def make_input_key(x: torch.Tensor) -> InputKey:
    """Return the properties of an input, and of PyTorch's settings, that select a kernel.

    They are the shape, the dtype in which PyTorch computes the convolution (its own or autocast's), the device, and
    whether PyTorch may round float32 operands to TF32.
    """
    dtype, device_type = x.dtype, x.device.type
    if dtype.is_floating_point and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    uses_tf32 = device_type == "cuda" and dtype is torch.float32 and is_tf32_allowed()
    return tuple(x.shape), dtype, x.device, uses_tf32


def is_tf32_allowed() -> bool:
    """Return whether float32 convolutions may round their operands to TF32."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # since PyTorch 2.9, if the setting was made by its newer name
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")


@dataclass
class _PackedWeights:
    """Weight and bias of a layer as one kernel reads them, in buffers of the layer."""

    weight: str  # name of the buffer
    bias: str
    input_layout: str  # of the kernel's x and weight
    output_layout: str  # of its residual
    truncates: bool  # whether the kernel truncates its inputs to TF32
    stamps: list[TensorStamp] = field(default_factory=list)  # of the source tensors; empty if they have to be read


class TunedConv(torch.nn.Module):
    """A convolution and the operations that follow it; it reads the parameters of the model's modules and owns none.

    If a weight is written to or replaced, it is packed again before the next launch. PyTorch does not report writes
    through `.data`.
    A batch normalization after it is a factor and a summand per channel in evaluation mode. The epilogue's names are
    activations, and `add` for a residual. The output has `output_layout` if that is given, whatever computes it.
    """

    def __init__(
        self, conv: torch.nn.Module, norm: Any, epilogue_names: Sequence[str], output_layout: str | None = None
    ) -> None:
        super().__init__()
        self.output_layout = output_layout
        self._conv_and_norm: tuple[Any, Any] = (conv, norm)  # a tuple hides modules that the model has registered
        self.epilogue_names = tuple(epilogue_names)
        self.kernels: dict[InputKey, str] = {}  # names of kernels
        self._packed: dict[str, _PackedWeights] = {}  # by the names of kernels

    @property
    def conv(self) -> Any:
        """The model's convolution."""
        return self._conv_and_norm[0]

    @property
    def norm(self) -> Any:
        """The model's batch normalization; None if there is none."""
        return self._conv_and_norm[1]

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the output from the input of the convolution, and from the residual if the epilogue has one."""
        key = make_input_key(x)
        kernel = self.kernels.get(key)
        if (
            kernel is None
            or self._has_module_changed()
            or (torch.is_grad_enabled() and self._is_gradient_needed(x, add))
        ):
            return self.run_eager(x, add)
        dtype = key[1]
        if add is not None and add.dtype is not dtype:
            return self.run_eager(x, add)  # PyTorch promotes the sum's dtype
        packed = self._packed[kernel]
        if x.dtype is not dtype:  # autocast would convert it too
            x = x.to(dtype)
        # A compiler can fuse this conversion into the producer of x; the operator alone could not.
        x = lay_out(x, packed.input_layout)
        if add is not None:
            add = lay_out(add, packed.output_layout)
        return operator(x, self._buffers[packed.weight], self._buffers[packed.bias], add, kernel)

    def _has_module_changed(self) -> bool:
        """Return whether, since the optimization, a module got hooks or the normalization was set to training mode."""
        conv, norm = self._conv_and_norm
        return bool(
            conv._forward_hooks
            or conv._forward_pre_hooks
            or (norm is not None and (norm.training or norm._forward_hooks or norm._forward_pre_hooks))
        )

    def _is_gradient_needed(self, x: torch.Tensor, add: torch.Tensor | None) -> bool:
        return any(t is not None and t.requires_grad for t in (x, add, *self.weight_sources()))

    def run_eager(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the output by PyTorch."""
        y = self.conv(x)
        if self.norm is not None:
            y = self.norm(y)
        for name in self.epilogue_names:
            y = y + add if name == "add" else ACTIVATIONS[name](y)
        return y if self.output_layout is None else lay_out(y, self.output_layout)

    def assign_kernel(self, key: InputKey, kernel: str, *, truncates: bool = False) -> None:
        """Compute inputs with this key by an installed kernel, given whether it truncates its inputs to TF32."""
        if kernel not in self._packed:
            number = next(number for number in itertools.count() if f"weight{number}" not in self._buffers)
            layouts = parse_signature(kernel).input_layout, parse_signature(kernel).output_layout
            packed = _PackedWeights(f"weight{number}", f"bias{number}", *layouts, truncates, self._stamp_sources())
            for name, tensor in zip((packed.weight, packed.bias), self._pack_weights(kernel, packed), strict=True):
                self.register_buffer(name, tensor, persistent=False)
            self._packed[kernel] = packed
            self._register_refresh(kernel)
        self.kernels[key] = kernel

    def clear_kernel(self, key: InputKey) -> None:
        """Compute inputs with this key by PyTorch."""
        kernel = self.kernels.pop(key, None)
        if kernel is not None and kernel not in self.kernels.values():
            packed = self._packed.pop(kernel)
            del self._buffers[packed.weight], self._buffers[packed.bias]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": {kernel: replace(own, stamps=[]) for kernel, own in self._packed.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the refresh of the copy's own packed weights."""
        super().__setstate__(state)
        for kernel in self._packed:
            self._register_refresh(kernel)

    def _register_refresh(self, kernel: str) -> None:
        weak_self = weakref.ref(self)

        def refresh() -> None:
            if (module := weak_self()) is not None and kernel in module._packed:
                module._refresh(kernel)

        register_weight_refresh(getattr(self, self._packed[kernel].weight), refresh)

    def refresh(self) -> None:
        """Update packed weights, as each launch does."""
        for kernel in self._packed:
            self._refresh(kernel)

    def _refresh(self, kernel: str) -> None:
        """Pack weight and bias again, in the same memory, if the model's tensors have changed."""
        packed = self._packed[kernel]
        if self._is_current(packed):
            return
        stamps = self._stamp_sources()
        for name, new_value in zip((packed.weight, packed.bias), self._pack_weights(kernel, packed), strict=True):
            buffer = self._buffers[name]
            if buffer is not None and new_value is not None:
                with torch.no_grad():
                    buffer.copy_(new_value)
        packed.stamps = stamps

    def weight_sources(self) -> list[torch.Tensor]:
        """Return all tensors from which packed weight and bias are computed."""
        conv, norm = self._conv_and_norm
        tensors = [*conv._parameters.values()]
        if norm is not None:
            tensors += [*norm._parameters.values(), norm._buffers["running_mean"], norm._buffers["running_var"]]
        return [tensor for tensor in tensors if tensor is not None]

    def _stamp_sources(self) -> list[TensorStamp]:
        """Return stamps that change when a source tensor is written to, replaced or moved."""
        return [(weakref.ref(tensor), tensor.data_ptr(), tensor._version) for tensor in self.weight_sources()]

    def _is_current(self, packed: _PackedWeights) -> bool:
        """Return whether packed weight and bias match the current source tensors."""
        sources = self.weight_sources()
        for (tensor_ref, pointer, version), tensor in zip(packed.stamps, sources, strict=False):
            if version != tensor._version or pointer != tensor.data_ptr() or tensor_ref() is not tensor:
                return False
        return len(packed.stamps) == len(sources)

    def invalidate_packed_weights(self) -> None:
        """Force packing before the next launch, because the memory of old source tensors may have been reused."""
        for packed in self._packed.values():
            packed.stamps = []

    @torch.no_grad()
    def _pack_weights(self, kernel: str, packed: _PackedWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias as a kernel reads them, in new memory."""
        signature, (conv, norm) = parse_signature(kernel), self._conv_and_norm
        weight, bias = conv.weight, conv.bias
        if norm is not None:  # float64, so that the result is rounded once
            factor = (norm.running_var.double() + norm.eps).rsqrt()
            if norm.weight is not None:
                factor = factor * norm.weight.double()
            shift = -norm.running_mean.double() * factor
            if norm.bias is not None:
                shift = shift + norm.bias.double()
            weight = weight.double() * factor.view(-1, *(1,) * (weight.dim() - 1))
            bias = shift if bias is None else bias.double() * factor + shift
        if packed.truncates:
            weight = compensate_truncation(weight.double())
        strides = compute_strides(weight.shape, signature.input_layout)
        new_weight = torch.empty_strided(weight.shape, strides, dtype=signature.dtype, device=weight.device)
        weight = new_weight.copy_(weight)
        return weight, None if bias is None else torch.empty_like(bias, dtype=signature.bias_dtype).copy_(bias)
