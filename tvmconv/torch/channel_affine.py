"""The folding of factors and summands per channel, which follow a convolution, into its weight and bias.

The operations are batch normalizations with constant statistics, as modules or calls, and products, quotients, sums and
differences with constants. A frozen batch normalization written as a product and a sum, or a layer scale, is one of
them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from tvmconv.torch.graph_constants import ConstantFinder, GraphConstant
from tvmconv.torch.torch_modules import has_hooks, is_plain_instance

NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
NORM_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
NORM_TENSORS = NORM_ARGUMENTS[1:5]
DEFAULT_EPS = 1e-5  # PyTorch's default
FUNCTIONS = {
    "mul": (operator.mul, operator.imul, torch.mul, torch.multiply),
    "add": (operator.add, operator.iadd, torch.add),
    "sub": (operator.sub, operator.isub, torch.sub, torch.subtract),
    "div": (operator.truediv, operator.itruediv, torch.div, torch.true_divide),
}
METHODS = {name: (name, f"{name}_") for name in FUNCTIONS}
IN_PLACE_TARGETS = (operator.imul, operator.iadd, operator.isub, operator.itruediv)

Factors = tuple["torch.Tensor | None", "torch.Tensor | None"]  # factor and summand per channel in float64


class FunctionalNorm:
    """A call of `functional.batch_norm` with constant statistics, in place of a module such as `nn.BatchNorm2d`.

    It owns no tensor, so that a tensor that the model replaces is seen.

    Args:
        tensors: The tensors by the names in `NORM_TENSORS`; a weight or bias may be missing.
        eps: Summand of the variance.
    """

    def __init__(self, tensors: Mapping[str, GraphConstant], eps: float) -> None:
        self._tensors, self.eps = dict(tensors), eps

    def _compute(self, name: str) -> Any:
        return self._tensors[name].compute() if name in self._tensors else None

    @property
    def running_mean(self) -> torch.Tensor:
        """The current mean of each channel."""
        return self._compute("running_mean")

    @property
    def running_var(self) -> torch.Tensor:
        """The current variance of each channel."""
        return self._compute("running_var")

    @property
    def weight(self) -> torch.Tensor | None:
        """The current factor of each channel, if there is one."""
        return self._compute("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """The current summand of each channel, if there is one."""
        return self._compute("bias")

    def list_sources(self) -> list[torch.Tensor]:
        """Return the tensors that factor and summand are computed from."""
        return [tensor for constant in self._tensors.values() for tensor in constant.list_sources()]

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """Normalize a tensor by PyTorch."""
        return functional.batch_norm(y, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class ConstantAffine:
    """A product, quotient, sum or difference with a constant that has one number, or one per channel.

    Args:
        name: `mul`, `div`, `add`, `sub`, or `rsub`, which subtracts from the constant.
        constant: The constant.
    """

    def __init__(self, name: str, constant: GraphConstant) -> None:
        self.name, self._constant = name, constant

    def list_sources(self) -> list[torch.Tensor]:
        """Return the tensors that the constant is computed from."""
        return self._constant.list_sources()

    def fold(self) -> Factors:
        """Return factor and summand per channel; None for one that changes nothing."""
        number = self._constant.compute().detach().double().flatten()
        if self.name in ("mul", "div"):
            return (number if self.name == "mul" else 1 / number), None
        if self.name == "rsub":
            return torch.full_like(number, -1.0), number
        return None, (number if self.name == "add" else -number)

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """Compute the operation by PyTorch."""
        value = self._constant.compute()
        if self.name == "rsub":
            return value - y
        return FUNCTIONS[self.name][0](y, value)


def fold_affine(affine: Any) -> Factors:
    """Return factor and summand per channel of an operation in float64, so that weights are rounded once."""
    if isinstance(affine, ConstantAffine):
        return affine.fold()
    factor = (affine.running_var.double() + affine.eps).rsqrt()
    if affine.weight is not None:
        factor = factor * affine.weight.double()
    shift = -affine.running_mean.double() * factor
    return factor, shift if affine.bias is None else shift + affine.bias.double()


def list_affine_sources(affine: Any) -> list[torch.Tensor]:
    """Return the tensors that factor and summand of an operation are computed from.

    A training step of a normalization writes to its running statistics without a new version. The number of batches is
    therefore among the tensors, because it gets one.
    """
    if not isinstance(affine, torch.nn.Module):
        sources: list[torch.Tensor] = affine.list_sources()
        return sources
    tensors = [*affine._parameters.values(), *affine._buffers.values()]
    return [tensor for tensor in tensors if tensor is not None]


def match_affine(
    node: fx.Node, input_node: fx.Node, modules: Mapping[str, Any], constants: ConstantFinder, conv: Any
) -> Any:
    """Return the operation that a node computes from its input per channel; None if it is another one."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        is_norm = is_plain_instance(module, NORMS) and node.args == (input_node,) and not node.kwargs
        is_constant = is_norm and module.track_running_stats and module.running_mean is not None
        return module if is_constant and not module.training and not has_hooks(module) else None
    if node.op == "call_function" and node.target is functional.batch_norm:
        return _match_functional_norm(node, input_node, constants)
    return _match_arithmetic(node, input_node, constants, conv)


def _match_functional_norm(node: fx.Node, input_node: fx.Node, constants: ConstantFinder) -> FunctionalNorm | None:
    """Return a call of `functional.batch_norm` with constant statistics; None if they are computed at each call."""
    arguments = dict(zip(NORM_ARGUMENTS, node.args, strict=False)) | node.kwargs
    eps = arguments.get("eps", DEFAULT_EPS)
    if arguments.get("training", False) or not isinstance(eps, float) or arguments["input"] is not input_node:
        return None
    nodes = {name: arguments[name] for name in NORM_TENSORS if arguments.get(name) is not None}
    tensors = {name: constant for name, node in nodes.items() if (constant := constants.find(node))}
    if len(tensors) < len(nodes) or not {"running_mean", "running_var"} <= tensors.keys():
        return None
    return FunctionalNorm(tensors, eps)


def _match_arithmetic(
    node: fx.Node, input_node: fx.Node, constants: ConstantFinder, conv: Any
) -> ConstantAffine | None:
    table: Mapping[str, tuple[Any, ...]] = METHODS if node.op == "call_method" else FUNCTIONS
    name = next((name for name, targets in table.items() if node.target in targets), None)
    if node.op not in ("call_function", "call_method") or name is None or len(node.args) != 2 or node.kwargs:
        return None
    is_first = node.args[0] is input_node
    other = node.args[1 if is_first else 0]
    if not is_first and (node.op == "call_method" or node.target in IN_PLACE_TARGETS or name == "div"):
        return None
    constant = None if other is input_node else constants.find(other)
    if constant is None or not _is_per_channel(constant.compute(), conv):
        return None
    return ConstantAffine("rsub" if name == "sub" and not is_first else name, constant)


def _is_per_channel(value: torch.Tensor, conv: Any) -> bool:
    """Return whether a tensor has one number, or one per output channel of a convolution along the channel axis."""
    spatial_ndim, num_channels = len(conv.kernel_size), count_output_channels(conv)
    if value.numel() == 1:
        return value.dim() <= spatial_ndim + 2
    axis = value.dim() - spatial_ndim - 1  # the channel axis of images is before the spatial ones
    return axis in (0, 1) and value.shape[axis] == num_channels == value.numel()


def count_output_channels(conv: Any) -> int:
    """Return the number of output channels of a convolution."""
    shape = conv.weight.shape
    return int(shape[1] * conv.groups if conv.transposed else shape[0])
