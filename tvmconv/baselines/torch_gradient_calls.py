"""Gradients and transposed convolutions as calls of PyTorch, which passes them to cuDNN."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tvmconv.baselines.torch_calls import Tensors, TorchConvCall, apply_op
from tvmconv.workloads import dtypes
from tvmconv.workloads.conv_gradient import DerivedConv, TransposedConv, WeightGradient
from tvmconv.workloads.layout import CHANNELS_LAST, UNIFORM_LAYOUTS


def list_gradient_calls(w: DerivedConv) -> list[TorchConvCall]:
    """Return the calls that can compute a gradient or a transposed convolution, in both layouts.

    All tensors are converted before the timing. Epilogues, and padding that is not symmetric, take kernels of their
    own. PyTorch has no channels-last format of signals, so those are channels first.
    """
    layouts = UNIFORM_LAYOUTS[:1] if w.spatial_ndim == 1 else UNIFORM_LAYOUTS
    return [_GradientCall(w, layout).make_call() for layout in layouts]


@dataclass(frozen=True)
class _GradientCall:
    """The steps of a call of PyTorch's gradient or transposed convolution, with tensors in one layout.

    PyTorch pads symmetrically. For other padding, inputs are padded before the call, and results are cut after it.
    """

    w: DerivedConv
    layout: str  # layout of the tensors in the call

    @property
    def is_symmetric(self) -> bool:
        """Whether PyTorch pads."""
        return self.w.pad_low == self.w.pad_high

    @property
    def has_leading_bias(self) -> bool:
        """Whether the bias is an argument of the transposed convolution."""
        return isinstance(self.w, TransposedConv) and self.w.epilogue[:1] == ("bias",)

    @property
    def remaining_ops(self) -> tuple[str, ...]:
        """Operations of the epilogue that other kernels compute."""
        return self.w.epilogue[1:] if self.has_leading_bias else self.w.epilogue

    @functools.cached_property
    def padding(self) -> list[int]:
        """Padding by PyTorch along each axis."""
        return list(self.w.pad_low) if self.is_symmetric else [0] * self.w.spatial_ndim

    @functools.cached_property
    def memory_format(self) -> Any:
        """PyTorch's memory format of the tensors."""
        import torch

        channels_last = {2: "channels_last", 3: "channels_last_3d"}.get(self.w.spatial_ndim)
        name = channels_last if self.layout == CHANNELS_LAST else None
        return getattr(torch, name or "contiguous_format")

    def prepare(self, *tensors: Any) -> Tensors:
        """Copy the arguments to the call's layout.

        PyTorch also takes the operand of the gradient that is not computed, of which it reads only shape and strides.
        """
        import torch

        w, like = self.w, tensors[0]
        operands = [self._copy_to_layout(tensor) for tensor in tensors[:2]]
        if not isinstance(w, TransposedConv):
            input_size = w.forward.input_size if self.is_symmetric else w.forward.padded_shape[2:]
            shape = w.forward.weight_shape if isinstance(w, WeightGradient) else (w.N, w.C, *input_size)
            options = {"dtype": like.dtype, "device": like.device, "memory_format": self.memory_format}
            operands.append(torch.empty(shape, **options))
        others = [value.to(like.dtype) if value.dim() == 1 else self._copy_to_layout(value) for value in tensors[2:]]
        return *operands, *others

    def compute(self, *tensors: Any) -> Any:
        """Compute the result, and its epilogue by kernels of its own."""
        w = self.w
        num_operands = 2 if isinstance(w, TransposedConv) else 3
        values_by_name = dict(zip(w.argument_names[2:-1], tensors[num_operands:], strict=True))
        if isinstance(w, TransposedConv):
            bias = values_by_name["bias"] if self.has_leading_bias else None
            y = self._compute_transposed(tensors[0], tensors[1], bias)
        else:
            y = self._compute_gradient(*tensors[:3])
            y = y.float() if w.argument_dtypes[-1] == dtypes.ACCUMULATOR else y
        for name in self.remaining_ops:
            y = apply_op(name, y, values_by_name.get(name))
        return y

    def finish(self, y: Any) -> Any:
        """Return the result as the workload's dense output."""
        return (y.movedim(1, -1) if self.w.layout == CHANNELS_LAST else y).contiguous()

    def make_call(self) -> TorchConvCall:
        """Return the call."""
        notes = [] if self.is_symmetric else ["padding by a kernel of its own"]
        if self.remaining_ops:
            notes.append(f"{'+'.join(self.remaining_ops)} by kernels of PyTorch's")
        if self.w.argument_dtypes[-1] != self.w.storage:
            notes.append("a conversion to float32")
        if CHANNELS_LAST in (self.layout, self.w.layout):
            notes.append(f"in {self.layout.upper()}")
        return TorchConvCall(self.compute, self.prepare, tuple(notes), self.finish)

    def _compute_gradient(self, dy: Any, operand: Any, unread: Any) -> Any:
        import torch
        from torch.nn import functional

        w = self.w
        is_weight_gradient = isinstance(w, WeightGradient)
        if is_weight_gradient and not self.is_symmetric:
            pairs = zip(reversed(w.pad_low), reversed(w.pad_high), strict=True)
            operand = functional.pad(operand, [side for pair in pairs for side in pair])
        x, k = (operand, unread) if is_weight_gradient else (unread, operand)
        mask = [not is_weight_gradient, is_weight_gradient, False]
        options = list(w.stride), self.padding, list(w.dilation), False, [0] * w.spatial_ndim, w.groups, mask
        dx, dk, _ = torch.ops.aten.convolution_backward(dy, x, k, None, *options)
        return dk if is_weight_gradient else self._cut_padding(dx)

    def _compute_transposed(self, x: Any, k: Any, bias: Any) -> Any:
        from torch.nn import functional

        w = self.w
        assert isinstance(w, TransposedConv)
        transpose = getattr(functional, f"conv_transpose{w.spatial_ndim}d")
        return self._cut_padding(transpose(x, k, bias, w.stride, self.padding, w.output_padding, w.groups, w.dilation))

    def _cut_padding(self, result: Any) -> Any:
        """Return the result without the padding that PyTorch does not remove."""
        if self.is_symmetric:
            return result
        bounds = zip(self.w.pad_low, self.w.forward.input_size, strict=True)
        interior = slice(None), slice(None), *(slice(low, low + size) for low, size in bounds)
        return result[interior]

    def _copy_to_layout(self, tensor: Any) -> Any:
        import torch

        if tensor.dim() == 1:
            return tensor
        view = tensor.movedim(-1, 1) if self.w.layout == CHANNELS_LAST else tensor
        copy = torch.empty(view.shape, dtype=view.dtype, device=view.device, memory_format=self.memory_format)
        return copy.copy_(view)
