"""Launches of the kernels of batch normalizations in training, on tensors of an NVIDIA GPU that are channels last."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.torch.batch_norm_source import (
    APPLY,
    BINARY_ACTIVATIONS,
    COMBINED_CHANNELS,
    COMBINING_THREADS,
    GRADIENTS,
    NO_SECOND,
    ROWS_IN_FLIGHT,
    SECOND_ARRAY,
    SECOND_OF_SAMPLES,
    STATS,
    THREADS,
    make_source,
)
from tvmconv.torch.conv_call import KERNEL_DTYPES
from tvmconv.torch.source_kernels import VECTOR_BYTES, SourceKernels, count_vector_elements

MAX_COLUMNS = 32  # threads of a CTA with different channels: 512 contiguous bytes of a row
# CTAs per multiprocessor of the kernels that read the arrays, as far as their registers suffice.
STATS_CTAS, APPLY_CTAS, GRADIENT_CTAS = 4, 3, 2


@dataclass(frozen=True)
class _Grid:
    """The division of an array (rows, channels) among the threads of a GPU."""

    rows: int
    channels: int
    columns: int  # threads of a CTA with different channels
    grid: tuple[int, int]  # CTAs along the channels, and along the rows

    @classmethod
    def for_tensor(cls, x: torch.Tensor, vector: int, ctas_per_multiprocessor: int) -> _Grid:
        """Return the division of a tensor, such that all CTAs run at the same time."""
        channels = x.shape[1]
        vectors = channels // vector
        num_groups = ceil_div(vectors, MAX_COLUMNS)
        columns, rows = ceil_div(vectors, num_groups), x.numel() // channels
        num_ctas = ctas_per_multiprocessor * torch.cuda.get_device_properties(x.device).multi_processor_count
        max_parts = ceil_div(rows, ROWS_IN_FLIGHT * (THREADS // columns))
        return cls(rows, channels, columns, (num_groups, max(1, min(num_ctas // num_groups, max_parts))))

    @property
    def launch(self) -> LaunchConfig:
        """Launch of a kernel that reads the array."""
        return LaunchConfig((*self.grid, 1), (self.columns, THREADS // self.columns, 1))

    @property
    def combining_launch(self) -> LaunchConfig:
        """Launch of a kernel that adds up the workspace of a reduction."""
        return LaunchConfig(
            (ceil_div(self.channels, COMBINED_CHANNELS), 1, 1), (COMBINED_CHANNELS, COMBINING_THREADS, 1)
        )

    def allocate_workspace(self, x: torch.Tensor) -> torch.Tensor:
        """Return memory for the sums of a reduction."""
        return torch.empty(self.grid[1], 2, self.channels, dtype=torch.float32, device=x.device)


def compute_stats(x: torch.Tensor) -> torch.Tensor:
    """Return mean and biased variance of each channel, of shape (2, channels), in float32."""
    vector = count_vector_elements(x.shape[1], x)
    kernels = _load_kernels(x.device, STATS, x.dtype, "", vector)
    grid = _Grid.for_tensor(x, vector, STATS_CTAS)
    stats = torch.empty(2, grid.channels, dtype=torch.float32, device=x.device)
    workspace = grid.allocate_workspace(x)
    kernels.launch("sum_elements", grid.launch, [x, workspace, grid.rows, grid.channels])
    numbers = [grid.grid[1], grid.rows, grid.channels]
    kernels.launch("finish_stats", grid.combining_launch, [x, workspace, stats, *numbers])
    return stats


def apply(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    stats: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return activation(normalized x + residual), and a mask of the activation's derivative; None for no mask."""
    vector, mask = count_vector_elements(x.shape[1], x, residual), None
    if can_mask(x, residual, activation):
        if vector < get_mask_elements(x):  # the memory of a tensor is not aligned
            x, residual = x.clone(), residual.clone() if residual is not None else None
            vector = get_mask_elements(x)
        mask = torch.empty(x.numel() // vector, dtype=torch.uint8, device=x.device)
    options = residual is not None, NO_SECOND, mask is not None
    kernels = _load_kernels(x.device, APPLY, x.dtype, activation, vector, *options)
    grid, z = _Grid.for_tensor(x, vector, APPLY_CTAS), torch.empty_like(x)
    kernels.launch("apply", grid.launch, [x, residual, z, mask, stats, weight, bias, grid.rows, grid.channels, eps])
    return z, mask


def can_mask(x: torch.Tensor, residual: torch.Tensor | None, activation: str) -> bool:
    """Return whether `apply` stores a mask, with which the residual need not be read again."""
    return residual is not None and activation in BINARY_ACTIVATIONS and x.shape[1] % get_mask_elements(x) == 0


def get_mask_elements(x: torch.Tensor) -> int:
    """Return the number of elements of a tensor that share a byte of a mask."""
    return VECTOR_BYTES // x.element_size()


def differentiate(
    gradients: Sequence[torch.Tensor],
    x: torch.Tensor,
    residual: torch.Tensor | None,
    stats: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradient of x, those of weight and bias of shape (2, channels), and that of the residual.

    Args:
        gradients: One or two tensors, whose sum is the gradient of the result. The second one may be a matrix with a
            number for each channel of each sample.
        x: Input of the normalization.
        residual: Summand of its result before the activation; None for none, or with a mask.
        stats: Mean and biased variance of each channel.
        weight: Factor of each channel; None for 1.
        bias: Summand of each channel; None for 0.
        eps: Summand of the variance.
        activation: Name of the activation.
        mask: Mask that `apply` returned; None for none.
    """
    vector = count_vector_elements(x.shape[1], x, residual, *gradients)
    if mask is not None and vector < get_mask_elements(x):  # the memory of a tensor is not aligned
        x, gradients = x.clone(), [each.clone() for each in gradients]
        vector = get_mask_elements(x)
    has_residual = residual is not None or mask is not None
    second_kind = NO_SECOND
    if len(gradients) > 1:
        second_kind = SECOND_OF_SAMPLES if gradients[1].dim() < x.dim() else SECOND_ARRAY
    options = has_residual, second_kind, mask is not None
    kernels = _load_kernels(x.device, GRADIENTS, x.dtype, activation, vector, *options)
    grid, dx = _Grid.for_tensor(x, vector, GRADIENT_CTAS), torch.empty_like(x)
    dresidual = torch.empty_like(x) if has_residual else None
    parameter_gradients = torch.empty(2, grid.channels, dtype=torch.float32, device=x.device)
    workspace = grid.allocate_workspace(x)
    first, second = gradients if len(gradients) > 1 else (*gradients, None)
    parameters = [stats, weight, bias, grid.rows, grid.channels, grid.rows // x.shape[0], eps]
    arrays = [x, residual, mask, first, second, dresidual, workspace]
    kernels.launch("sum_gradients", grid.launch, [*arrays, *parameters])
    numbers = [grid.grid[1], grid.channels, eps]
    kernels.launch("finish_gradients", grid.combining_launch, [workspace, stats, parameter_gradients, *numbers])
    if dresidual is not None:
        first, second = dresidual, None
    kernels.launch("apply_gradients", grid.launch, [x, first, second, dx, parameter_gradients, *parameters])
    return dx, parameter_gradients, dresidual


@functools.cache
def _load_kernels(
    device: torch.device,
    kernels: str,
    dtype: torch.dtype,
    activation: str,
    vector: int,
    has_residual: bool = False,
    second: str = NO_SECOND,
    has_mask: bool = False,
) -> SourceKernels:
    """Return the kernels on a device; they must not be loaded during a graph capture."""
    names = kernels, KERNEL_DTYPES[dtype], activation
    source = make_source(*names, vector=vector, has_residual=has_residual, second=second, has_mask=has_mask)
    return SourceKernels(source, device)
