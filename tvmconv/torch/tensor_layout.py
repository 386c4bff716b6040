"""PyTorch's tensors (N, C, space) in the layouts of workloads: strides, copies and new tensors.

PyTorch has no memory format for channels last along one spatial axis; strides express it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST, UNIFORM_LAYOUTS

MEMORY_FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}  # of channels last, by number of spatial axes


def name_layout(is_channels_last: bool) -> str:
    """Return the name of a uniform layout."""
    return CHANNELS_LAST if is_channels_last else CHANNELS_FIRST


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor (N, C, space) in a uniform layout, as a copy if necessary."""
    if layout != CHANNELS_LAST:
        return tensor.contiguous()
    memory_format = MEMORY_FORMATS.get(tensor.dim() - 2)
    if memory_format is None:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    return tensor.contiguous(memory_format=memory_format)


def compute_strides(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Return the strides of a new tensor (N, C, space) in a uniform layout."""
    order = [0, *range(2, len(shape)), 1] if layout == CHANNELS_LAST else range(len(shape))
    strides, stride = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = stride
        stride *= max(1, shape[axis])
    return tuple(strides)


def is_in_layout(shape: Sequence[int], stride: Sequence[int], layout: str) -> bool:
    """Return whether a tensor (N, C, space) is dense in a uniform layout; axes of one element have any stride."""
    strides = compute_strides(shape, layout)
    return all(size == 1 or given == expected for size, given, expected in zip(shape, stride, strides, strict=True))


def find_layout(shape: Sequence[int], stride: Sequence[int]) -> str | None:
    """Return the uniform layout of a tensor (N, C, space); None if it has both layouts or neither."""
    layouts = [layout for layout in UNIFORM_LAYOUTS if is_in_layout(shape, stride, layout)]
    return layouts[0] if len(layouts) == 1 else None


def allocate_like(
    tensor: torch.Tensor, layout: str, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return an uninitialized tensor on the device of another one, whose shape and dtype it has by default."""
    sizes = tensor.shape if shape is None else [*shape]
    return tensor.new_empty_strided(sizes, compute_strides(sizes, layout), dtype=dtype)
