"""Launches of layer normalizations and element-wise operations in training, on tensors of an NVIDIA GPU.

Tensors are arrays (rows, channels) in memory: contiguous with the channels as last axis, or images channels last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.torch import elementwise_source, layer_norm_source
from tvmconv.torch.conv_call import KERNEL_DTYPES
from tvmconv.torch.elementwise_source import ROWS_IN_FLIGHT
from tvmconv.torch.source_kernels import VECTOR_BYTES, SourceKernels, count_vector_elements
from tvmconv.torch.typed_source import COMBINED_CHANNELS, COMBINING_THREADS, THREADS

MAX_COLUMNS = 32  # threads of a CTA with different channels
# CTAs per multiprocessor, as far as their registers suffice.
NORM_CTAS, NORM_GRADIENT_CTAS, ELEMENT_CTAS, ELEMENT_GRADIENT_CTAS = 4, 2, 4, 3
MAX_ROWS = 1 << 30


def normalize(
    x: torch.Tensor,
    x_bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    y: torch.Tensor | None,
    low: torch.Tensor | None,
    stats: torch.Tensor,
) -> None:
    """Write the layer normalization of x + x_bias over the last axis to one or two results, and its statistics."""
    vector, lanes, steps = _divide_row(x, y, low)
    kernels = _load_norm(x.device, vector, lanes, steps, _name_types(X=x, **_name_results(x, y, low)))
    channels, rows_per_cta = x.shape[-1], THREADS // lanes * _count_rows_in_flight(steps)
    rows = x.numel() // channels
    num_ctas = min(NORM_CTAS * _count_multiprocessors(x.device), ceil_div(rows, rows_per_cta))
    launch = LaunchConfig((num_ctas, 1, 1), (lanes, THREADS // lanes, 1))
    kernels.launch("layer_norm", launch, [x, x_bias, weight, bias, y, low, stats, rows, channels, eps])


def differentiate_norm(
    dy: torch.Tensor | None,
    dlow: torch.Tensor | None,
    x: torch.Tensor,
    x_bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of x, and those of weight, bias and, if there is one, x_bias, as rows of a tensor."""
    dx, num_sums = torch.empty_like(x), 2 if x_bias is None else 3
    vector, lanes, steps = _divide_row(x, dy, dlow)
    types, gradients = _name_types(X=x, **_name_results(x, dy, dlow)), (dy is not None, dlow is not None)
    kernels = _load_norm_backward(x.device, vector, lanes, steps, types, num_sums, *gradients)
    channels, rows_per_cta = x.shape[-1], THREADS // lanes * _count_rows_in_flight(steps)
    rows = x.numel() // channels
    num_ctas = min(NORM_GRADIENT_CTAS * _count_multiprocessors(x.device), ceil_div(rows, rows_per_cta))
    workspace = torch.empty(num_ctas, num_sums, channels, device=x.device)
    launch = LaunchConfig((num_ctas, 1, 1), (lanes, THREADS // lanes, 1))
    arrays = [dy, dlow, x, x_bias, weight, stats, dx, workspace]
    kernels.launch("layer_norm_backward", launch, [*arrays, rows, channels])
    return dx, _add_parts(kernels, workspace, num_ctas, (num_sums, channels))


def activate(x: torch.Tensor, bias: torch.Tensor | None, activation: str, channels: int) -> torch.Tensor:
    """Return activation(x + bias)."""
    z = torch.empty_like(x)
    vector = count_vector_elements(channels, x, z)
    launch, _ = _divide(x, channels, vector, ELEMENT_CTAS)
    kernels = _load_activation(x.device, vector, x.dtype, activation, False)
    kernels.launch("activate", launch, [x, bias, z, x.numel() // channels, channels])
    return z


def differentiate_activation(
    dz: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, activation: str, channels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the bias."""
    dx = torch.empty_like(x)
    vector = count_vector_elements(channels, dz, x, dx)
    launch, num_parts = _divide(x, channels, vector, ELEMENT_GRADIENT_CTAS)
    workspace = torch.empty(num_parts, channels, device=x.device)
    kernels = _load_activation(x.device, vector, x.dtype, activation, True)
    kernels.launch("activate_backward", launch, [dz, x, bias, dx, workspace, x.numel() // channels, channels])
    return dx, _add_parts(kernels, workspace, num_parts, (channels,))


def scale_and_add(
    z: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    noise: torch.Tensor | None,
    x: torch.Tensor,
    y: torch.Tensor | None,
    low: torch.Tensor | None,
    channels: int,
) -> None:
    """Write (z + bias) * scale * noise + x to one or two results."""
    vector = count_vector_elements(channels, z, x, y, low)
    kernels = _load_scale_add(z.device, vector, _name_types(Z=z, X=x, **_name_results(x, y, low)))
    launch, _ = _divide(z, channels, vector, ELEMENT_CTAS)
    arrays = [z, bias, scale, noise, x, y, low]
    kernels.launch("scale_add", launch, [*arrays, *_count_rows(z, channels)])


def differentiate_scale_add(
    dy: torch.Tensor | None,
    dlow: torch.Tensor | None,
    z: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    noise: torch.Tensor | None,
    dx: torch.Tensor | None,
    channels: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of z, and those of bias and scale as rows of a tensor; write that of x if there is memory.

    Without bias and scale, the second tensor is empty.
    """
    dz = torch.empty_like(z)
    vector = count_vector_elements(channels, dy, dlow, z, dz, dx)
    types = _name_types(Z=z, X=z if dx is None else dx, **_name_results(z, dy, dlow))
    kernels = _load_scale_add_backward(z.device, vector, types, dy is not None, dlow is not None)
    launch, num_parts = _divide(z, channels, vector, ELEMENT_GRADIENT_CTAS)
    workspace = None
    if bias is not None or scale is not None:
        workspace = torch.empty(num_parts, 2, channels, device=z.device)
    arrays = [dy, dlow, z, bias, scale, noise, dx, dz, workspace]
    kernels.launch("scale_add_backward", launch, [*arrays, *_count_rows(z, channels)])
    if workspace is None:
        return dz, torch.empty(0, device=z.device)
    return dz, _add_parts(kernels, workspace, num_parts, (2, channels))


def gate(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Return the product of images, channels last, with one number for each channel of each sample."""
    y, (samples, channels) = torch.empty_like(x), x.shape[:2]
    vector = count_vector_elements(channels, x, s, y)
    launch, _ = _divide(x, channels, vector, ELEMENT_CTAS, samples)
    kernels = _load_gate(x.device, vector, _name_types(X=x, S=s), False)
    kernels.launch("gate", launch, [x, s, y, x.numel() // channels // samples, channels])
    return y


def differentiate_gate(dy: torch.Tensor, x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of images, and of the numbers by which they were multiplied, in float32."""
    dx, (samples, channels) = torch.empty_like(x), x.shape[:2]
    vector = count_vector_elements(channels, dy, x, s, dx)
    launch, num_parts = _divide(x, channels, vector, ELEMENT_GRADIENT_CTAS, samples)
    workspace = torch.empty(samples, num_parts, channels, device=x.device)
    kernels = _load_gate(x.device, vector, _name_types(X=x, S=s), True)
    pixels = x.numel() // channels // samples
    kernels.launch("gate_backward", launch, [dy, x, s, dx, workspace, pixels, channels])
    return dx, _add_parts(kernels, workspace, num_parts, (channels,), samples)


def can_normalize(channels: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels can normalize rows of so many channels; tensors are aligned."""
    vector = math.gcd(channels, VECTOR_BYTES // dtype.itemsize)
    return layer_norm_source.choose_lanes(channels // vector) is not None


def _divide_row(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[int, int, int]:
    """Return the channels of a vector, the threads of a row, and the vectors of each of them."""
    vector = count_vector_elements(x.shape[-1], x, *others)
    choice = layer_norm_source.choose_lanes(x.shape[-1] // vector)
    if choice is None:
        raise RuntimeError(f"a layer normalization of {x.shape[-1]} channels: expected fewer, or aligned memory")
    return vector, *choice


def _count_rows_in_flight(steps: int) -> int:
    return 2 if steps <= 2 else 1


def _name_results(default: torch.Tensor, y: torch.Tensor | None, low: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return tensors with the types of both results; types of missing results do not matter."""
    present = next((each for each in (y, low) if each is not None), default)
    return {"Y": present if y is None else y, "LOW": present if low is None else low}


def _name_types(**tensors: torch.Tensor) -> tuple[tuple[str, str], ...]:
    return tuple((name, KERNEL_DTYPES[tensor.dtype]) for name, tensor in tensors.items())


def _count_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _count_rows(z: torch.Tensor, channels: int) -> tuple[int, int, int]:
    """Return rows, channels, and rows of a sample."""
    rows = z.numel() // channels
    return rows, channels, rows // z.shape[0]


def _divide(
    x: torch.Tensor, channels: int, vector: int, ctas_per_multiprocessor: int, samples: int = 1
) -> tuple[LaunchConfig, int]:
    """Return a launch whose CTAs run at the same time, and the number of parts of the rows of each sample."""
    vectors, rows = channels // vector, x.numel() // channels // samples
    num_groups = ceil_div(vectors, MAX_COLUMNS)
    columns = ceil_div(vectors, num_groups)
    num_ctas = ctas_per_multiprocessor * _count_multiprocessors(x.device)
    max_parts = ceil_div(rows, ROWS_IN_FLIGHT * (THREADS // columns))
    num_parts = max(1, min(ceil_div(num_ctas, num_groups * samples), max_parts))
    return LaunchConfig((num_groups, num_parts, samples), (columns, THREADS // columns, 1)), num_parts


def _add_parts(
    kernels: SourceKernels, workspace: torch.Tensor, num_parts: int, shape: Sequence[int], samples: int | None = None
) -> torch.Tensor:
    """Return the sums of the parts of a workspace, of each sample if there are several."""
    columns = math.prod(shape)
    results = torch.empty(*(() if samples is None else (samples,)), *shape, device=workspace.device)
    grid = (ceil_div(columns, COMBINED_CHANNELS), samples or 1, 1)
    launch = LaunchConfig(grid, (COMBINED_CHANNELS, COMBINING_THREADS, 1))
    kernels.launch("add_parts", launch, [workspace, results, num_parts, columns])
    return results


# Kernels must not be loaded during a graph capture.

TypeNames = tuple[tuple[str, str], ...]  # data types by the names of kernels' types


@functools.cache
def _load_norm(device: torch.device, vector: int, lanes: int, steps: int, types: TypeNames) -> SourceKernels:
    flight = _count_rows_in_flight(steps)
    return SourceKernels(layer_norm_source.make_forward_source(vector, lanes, steps, dict(types), flight), device)


@functools.cache
def _load_norm_backward(
    device: torch.device,
    vector: int,
    lanes: int,
    steps: int,
    types: TypeNames,
    num_sums: int,
    has_dy: bool,
    has_low: bool,
) -> SourceKernels:
    sizes, flight = (vector, lanes, steps, dict(types)), _count_rows_in_flight(steps)
    source = layer_norm_source.make_backward_source(*sizes, flight, num_sums=num_sums, has_dy=has_dy, has_low=has_low)
    return SourceKernels(source, device)


@functools.cache
def _load_activation(
    device: torch.device, vector: int, dtype: torch.dtype, activation: str, is_backward: bool
) -> SourceKernels:
    arguments = vector, KERNEL_DTYPES[dtype], activation
    return SourceKernels(elementwise_source.make_activation_source(*arguments, is_backward=is_backward), device)


@functools.cache
def _load_scale_add(device: torch.device, vector: int, types: TypeNames) -> SourceKernels:
    return SourceKernels(elementwise_source.make_scale_add_source(vector, dict(types)), device)


@functools.cache
def _load_scale_add_backward(
    device: torch.device, vector: int, types: TypeNames, has_dy: bool, has_low: bool
) -> SourceKernels:
    make_source = elementwise_source.make_scale_add_backward_source
    return SourceKernels(make_source(vector, dict(types), has_dy=has_dy, has_low=has_low), device)


@functools.cache
def _load_gate(device: torch.device, vector: int, types: TypeNames, is_backward: bool) -> SourceKernels:
    return SourceKernels(elementwise_source.make_gate_source(vector, dict(types), is_backward=is_backward), device)
