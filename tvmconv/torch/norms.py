"""Batch normalizations that a model calls as a function: `functional.batch_norm` with constant statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

NORM_PARAMETERS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
DEFAULT_EPS = 1e-5  # PyTorch's default


class FunctionalNorm:
    """A call of `functional.batch_norm` with the interface of a module such as `nn.BatchNorm2d`.

    It provides the attributes that `TunedConv` reads. It owns no tensor, so that a tensor that the model replaces is
    seen.

    Args:
        owner: Module that owns the tensors.
        names: Attribute names of running_mean, running_var, weight and bias in the owner; None for a weight or bias
            that the call leaves out.
        eps: Summand of the variance.
    """

    def __init__(self, owner: torch.nn.Module, names: dict[str, str | None], eps: float) -> None:
        self.owner, self.names, self.eps = owner, names, eps

    def _get_tensor(self, name: str) -> Any:
        attribute_name = self.names[name]
        return None if attribute_name is None else getattr(self.owner, attribute_name)

    @property
    def running_mean(self) -> torch.Tensor:
        """Mean of each channel."""
        return self._get_tensor("running_mean")

    @property
    def running_var(self) -> torch.Tensor:
        """Variance of each channel."""
        return self._get_tensor("running_var")

    @property
    def weight(self) -> torch.Tensor | None:
        """Factor of each channel."""
        return self._get_tensor("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """Summand of each channel."""
        return self._get_tensor("bias")

    @property
    def _parameters(self) -> dict[str, torch.Tensor | None]:
        return {"weight": self.weight, "bias": self.bias}

    @property
    def _buffers(self) -> dict[str, torch.Tensor]:
        return {"running_mean": self.running_mean, "running_var": self.running_var}

    @property
    def training(self) -> bool:
        """Whether the owner is in training mode."""
        return self.owner.training

    @property
    def _forward_hooks(self) -> Any:
        return self.owner._forward_hooks

    @property
    def _forward_pre_hooks(self) -> Any:
        return self.owner._forward_pre_hooks

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """Normalize a tensor by PyTorch."""
        return functional.batch_norm(y, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def match_functional_norm(node: fx.Node, modules: dict[str, Any]) -> FunctionalNorm | None:
    """Return the normalization with constant statistics that a graph node calls; None if there is none.

    Args:
        node: Node of the graph.
        modules: The graph's modules by path.
    """
    if node.op != "call_function" or node.target is not functional.batch_norm:
        return None
    arguments = dict(zip(NORM_PARAMETERS, node.args, strict=False)) | node.kwargs
    eps = arguments.get("eps", DEFAULT_EPS)
    if arguments.get("training", False) or not isinstance(eps, float):
        return None
    tensors = {name: arguments.get(name) for name in ("running_mean", "running_var", "weight", "bias")}
    given_tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if not {"running_mean", "running_var"} <= given_tensors.keys():
        return None
    if not all(isinstance(tensor, fx.Node) and tensor.op == "get_attr" for tensor in given_tensors.values()):
        return None  # a tensor is computed at each call
    owners = {str(tensor.target).rpartition(".")[0] for tensor in given_tensors.values()}
    owner = modules.get(owners.pop()) if len(owners) == 1 else None
    if owner is None or owner.training:
        return None
    return FunctionalNorm(owner, {name: _get_attribute_name(tensor) for name, tensor in tensors.items()}, eps)


def _get_attribute_name(tensor: Any) -> str | None:
    return None if tensor is None else str(tensor.target).rpartition(".")[2]
