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
from torch.nn import functional

from tvmconv.torch.channel_affine import count_output_channels, fold_affine, list_affine_sources
from tvmconv.torch.concatenation import make_dense
from tvmconv.torch.conv_source import list_conv_sources, list_watched_modules
from tvmconv.torch.graph_constants import GraphConstant
from tvmconv.torch.operator import conv as operator
from tvmconv.torch.operator import register_weight_refresh
from tvmconv.torch.rounding import compensate_truncation
from tvmconv.torch.signature import ACTIVATIONS, SLOPE_OP, parse_signature
from tvmconv.torch.tensor_layout import compute_strides, lay_out

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


def stamp_tensors(tensors: Sequence[torch.Tensor]) -> list[TensorStamp]:
    """Return stamps that change when a tensor is written to, replaced or moved."""
    return [(weakref.ref(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors]


def are_current(stamps: Sequence[TensorStamp], tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors are those of stamps, and have not been written to since."""
    for (tensor_ref, pointer, version), tensor in zip(stamps, tensors, strict=False):
        if version != tensor._version or pointer != tensor.data_ptr() or tensor_ref() is not tensor:
            return False
    return len(stamps) == len(tensors)


def is_tf32_allowed() -> bool:
    """Return whether float32 convolutions may round their operands to TF32."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # since PyTorch 2.9, if the setting was made by its newer name
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")


@dataclass
class _PackedWeights:
    """Weight, bias and slopes of a layer as one kernel reads them, in buffers of the layer."""

    names: tuple[str, str, str]  # of the buffers of weight, bias and slopes
    input_layout: str  # of the kernel's x and weight
    output_layout: str  # of its residual
    truncates: bool  # whether the kernel truncates its inputs to TF32
    stamps: list[TensorStamp] = field(default_factory=list)  # of the source tensors; empty if they have to be read


class TunedConv(torch.nn.Module):
    """A convolution and the operations that follow it; it reads the parameters of the model's modules and owns none.

    If a weight is written to or replaced, it is packed again before the next launch. PyTorch does not report writes
    through `.data`.

    Args:
        conv: The convolution: a module, or another object of `tvmconv.torch.conv_source`.
        affines: Operations after it that weight and bias include, of `tvmconv.torch.channel_affine`.
        epilogue_names: Names of the other operations: activations, `add` for a residual, and `prelu`.
        output_layout: Layout of the output, whatever computes it; None if that is not decided.
        slope: Slopes of `prelu`: one number, or one per channel.
        pads: Zeros around the input, as `torch.nn.functional.pad` takes them.
    """

    def __init__(
        self,
        conv: Any,
        affines: Sequence[Any] = (),
        epilogue_names: Sequence[str] = (),
        output_layout: str | None = None,
        *,
        slope: GraphConstant | None = None,
        pads: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.output_layout = output_layout
        self._operations: tuple[Any, tuple[Any, ...]] = (conv, tuple(affines))  # a tuple hides registered modules
        self.epilogue_names, self.slope, self.pads = tuple(epilogue_names), slope, tuple(pads)
        norms = [affine for affine in affines if isinstance(affine, torch.nn.Module)]
        # The modules of which hooks and mode matter, with their number of hooks.
        self._watched = tuple((each, len(each._forward_pre_hooks)) for each in (*list_watched_modules(conv), *norms))
        self.kernels: dict[InputKey, str] = {}  # names of kernels
        self._packed: dict[str, _PackedWeights] = {}  # by the names of kernels

    @property
    def conv(self) -> Any:
        """The model's convolution."""
        return self._operations[0]

    @property
    def affines(self) -> tuple[Any, ...]:
        """The operations that weight and bias include, such as the model's batch normalization."""
        return self._operations[1]

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
        x = make_dense(x, packed.input_layout)
        if add is not None:
            add = make_dense(add, packed.output_layout)
        weight, bias, slope = (self._buffers[name] for name in packed.names)
        if slope is None:
            return operator(x, weight, bias, add, kernel)
        return operator(x, weight, bias, add, kernel, slope)

    def _has_module_changed(self) -> bool:
        """Return whether, since the optimization, a module got hooks or the normalization was set to training mode."""
        for module, num_pre_hooks in self._watched:
            if module._forward_hooks or len(module._forward_pre_hooks) > num_pre_hooks:
                return True
            if module.training and module is not self._operations[0]:
                return True
        return False

    def _is_gradient_needed(self, x: torch.Tensor, add: torch.Tensor | None) -> bool:
        return any(t is not None and t.requires_grad for t in (x, add, *self.weight_sources()))

    def run_eager(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the output by PyTorch."""
        y = self.conv(functional.pad(x, self.pads) if any(self.pads) else x)
        for affine in self.affines:
            y = affine(y)
        for name in self.epilogue_names:
            if name == SLOPE_OP and self.slope is not None:
                y = functional.prelu(y, self._expand_slope(y))
            else:
                y = y + add if name == "add" else ACTIVATIONS[name](y)
        return y if self.output_layout is None else lay_out(y, self.output_layout)

    def _expand_slope(self, y: torch.Tensor) -> torch.Tensor:
        """Return the slopes of `prelu` as PyTorch's function reads them."""
        assert self.slope is not None
        return self.slope.compute().detach().to(y.device, y.dtype).flatten()

    def assign_kernel(self, key: InputKey, kernel: str, *, truncates: bool = False) -> None:
        """Compute inputs with this key by an installed kernel, given whether it truncates its inputs to TF32."""
        if kernel not in self._packed:
            number = next(number for number in itertools.count() if f"weight{number}" not in self._buffers)
            layouts = parse_signature(kernel).input_layout, parse_signature(kernel).output_layout
            names = (f"weight{number}", f"bias{number}", f"slope{number}")
            packed = _PackedWeights(names, *layouts, truncates, self._stamp_sources())
            for name, tensor in zip(packed.names, self._pack_weights(kernel, packed), strict=True):
                self.register_buffer(name, tensor, persistent=False)
            self._packed[kernel] = packed
            self._register_refresh(kernel)
        self.kernels[key] = kernel

    def clear_kernel(self, key: InputKey) -> None:
        """Compute inputs with this key by PyTorch."""
        kernel = self.kernels.pop(key, None)
        if kernel is not None and kernel not in self.kernels.values():
            packed = self._packed.pop(kernel)
            for name in packed.names:
                del self._buffers[name]

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

        register_weight_refresh(getattr(self, self._packed[kernel].names[0]), refresh)

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
        for name, new_value in zip(packed.names, self._pack_weights(kernel, packed), strict=True):
            buffer = self._buffers[name]
            if buffer is not None and new_value is not None:
                with torch.no_grad():
                    buffer.copy_(new_value)
        packed.stamps = stamps

    def weight_sources(self) -> list[torch.Tensor]:
        """Return all tensors from which packed weight, bias and slopes are computed."""
        tensors = list_conv_sources(self.conv)
        for affine in self.affines:
            tensors += list_affine_sources(affine)
        return tensors if self.slope is None else tensors + self.slope.list_sources()

    def _stamp_sources(self) -> list[TensorStamp]:
        return stamp_tensors(self.weight_sources())

    def _is_current(self, packed: _PackedWeights) -> bool:
        """Return whether packed weight and bias match the current source tensors."""
        return are_current(packed.stamps, self.weight_sources())

    def invalidate_packed_weights(self) -> None:
        """Force packing before the next launch, because the memory of old source tensors may have been reused."""
        for packed in self._packed.values():
            packed.stamps = []

    @torch.no_grad()
    def _pack_weights(
        self, kernel: str, packed: _PackedWeights
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return weight, bias and slopes as a kernel reads them, in new memory."""
        signature, (weight, bias) = parse_signature(kernel), self.fold_weights()
        if packed.truncates:
            weight = compensate_truncation(weight.double())
        strides = compute_strides(weight.shape, signature.input_layout)
        new_weight = torch.empty_strided(weight.shape, strides, dtype=signature.dtype, device=weight.device)
        weight = new_weight.copy_(weight)
        bias = None if bias is None else torch.empty_like(bias, dtype=signature.bias_dtype).copy_(bias)
        return weight, bias, self.expand_slopes(signature.bias_dtype)

    def fold_weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias with all affine operations; if there are any, in float64, to be rounded once."""
        weight, bias = self.conv.weight, self.conv.bias
        if not self.affines:
            return weight, bias
        return self._fold_affines(weight.double(), None if bias is None else bias.double())

    def expand_slopes(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the slopes of `prelu`, one per channel in new memory; None without that operation."""
        if self.slope is None:
            return None
        slope = self.slope.compute().detach().to(self.conv.weight.device, dtype).flatten()
        return slope.expand(count_output_channels(self.conv)).clone()

    def _fold_affines(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias with all affine operations, in float64."""
        num_channels = count_output_channels(self.conv)
        total: torch.Tensor | None = None
        for affine in self.affines:
            factor, shift = (
                None if each is None else each.to(weight.device).expand(num_channels) for each in fold_affine(affine)
            )
            if factor is not None:
                total = factor if total is None else total * factor
                bias = None if bias is None else bias * factor
            if shift is not None:
                bias = shift.clone() if bias is None else bias + shift
        return weight if total is None else scale_output_channels(weight, total, self.conv), bias


def scale_output_channels(weight: torch.Tensor, factor: torch.Tensor, conv: Any) -> torch.Tensor:
    """Return the weight of a convolution with one factor per output channel."""
    space = (1,) * (weight.dim() - 2)
    if not conv.transposed:
        return weight * factor.view(-1, 1, *space)
    groups = conv.groups  # the weight is (C, O / groups, kernel)
    grouped = weight.view(groups, -1, *weight.shape[1:]) * factor.view(groups, 1, -1, *space)
    return grouped.view(weight.shape)
