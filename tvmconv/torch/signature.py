"""Shapes, dtypes and memory formats of a convolution's tensors in PyTorch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tvmconv.baselines.torch_calls import load_activations
from tvmconv.errors import WorkloadError
from tvmconv.workloads import Conv, dtypes, parse
from tvmconv.workloads.layout import CHANNELS_LAST

ACTIVATIONS = load_activations()
MEMORY_FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}  # of NHWC, by number of spatial axes
ALIGNMENT = 16  # bytes; PyTorch's allocations are aligned, views of them need not be
KERNEL_NAME_SEPARATOR = "#"  # a kernel's name is its workload's text, this separator, and a digest


@dataclass(frozen=True)
class ConvSignature:
    """Shapes, dtypes and memory format of a convolution's tensors, whose axes are N, C and then space."""

    workload: Conv
    dtype: torch.dtype  # of all tensors except the bias
    bias_dtype: torch.dtype
    memory_format: torch.memory_format  # of all tensors except the bias
    x_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    output_shape: tuple[int, ...]  # also of a residual
    output_stride: tuple[int, ...]  # of a new output
    takes_bias: bool
    takes_add: bool

    def allocate_output(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor for the output."""
        return torch.empty_strided(self.output_shape, self.output_stride, dtype=self.dtype, device=device)

    def apply_activations(self, tensor: torch.Tensor) -> torch.Tensor:
        """Apply the epilogue without bias and residual to a tensor."""
        for name in self.workload.epilogue:
            tensor = ACTIVATIONS[name](tensor) if name in ACTIVATIONS else tensor
        return tensor

    def to_kernel_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the kernel's memory format and aligned to 16 bytes, as a copy if necessary.

        Kernels read up to 16 bytes at once.
        """
        tensor = tensor.contiguous(memory_format=self.memory_format)
        return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


@functools.cache
def parse_signature(name: str) -> ConvSignature:
    """Return the signature of the tensors of a kernel, by its name or the text of its workload.

    Raises WorkloadError if the workload is not a convolution, or PyTorch has no such tensors.
    """
    text = name.partition(KERNEL_NAME_SEPARATOR)[0]
    workload = parse(text)
    if not isinstance(workload, Conv):
        raise WorkloadError(f"{text}: expected a convolution")
    if others := [op.name for op in workload.argument_ops if op.name not in ("bias", "add")]:
        raise WorkloadError(f"{text}: expected bias and add as the only arguments of its epilogue, not {others[0]}")
    is_channels_last = workload.layout == CHANNELS_LAST
    if is_channels_last and workload.spatial_ndim not in MEMORY_FORMATS:
        raise WorkloadError(f"{text}: PyTorch has no memory format for channels last along one axis")
    memory_format = MEMORY_FORMATS[workload.spatial_ndim] if is_channels_last else torch.contiguous_format
    return ConvSignature(
        workload=workload,
        dtype=getattr(torch, workload.storage),
        bias_dtype=getattr(torch, dtypes.ACCUMULATOR),
        memory_format=memory_format,
        x_shape=workload.input_shape,
        weight_shape=workload.weight_shape,
        output_shape=workload.output_shape,
        output_stride=torch.empty(workload.output_shape, device="meta", memory_format=memory_format).stride(),
        takes_bias="bias" in workload.epilogue,
        takes_add="add" in workload.epilogue,
    )
