"""The choice of the memory format in which a model's convolutions are fastest.

Tensor cores are fastest with channels last, also in PyTorch's own kernels. In float32 without TF32, tvmconv's kernels
are faster with channels first. A model in the other format is converted: its weights once, its inputs and results per
call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tvmconv.torch.layer import is_tf32_allowed

MEMORY_FORMAT_BY_NAME = {"channels last": torch.channels_last, "channels first": torch.contiguous_format}


def choose_memory_format(model: torch.nn.Module, arguments: Sequence[Any], torch_device: torch.device) -> str | None:
    """Return the memory format, a name of `MEMORY_FORMAT_BY_NAME`, to which a model on a device should be converted.

    Its two-dimensional convolutions decide. The result is None if the model has that format already, or no format is
    faster, as on the CPU.
    """
    convolutions = [module for module in model.modules() if type(module) is torch.nn.Conv2d]
    if torch_device.type != "cuda" or not convolutions:
        return None
    dtype = convolutions[0].weight.dtype
    if torch.is_autocast_enabled(torch_device.type):
        dtype = torch.get_autocast_dtype(torch_device.type)
    name = "channels first" if dtype is torch.float32 and not is_tf32_allowed() else "channels last"
    tensors = [*arguments, *(module.weight for module in convolutions)]
    return None if all(_has_memory_format(tensor, MEMORY_FORMAT_BY_NAME[name]) for tensor in tensors) else name


def find_memory_format(values: Iterable[Any]) -> torch.memory_format | None:
    """Return the memory format that all images among some values share; None if there is none or it is ambiguous."""
    images = [value for value in values if isinstance(value, torch.Tensor) and value.dim() == 4]
    common_formats = [
        memory_format
        for memory_format in MEMORY_FORMAT_BY_NAME.values()
        if images and all(_has_memory_format(image, memory_format) for image in images)
    ]
    return common_formats[0] if len(common_formats) == 1 else None


def to_memory_format(values: Any, memory_format: torch.memory_format) -> Any:
    """Return values with the images among them, also in nested containers, in a memory format."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous(memory_format=memory_format) if tensor.dim() == 4 else tensor

    return tree_map_only(torch.Tensor, convert, values)


def convert_weight_memory_format(model: torch.nn.Module, formats_by_ndim: Mapping[int, torch.memory_format]) -> None:
    """Convert the weights of a model's convolutions to memory formats that are keyed by number of spatial axes."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.conv._ConvNd) and not torch.nn.parameter.is_lazy(module.weight):
            weight = module.weight
            if memory_format := formats_by_ndim.get(weight.dim() - 2):
                weight.data = weight.data.contiguous(memory_format=memory_format)


def _has_memory_format(value: Any, memory_format: torch.memory_format) -> bool:
    images = isinstance(value, torch.Tensor) and value.dim() == 4
    return not images or value.is_contiguous(memory_format=memory_format)
