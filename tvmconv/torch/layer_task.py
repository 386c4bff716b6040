"""Layers of a model for inference as tasks of a search: operands, PyTorch's results, and calls of kernels.

A task knows its workload alone, so that a search needs neither the model nor its weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tvmconv.baselines.torch_calls import apply_op
from tvmconv.torch import operator
from tvmconv.torch.accuracy import TOLERANCE_FACTOR, compute_relative_error
from tvmconv.torch.conv_call import ConvCall
from tvmconv.torch.conv_operators import convolve_by_pytorch
from tvmconv.torch.eight_bit_rounding import NAMES as EIGHT_BIT_DTYPES
from tvmconv.torch.eight_bit_rounding import round_to_8_bits
from tvmconv.torch.kernels import AvailableKernel
from tvmconv.torch.product_runner import KernelCalls
from tvmconv.torch.rounding import compensate_truncation
from tvmconv.torch.signature import QUANTIZATION_OPS, SLOPE_OP, ConvSignature, parse_signature
from tvmconv.torch.tensor_layout import compute_strides
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.layout import CHANNELS_LAST

EIGHT_BIT_FACTOR = 30.0  # of random numbers that are rounded to 8 bits; the largest are then some 120


@dataclass
class LayerOperands:
    """Operands of a layer, in the layouts of its workload."""

    x: torch.Tensor
    weight: torch.Tensor
    epilogue: dict[str, torch.Tensor]  # arguments of the epilogue's operations, by name


@dataclass(frozen=True)
class LayerTask:
    """A workload of one or more layers, with PyTorch's times by workload text, which may be measured later."""

    workload_text: str
    torch_device: torch.device
    num_calls: float = 1.0
    all_pytorch_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def pytorch_seconds(self) -> float | None:
        """PyTorch's time of one layer, as far as it was measured."""
        return self.all_pytorch_seconds.get(self.workload_text)

    @property
    def signature(self) -> ConvSignature:
        """Shapes, dtypes and layouts of the operands."""
        return parse_signature(self.workload_text)

    @property
    def workload(self) -> ConvOperator:
        """The workload."""
        return self.signature.workload

    @property
    def name(self) -> str:
        """Text that is equal for tasks with equal operands."""
        return self.workload_text

    def strip(self) -> LayerTask:
        """Return a copy for another process."""
        return LayerTask(self.workload_text, self.torch_device)

    def make_operands(self) -> LayerOperands:
        """Return random operands, whose sums have a standard deviation of one in floats."""
        signature, device = self.signature, self.torch_device
        num_channels, workload = signature.workload.O, signature.workload
        has_8_bits = signature.dtype in EIGHT_BIT_DTYPES
        num_products = math.prod(signature.weight_shape) / num_channels
        if workload.kind == "transpose":
            num_products /= math.prod(workload.stride)
        deviation = max(num_products, 1.0) ** 0.5
        x = _make_random(signature.x_shape, signature.input_layout, signature.dtype, device)
        weight_scale = 1.0 if has_8_bits else 1 / deviation
        weight = _make_random(signature.weight_shape, signature.input_layout, signature.dtype, device, weight_scale)
        per_channel = functools.partial(torch.rand, num_channels, device=device)
        output = signature.output_shape, signature.output_layout, signature.output_dtype, device
        epilogue = {
            "bias": lambda: per_channel().sub_(0.5).to(signature.bias_dtype),
            "add": lambda: _make_random(*output),
            SLOPE_OP: lambda: per_channel().to(signature.bias_dtype),
            "scale": lambda: per_channel().add_(0.5) / (deviation * EIGHT_BIT_FACTOR**2),
            "tensor_scale": lambda: torch.full([1], 0.75, device=device),
            "quantize": lambda: torch.full([1], EIGHT_BIT_FACTOR, device=device),
            "zero_point": lambda: torch.full([1], 5.0, device=device),
        }
        return LayerOperands(x, weight, {name: epilogue[name]() for name in workload.epilogue if name in epilogue})

    def compute_reference(self, operands: LayerOperands) -> torch.Tensor:
        """Compute the layer by PyTorch in float32."""
        signature = self.signature
        w: Any = signature.workload
        is_transposed = w.kind == "transpose"
        call = ConvCall(
            *(signature.x_shape, signature.weight_shape, tuple(w.stride), (*w.pad_low, *w.pad_high)),
            *(tuple(w.dilation), w.groups, is_transposed),
            tuple(w.output_padding) if is_transposed else (0,) * len(w.stride),
            *(torch.float32, False, signature.output_layout == CHANNELS_LAST, self.torch_device),
        )
        y = convolve_by_pytorch(call, operands.x.float(), operands.weight.float(), None)
        for name in w.epilogue:
            argument = operands.epilogue.get(name)
            y = apply_op(name, y, None if argument is None else argument.float())
        return round_to_8_bits(y, signature.output_dtype) if signature.output_dtype in EIGHT_BIT_DTYPES else y

    def make_calls(self, kernel: AvailableKernel, operands: LayerOperands) -> KernelCalls:
        """Return the calls of a kernel; raise Error or RuntimeError if it cannot be loaded."""
        signature, epilogue = self.signature, operands.epilogue
        weight = operands.weight
        if kernel.truncates:
            strides = compute_strides(weight.shape, signature.input_layout)
            weight = torch.empty_strided(weight.shape, strides, device=weight.device).copy_(
                compensate_truncation(weight.double())
            )
        operator.register_weight_refresh(weight, lambda: None)  # a weight with a known lifetime is packed once
        quantization = {name: epilogue[name] for name in QUANTIZATION_OPS if name in epilogue}
        run = functools.partial(
            kernel.launcher,
            *(operands.x, weight, epilogue.get("bias"), epilogue.get("add"), epilogue.get(SLOPE_OP)),
            **({"quantization": quantization} if quantization else {}),
        )
        tolerance = TOLERANCE_FACTOR * signature.workload.tolerance

        def check(expected: torch.Tensor) -> tuple[float, str]:
            error = compute_relative_error(run(), expected)
            is_correct = error <= tolerance  # also false for NaN
            return error, "" if is_correct else f"the kernel's result differs by {error:.1e}, more than {tolerance:.1e}"

        return KernelCalls(check, run)


def _make_random(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: torch.device, scale: float = 1.0
) -> torch.Tensor:
    """Return random numbers of a standard deviation, or of `EIGHT_BIT_FACTOR` in 8 bits."""
    tensor = torch.empty_strided(shape, compute_strides(shape, layout), device=device).normal_()
    if dtype in EIGHT_BIT_DTYPES:
        return round_to_8_bits(tensor * EIGHT_BIT_FACTOR, dtype)
    return (tensor * scale).to(dtype)
