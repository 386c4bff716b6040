"""PyTorch's modules that tvmconv knows, and whether a module computes what its class in PyTorch computes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch.nn.utils import parametrize

# Convolutions with their number of spatial axes.
CONVOLUTIONS: dict[type, int] = {
    getattr(torch.nn, f"{name}{ndim}d"): ndim for name in ("Conv", "ConvTranspose") for ndim in (1, 2, 3)
}
HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# A subclass computes the same as its class in PyTorch if it inherits these methods.
COMPUTING_METHODS = ("forward", "_conv_forward")


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether hooks are registered that run when the module is called."""
    return any(getattr(module, name) for name in HOOK_ATTRIBUTES)


def is_plain_instance(module: object, classes: Iterable[type]) -> TypeGuard[torch.nn.Module]:
    """Return whether a module has one of some classes, or a subclass that computes the same from the same tensors."""
    module_type = type(module)
    for each in classes:
        if module_type is each:
            return True
        if issubclass(module_type, each) and not parametrize.is_parametrized(module):
            names = [name for name in COMPUTING_METHODS if hasattr(each, name)]
            if all(getattr(module_type, name) is getattr(each, name) for name in names):
                return True
    return False


def inherits_forward(module: torch.nn.Module) -> bool:
    """Return whether a module of the user's own class runs the code of a class in `torch.nn` alone."""
    methods = [getattr(type(module), name, None) for name in COMPUTING_METHODS]
    modules = [method.__module__ for method in methods if method is not None]
    is_container = isinstance(module, (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict))
    return not is_container and all(name.startswith("torch.nn.modules.") for name in modules)


def contains_convolution(module: torch.nn.Module) -> bool:
    """Return whether a module may compute a convolution: it has one, or a parameter with spatial axes."""
    has_layer = any(isinstance(each, torch.nn.modules.conv._ConvNd) for each in module.modules())
    return has_layer or any(
        not torch.nn.parameter.is_lazy(parameter) and parameter.dim() > 2 for parameter in module.parameters()
    )
