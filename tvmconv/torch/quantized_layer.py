"""Modules of a quantized graph: convolutions of 8-bit operands, and the conversions of tensors between them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tvmconv.baselines.torch_calls import apply_op
from tvmconv.errors import ModelError
from tvmconv.torch.eight_bit_rounding import quantize_weight, round_to_8_bits
from tvmconv.torch.layer import InputKey, TensorStamp, TunedConv, are_current, stamp_tensors
from tvmconv.torch.operator import register_weight_refresh
from tvmconv.torch.quantization_operators import quantize, quantize_gated, quantized_conv
from tvmconv.torch.quantized_epilogue import ADD, QUANTIZE, SCALE, TENSOR_SCALE, ZERO_POINT, plan_epilogue
from tvmconv.torch.signature import SLOPE_OP
from tvmconv.torch.site_workload import resolve_padding
from tvmconv.torch.tensor_layout import lay_out
from tvmconv.workloads.layout import CHANNELS_LAST

CONV_FUNCTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TENSOR_NAMES = ("weight", SCALE, "bias", SLOPE_OP, TENSOR_SCALE, QUANTIZE, ZERO_POINT)  # of the buffers


@dataclass(frozen=True)
class ZeroPoints:
    """The integers that stand for zero in the tensors of a layer."""

    input: int = 0
    output: int = 0
    residual: int = 0


class Quantize(torch.nn.Module):
    """The rounding of a tensor divided by a scale to an 8-bit type, in channels last.

    Args:
        scale: The scale.
        dtype: The 8-bit type.
        device: Device of the tensor.
        zero_point: Integer that stands for zero.
    """

    def __init__(self, scale: float, dtype: torch.dtype, device: torch.device, zero_point: int = 0) -> None:
        super().__init__()
        self.dtype, self.zero_point = dtype, zero_point
        self.factor: torch.Tensor
        self.register_buffer("factor", torch.tensor([1 / scale], device=device), persistent=False)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rounded tensor, or the rounded product of two tensors, one of which may have fewer elements."""
        factor = self.factor
        if factor.device != x.device:  # the model was moved
            factor = self.factor = factor.to(x.device)
        if other is None:
            return quantize(x, factor, self.dtype, self.zero_point)
        x, gate = (x, other) if x.numel() >= other.numel() else (other, x)
        if x.shape != torch.broadcast_shapes(x.shape, gate.shape):
            return quantize(x * gate, factor, self.dtype, self.zero_point)
        return quantize_gated(x, gate, factor, self.dtype, self.zero_point)


class Dequantize(torch.nn.Module):
    """The floats that a tensor of 8 bits stands for.

    Args:
        scale: Scale of the tensor.
        dtype: Type of the floats.
        zero_point: Integer that stands for zero.
    """

    def __init__(self, scale: float, dtype: torch.dtype, zero_point: int = 0) -> None:
        super().__init__()
        self.scale, self.dtype, self.zero_point = scale, dtype, zero_point

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the floats."""
        y = x.to(self.dtype)
        return (y - self.zero_point if self.zero_point else y) * self.scale


class QuantizedConv(torch.nn.Module):
    """A convolution of 8-bit operands with the operations after it, by a kernel if there is one, else by PyTorch.

    The weight is that of the tuned convolution, and is quantized again if the model's weight is written to or replaced.
    The scales of activations stay. PyTorch's operations compute in float32 what a kernel computes. The zero points of
    the input and the residual are in the bias. As kernels pad with zeros, an input with a zero point is padded before.

    Args:
        source: The same layer in 16 or 32 bits.
        dtype: The 8-bit type of the operands.
        output_dtype: Type of the output; the 8-bit type if it is quantized.
        input_scale: Scale of the input.
        output_scale: Scale of the output; None if it is not quantized.
        residual_scale: Scale of the residual; None without one, or if the output is not quantized.
        zero_points: Integers that stand for zero in the input, in an output of 8 bits, and in a residual of 8 bits.
        given_weight: Weight in 8 bits and its scale per output channel, in place of those of the layer's weight.
        folds_zero_point: Whether the bias has the zero point of the output; see `plan_epilogue`.
    """

    def __init__(
        self,
        source: TunedConv,
        dtype: torch.dtype,
        output_dtype: torch.dtype,
        input_scale: float,
        output_scale: float | None = None,
        residual_scale: float | None = None,
        zero_points: ZeroPoints = ZeroPoints(),
        given_weight: tuple[torch.Tensor, torch.Tensor] | None = None,
        folds_zero_point: bool = False,
    ) -> None:
        super().__init__()
        self._source = (source,)  # a tuple hides registered modules
        self.dtype, self.output_dtype, self.input_scale = dtype, output_dtype, input_scale
        self.zero_points, self._given_weight = zero_points, given_weight
        has_bias = source.fold_weights()[1] is not None or bool(zero_points.input or zero_points.residual)
        has_bias = has_bias or folds_zero_point
        epilogue = plan_epilogue(
            source.epilogue_names,
            has_bias=has_bias,
            output_scale=output_scale,
            residual_scale=residual_scale,
            has_zero_point=bool(zero_points.output),
            folds_zero_point=folds_zero_point,
        )
        if epilogue is None:
            raise ModelError(f"no 8-bit epilogue computes {', '.join(source.epilogue_names)}")
        self.epilogue = epilogue
        self.kernels: dict[InputKey, str] = {}  # names of kernels
        self._stamps: list[TensorStamp] = []
        for name in TENSOR_NAMES:
            self.register_buffer(name, None, persistent=False)
        self.refresh()

    @property
    def source(self) -> TunedConv:
        """The same layer in 16 or 32 bits."""
        return self._source[0]

    @property
    def padding(self) -> tuple[int, ...]:
        """Numbers of `functional.pad` of the convolution."""
        conv = self.source.conv
        ndim = len(conv.kernel_size)
        padding = resolve_padding(conv, self.source.pads)
        low, high = padding[:ndim], padding[-ndim:]
        return tuple(side for pair in zip(reversed(low), reversed(high), strict=True) for side in pair)

    @property
    def is_padded_before(self) -> bool:
        """Whether the kernel's input is the padded input."""
        return bool(self.zero_points.input) and any(self.padding)

    @staticmethod
    def make_key(x: torch.Tensor) -> InputKey:
        """Return the properties of an input that select a kernel."""
        return tuple(x.shape), x.dtype, x.device, False

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the output from the 8-bit input, and from a residual of the output's type if there is one."""
        kernel = self.kernels.get(self.make_key(x))
        if kernel is None:
            y = self.run_reference(x, add)
        else:
            x = functional.pad(x, self.padding, value=self.zero_points.input) if self.is_padded_before else x
            x, add = (None if each is None else lay_out(each, CHANNELS_LAST) for each in (x, add))
            b = self._buffers
            arguments = (b["bias"], add, b[SCALE], b[TENSOR_SCALE], b[QUANTIZE], b[SLOPE_OP])
            y = quantized_conv(x, b["weight"], *arguments, kernel, b[ZERO_POINT])
        output_layout = self.source.output_layout
        return y if output_layout is None or y.dtype is self.dtype else lay_out(y, output_layout)

    @torch.no_grad()
    def run_reference(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the output by PyTorch in float32."""
        self.refresh()
        with torch.autocast(x.device.type, enabled=False):
            y = self._convolve(x.float())
            for name in self.epilogue.ops:
                argument = add.float() if name == ADD and add is not None else self._buffers.get(name)
                y = apply_op(name, y, argument)
        y = round_to_8_bits(y, self.output_dtype) if self.output_dtype is self.dtype else y.to(self.output_dtype)
        return lay_out(y, CHANNELS_LAST)

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        conv, padding, weight = self.source.conv, self.padding, self._buffers["weight"]
        assert weight is not None
        padded = functional.pad(x, padding, value=self.zero_points.input) if any(padding) else x
        convolve: Any = CONV_FUNCTIONS[len(conv.kernel_size)]
        result: torch.Tensor = convolve(padded, weight.float(), None, conv.stride, 0, conv.dilation, conv.groups)
        return result

    def assign_kernel(self, key: InputKey, kernel: str) -> None:
        """Compute inputs with this key by an installed kernel."""
        self.kernels[key] = kernel

    def clear_kernel(self, key: InputKey) -> None:
        """Compute inputs with this key by PyTorch."""
        self.kernels.pop(key, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stamps": []}  # weak references cannot be copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the refresh of the copy's own weight."""
        super().__setstate__(state)
        self._register_refresh()

    def _register_refresh(self) -> None:
        weak_self = weakref.ref(self)

        def refresh() -> None:
            if (module := weak_self()) is not None:
                module.refresh()

        weight = self._buffers["weight"]
        assert weight is not None
        register_weight_refresh(weight, refresh)

    def invalidate_packed_weights(self) -> None:
        """Force quantization before the next launch, because the memory of old source tensors may have been reused."""
        self._stamps = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantize the weight again, in the same memory, if the model's tensors have changed."""
        sources = self.source.weight_sources()
        if self._stamps and are_current(self._stamps, sources):
            return
        stamps = stamp_tensors(sources)
        is_new = False
        for name, tensor in self._compute_tensors().items():
            buffer = self._buffers[name]
            if buffer is None or buffer.device != tensor.device:
                self._buffers[name], is_new = tensor, True
            else:
                buffer.copy_(tensor)
        self._stamps = stamps
        if is_new:
            self._register_refresh()

    def _compute_tensors(self) -> dict[str, torch.Tensor]:
        """Return what the kernel reads, by name."""
        weight, bias = self.source.fold_weights()
        epilogue, zero_points = self.epilogue, self.zero_points
        quantized, weight_scale = self._given_weight or quantize_weight(weight, self.dtype)
        quantized, weight_scale = (each.to(weight.device) for each in (quantized, weight_scale))
        tensors = {
            "weight": lay_out(quantized, CHANNELS_LAST),
            SCALE: weight_scale * (self.input_scale / epilogue.unit),
        }
        if "bias" in epilogue.ops:
            sums = quantized.double().flatten(1).sum(1) * zero_points.input * weight_scale.double() * self.input_scale
            bias = -sums if bias is None else bias.double() - sums
            tensors["bias"] = (bias / epilogue.unit - zero_points.residual + epilogue.bias_offset).float()
        slope = self.source.expand_slopes(torch.float32)
        if slope is not None:
            tensors[SLOPE_OP] = slope
        numbers = {TENSOR_SCALE: epilogue.tensor_scale, QUANTIZE: epilogue.quantize, ZERO_POINT: zero_points.output}
        for name, number in numbers.items():
            if name in epilogue.ops and number is not None:
                tensors[name] = torch.tensor([number], dtype=torch.float32, device=weight.device)
        return tensors
