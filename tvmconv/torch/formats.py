"""The memory format that a model's convolutions are fastest in, whatever the model is given in.

Tensor cores want channels last, as PyTorch's own kernels for them do; in float32 without TF32 our kernels are faster
with channels first. A model that lies otherwise is laid out so inside: its input is converted once, and what it gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tvmconv.torch.layer import tf32_allowed

FORMATS = {"channels last": torch.channels_last, "channels first": torch.contiguous_format}


def fastest_format(model: torch.nn.Module, arguments: Sequence[Any], place: torch.device) -> str | None:
    """The format, of `FORMATS`, that a model is to be laid out in; None if it lies so already, or need not.

    Args:
        model: whose two-dimensional convolutions count.
        arguments: its input.
        place: where it runs; on the CPU no format is better.
    """
    convolutions = [module for module in model.modules() if type(module) is torch.nn.Conv2d]
    if place.type != "cuda" or not convolutions:
        return None
    dtype = convolutions[0].weight.dtype
    if torch.is_autocast_enabled(place.type):
        dtype = torch.get_autocast_dtype(place.type)
    name = "channels first" if dtype is torch.float32 and not tf32_allowed() else "channels last"
    tensors = [*arguments, *(module.weight for module in convolutions)]
    return None if all(_lies(tensor, FORMATS[name]) for tensor in tensors) else name


def format_of(values: Iterable[Any]) -> torch.memory_format | None:
    """The format that images among some values have in common; None if they have none, or there are none."""
    images = [value for value in values if isinstance(value, torch.Tensor) and value.dim() == 4]
    found = [each for each in FORMATS.values() if images and all(_lies(image, each) for image in images)]
    return found[0] if len(found) == 1 else None


def laid(value: Any, memory_format: torch.memory_format) -> Any:
    """A value whose images lie so; tuples, lists and dictionaries are looked into."""
    if isinstance(value, torch.Tensor):
        return value.contiguous(memory_format=memory_format) if value.dim() == 4 else value
    if type(value) in (tuple, list):
        return type(value)(laid(each, memory_format) for each in value)
    if type(value) is dict:
        return {name: laid(each, memory_format) for name, each in value.items()}
    return value


def lay_weights(model: torch.nn.Module, formats: Mapping[int, torch.memory_format]) -> None:
    """Have the weights of a model's convolutions lie in memory formats, which are told by axes of space."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.conv._ConvNd) and not torch.nn.parameter.is_lazy(module.weight):
            weight = module.weight
            if memory_format := formats.get(weight.dim() - 2):
                weight.data = weight.data.contiguous(memory_format=memory_format)


def _lies(value: Any, memory_format: torch.memory_format) -> bool:
    images = isinstance(value, torch.Tensor) and value.dim() == 4
    return not images or value.is_contiguous(memory_format=memory_format)
