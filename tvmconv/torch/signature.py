"""Shapes, dtypes and layouts of a convolution's tensors in PyTorch, by the text of its workload."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tvmconv.baselines.torch_calls import load_activations
from tvmconv.errors import WorkloadError
from tvmconv.torch.tensor_layout import compute_strides, lay_out
from tvmconv.workloads import dtypes, parse
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.layout import CHANNELS_LAST

ACTIVATIONS = load_activations()
ALIGNMENT = 16  # bytes; PyTorch's allocations are aligned, views of them need not be
SLOPE_OP = "prelu"  # the epilogue operation that reads the operator's argument `slope`
ARGUMENT_OPS = ("bias", "add", SLOPE_OP)  # epilogue operations whose arguments the operator takes
QUANTIZATION_OPS = ("scale", "tensor_scale", "quantize", "zero_point")  # also of 8-bit ones
STATS_OP = "stats"  # epilogue operation of training, whose statistics the kernel table returns
KERNEL_NAME_SEPARATOR = "#"  # a kernel's name is its workload's text, this separator, and a digest


@dataclass(frozen=True)
class ConvSignature:
    """Shapes, dtypes and layouts of a convolution's tensors, whose axes are N, C and then space.

    For a gradient, x is its first operand and the weight is its second one: dY and K, or dY and X.
    """

    workload: ConvOperator
    dtype: torch.dtype  # of all tensors except the bias and the output
    bias_dtype: torch.dtype
    output_dtype: torch.dtype
    input_layout: str  # of x and the weight
    output_layout: str  # of the output and of a residual
    x_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    output_shape: tuple[int, ...]  # also of a residual
    output_stride: tuple[int, ...]  # of a new output
    takes_bias: bool
    takes_add: bool
    takes_slope: bool  # of `prelu`
    takes_stats: bool  # whether the kernel returns the statistics of the output's channels
    quantization_ops: tuple[str, ...] = ()  # operations of `QUANTIZATION_OPS` in the epilogue

    def allocate_output(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor for the output."""
        return torch.empty_strided(self.output_shape, self.output_stride, dtype=self.output_dtype, device=device)

    def apply_activations(self, tensor: torch.Tensor) -> torch.Tensor:
        """Apply the epilogue to a tensor with a bias and a residual of zero, and slopes of one."""
        for name in self.workload.epilogue:
            tensor = ACTIVATIONS[name](tensor) if name in ACTIVATIONS else tensor
        return tensor

    def to_input_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return x or the weight as the kernel reads it, as a copy if necessary."""
        return _align(lay_out(tensor, self.input_layout))

    def to_output_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a residual as the kernel reads it, as a copy if necessary."""
        return _align(lay_out(tensor, self.output_layout))


def _align(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor at a multiple of 16 bytes, because kernels read up to 16 bytes at once."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def _to_logical_order(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes in a layout's memory order as (N, C, space)."""
    return (shape[0], shape[-1], *shape[1:-1]) if layout == CHANNELS_LAST else shape


@functools.cache
def parse_signature(name: str) -> ConvSignature:
    """Return the signature of the tensors of a kernel, by its name or the text of its workload.

    Raises WorkloadError if the workload is neither a convolution, nor its gradient, nor a transposed convolution.
    """
    text = name.partition(KERNEL_NAME_SEPARATOR)[0]
    workload = parse(text)
    if not isinstance(workload, ConvOperator):
        raise WorkloadError(f"{text}: expected a convolution, its gradient or a transposed convolution")
    known_ops = (*ARGUMENT_OPS, *QUANTIZATION_OPS, STATS_OP)
    if others := [op.name for op in workload.argument_ops if op.name not in known_ops]:
        accepted = ", ".join((*ARGUMENT_OPS, *QUANTIZATION_OPS))
        raise WorkloadError(f"{text}: expected {accepted} as the only arguments of its epilogue, not {others[0]}")
    shapes = workload.argument_shapes
    x_shape, weight_shape = (_to_logical_order(workload.input_layout, shape) for shape in shapes[:2])
    output_shape = _to_logical_order(workload.output_layout, shapes[-1])
    return ConvSignature(
        workload=workload,
        dtype=getattr(torch, workload.storage),
        bias_dtype=getattr(torch, dtypes.ACCUMULATOR),
        output_dtype=getattr(torch, workload.argument_dtypes[-1]),
        input_layout=workload.input_layout,
        output_layout=workload.output_layout,
        x_shape=x_shape,
        weight_shape=weight_shape,
        output_shape=output_shape,
        output_stride=compute_strides(output_shape, workload.output_layout),
        takes_bias="bias" in workload.epilogue,
        takes_add="add" in workload.epilogue,
        takes_slope=SLOPE_OP in workload.epilogue,
        takes_stats=STATS_OP in workload.epilogue,
        quantization_ops=tuple(name for name in QUANTIZATION_OPS if name in workload.epilogue),
    )
