"""The memory format that a model's convolutions are fastest in, whatever the model is given in.

Tensor cores want channels last, as PyTorch's own kernels for them do; in float32 without TF32 our kernels are faster
with channels first. A model that lies otherwise is laid out so inside: its input is converted once, and what it gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tvmconv.torch.layer import is_tf32_allowed

MEMORY_FORMAT_BY_NAME = {"channels last": torch.channels_last, "channels first": torch.contiguous_format}


def choose_memory_format(model: torch.nn.Module, arguments: Sequence[Any], torch_device: torch.device) -> str | None:
    """The format, of `MEMORY_FORMAT_BY_NAME`, that a model is to be laid out in; None if it lies so already, or need
    not.

    Args:
        model: whose two-dimensional convolutions count.
        arguments: its input.
        torch_device: where it runs; on the CPU no format is better.
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
    """The format that images among some values have in common; None if they have none, or there are none."""
    images = [value for value in values if isinstance(value, torch.Tensor) and value.dim() == 4]
    common_formats = [
        memory_format
        for memory_format in MEMORY_FORMAT_BY_NAME.values()
        if images and all(_has_memory_format(image, memory_format) for image in images)
    ]
    return common_formats[0] if len(common_formats) == 1 else None


def to_memory_format(value: Any, memory_format: torch.memory_format) -> Any:
    """A value whose images lie so; tuples, lists and dictionaries are looked into."""
    if isinstance(value, torch.Tensor):
        return value.contiguous(memory_format=memory_format) if value.dim() == 4 else value
    if type(value) in (tuple, list):
        return type(value)(to_memory_format(item, memory_format) for item in value)
    if type(value) is dict:
        return {name: to_memory_format(item, memory_format) for name, item in value.items()}
    return value


def convert_weight_memory_format(model: torch.nn.Module, formats_by_ndim: Mapping[int, torch.memory_format]) -> None:
    """Have the weights of a model's convolutions lie in memory formats, which are told by axes of space."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.conv._ConvNd) and not torch.nn.parameter.is_lazy(module.weight):
            weight = module.weight
            if memory_format := formats_by_ndim.get(weight.dim() - 2):
                weight.data = weight.data.contiguous(memory_format=memory_format)


def _has_memory_format(value: Any, memory_format: torch.memory_format) -> bool:
    images = isinstance(value, torch.Tensor) and value.dim() == 4
    return not images or value.is_contiguous(memory_format=memory_format)
