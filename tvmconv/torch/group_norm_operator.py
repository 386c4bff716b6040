"""The operator `tvmconv::group_norm_act`: a group normalization with an activation, for inference, in either layout.

An instance normalization has one channel per group. On a GPU, the kernels of `group_norm_source.py` compute it; on the
CPU, PyTorch does. The result has the layout of the input.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn import functional

from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.torch.conv_call import KERNEL_DTYPES
from tvmconv.torch.group_norm_source import (
    COMBINED_CHANNELS,
    COMBINING_THREADS,
    THREADS,
    VECTORS_IN_FLIGHT,
    make_source,
)
from tvmconv.torch.operator_library import define_operator
from tvmconv.torch.signature import ACTIVATIONS
from tvmconv.torch.source_kernels import SourceKernels, count_vector_elements
from tvmconv.torch.tensor_layout import allocate_like, find_layout, lay_out
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

LEAKY_RELU = "leaky_relu"  # activation that reads the slope
CTAS_PER_MULTIPROCESSOR = 4  # as many as run at the same time
MAX_COLUMNS = 32  # threads of a CTA with different channels: 512 contiguous bytes of a pixel
MIN_ROW_THREADS = 32  # threads of a CTA with neighbouring pixels
MAX_SAMPLES = 65535  # largest size of a grid's last axes


def find_kernel_layout(x: torch.Tensor) -> str | None:
    """Return the layout in which the kernels read a tensor (N, C, space); None if they cannot."""
    if x.dim() < 3 or x.dtype not in KERNEL_DTYPES or not x.numel() or x.shape[0] > MAX_SAMPLES:
        return None
    return find_layout(x.shape, x.stride()) or (CHANNELS_FIRST if x.is_contiguous() else None)


def apply_activation(y: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    """Return the activation of a tensor by PyTorch."""
    if activation == LEAKY_RELU:
        return functional.leaky_relu(y, slope)
    return ACTIVATIONS[activation](y) if activation else y


def _run_on_cpu(
    x: torch.Tensor, weight: Any, bias: Any, num_groups: int, eps: float, activation: str, slope: float
) -> torch.Tensor:
    weight, bias = (None if each is None else each.float() for each in (weight, bias))
    y = functional.group_norm(x.float(), num_groups, weight, bias, eps)
    return _allocate_like(x).copy_(apply_activation(y, activation, slope))


def _allocate_like(x: torch.Tensor) -> torch.Tensor:
    return allocate_like(x, find_layout(x.shape, x.stride()) or CHANNELS_FIRST)


def _make_fake(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return _allocate_like(x)


def _run_on_gpu(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_groups: int,
    eps: float,
    activation: str,
    slope: float,
) -> torch.Tensor:
    layout = find_kernel_layout(x)
    x = x if layout else lay_out(x, CHANNELS_FIRST)
    is_last, channels = layout == CHANNELS_LAST, x.shape[1]
    pixels = math.prod(x.shape[2:])
    parameters = [None if each is None else each.contiguous() for each in (weight, bias)]
    has_float = all(each is None or each.dtype is torch.float32 for each in parameters)
    if not has_float:
        parameters = [None if each is None else each.to(x.dtype) for each in parameters]
    z = _allocate_like(x)
    vector = count_vector_elements(channels if is_last else pixels, x, z)
    kernels = _load_kernels(x.device, x.dtype, activation, vector, is_last, has_float)
    make_launch = _divide_last if is_last else _divide_first
    num_multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    launch, parts = make_launch(x.shape[0], channels, pixels, vector, CTAS_PER_MULTIPROCESSOR * num_multiprocessors)
    workspace, affine = (
        torch.empty(size, 2, channels, dtype=torch.float32, device=x.device)
        for size in (x.shape[0] * parts, x.shape[0])
    )
    sizes = [channels, pixels] if is_last else [x.shape[0], channels, pixels]
    kernels.launch("sum_channels", launch, [x, workspace, *sizes])
    group_channels = channels // num_groups
    channels_per_cta = group_channels * max(1, COMBINED_CHANNELS // group_channels)
    grid = ceil_div(channels, channels_per_cta), x.shape[0], 1
    finish = LaunchConfig(grid, (COMBINED_CHANNELS, COMBINING_THREADS, 1))
    numbers = [channels, pixels, parts, group_channels, channels_per_cta, eps]
    kernels.launch("finish", finish, [x, workspace, *parameters, affine, *numbers])
    kernels.launch("apply", launch, [x, affine, z, *sizes, slope])
    return z


def _divide_last(samples: int, channels: int, pixels: int, vector: int, num_ctas: int) -> tuple[LaunchConfig, int]:
    """Return the launch of the kernels that read an array (samples, pixels, channels), and the parts of the pixels."""
    vectors = channels // vector
    num_groups = ceil_div(vectors, MAX_COLUMNS)
    columns = ceil_div(vectors, num_groups)
    rows = THREADS // columns
    parts = max(1, min(num_ctas // (num_groups * samples), ceil_div(pixels, VECTORS_IN_FLIGHT * rows)))
    return LaunchConfig((num_groups, parts, samples), (columns, rows, 1)), parts


def _divide_first(samples: int, channels: int, pixels: int, vector: int, num_ctas: int) -> tuple[LaunchConfig, int]:
    """Return the launch of the kernels that read an array (samples, channels, pixels), and the parts of the pixels."""
    vectors = pixels // vector
    columns = min(THREADS, max(MIN_ROW_THREADS, 1 << (vectors - 1).bit_length()))
    rows = THREADS // columns
    num_groups = ceil_div(samples * channels, rows)
    parts = max(1, min(num_ctas // num_groups, ceil_div(vectors, VECTORS_IN_FLIGHT * columns)))
    return LaunchConfig((num_groups, parts, 1), (columns, rows, 1)), parts


@functools.cache
def _load_kernels(
    device: torch.device, dtype: torch.dtype, activation: str, vector: int, is_channels_last: bool, has_float: bool
) -> SourceKernels:
    """Return the kernels on a device; they must not be loaded during a graph capture."""
    source = make_source(
        KERNEL_DTYPES[dtype],
        activation,
        vector=vector,
        is_channels_last=is_channels_last,
        has_float_parameters=has_float,
    )
    return SourceKernels(source, device)


group_norm_act = define_operator(
    "group_norm_act(Tensor x, Tensor? weight, Tensor? bias, int num_groups, float eps, str activation, float slope)"
    " -> Tensor",
    cpu=_run_on_cpu,
    cuda=_run_on_gpu,
    fake=_make_fake,
)
