"""Activations after a convolution, recognized by the values that they compute, however they are written.

An activation may be a module, a function, a method, or several operations, such as `x * torch.sigmoid(x)`. The
operations are evaluated on samples, and the values are compared with those of the epilogue operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from tvmconv.torch.graph_constants import ConstantFinder, GraphConstant
from tvmconv.torch.metadata_readers import is_metadata_reader
from tvmconv.torch.signature import ACTIVATIONS, SLOPE_OP
from tvmconv.torch.torch_modules import has_hooks, is_plain_instance

MAX_ACTIVATION_NODES = 16
# PyTorch's activations: modules have the same names without underscore, and functions that write to their input end in
# one.
ACTIVATION_NAMES = {
    *("relu", "relu6", "silu", "mish", "tanh", "sigmoid", "hardswish", "hardsigmoid", "leaky_relu", "elu", "selu"),
    *("celu", "rrelu", "threshold", "softplus", "gelu", "hardtanh", "clamp", "clip", "softsign", "logsigmoid"),
}
ARITHMETIC_NAMES = {
    *("mul", "imul", "multiply", "add", "iadd", "sub", "isub", "subtract", "rsub", "div", "truediv", "itruediv"),
    *("true_divide", "pow", "ipow", "square", "neg", "exp", "erf", "log", "log1p", "expm1", "reciprocal", "abs"),
    *("clamp_min", "clamp_max", "minimum", "maximum", "sqrt", "rsqrt", "hardsigmoid"),
}
MODULE_CLASSES = tuple(
    getattr(torch.nn, name)
    for name in dir(torch.nn)
    if name.lower() in {each.replace("_", "") for each in ACTIVATION_NAMES}
)
_LARGE = torch.logspace(1, 30, 60, dtype=torch.float64, device="cpu")  # tells limits apart
SAMPLES = torch.cat([torch.linspace(-8, 8, 257, dtype=torch.float64, device="cpu"), _LARGE, -_LARGE])
_POSITIVE = SAMPLES > 0
_MINUS_ONE = int((SAMPLES == -1.0).nonzero()[0])  # index of a sample


@dataclass(frozen=True)
class ActivationMatch:
    """An epilogue operation and the nodes that compute it, with the slope where it is `prelu`."""

    name: str
    nodes: tuple[fx.Node, ...]
    slope: GraphConstant | None = None


def match_activation(
    start: fx.Node, order: Mapping[fx.Node, int], modules: Mapping[str, Any], constants: ConstantFinder
) -> ActivationMatch | None:
    """Return the shortest activation of a node's value by its next readers; None if they compute none.

    All nodes but the last one of the match have no other readers.
    """
    readers = list_value_readers(start)
    if len(readers) == 1 and (slope := _find_parametric_slope(readers[0], start, modules, constants)):
        return ActivationMatch(SLOPE_OP, (readers[0],), slope)
    values, nodes = {start: SAMPLES.clone()}, list[fx.Node]()
    while len(nodes) < MAX_ACTIVATION_NODES:
        candidates = {reader for node in values for reader in list_value_readers(node)} - {*nodes}
        if not candidates:
            return None
        node = min(candidates, key=order.__getitem__)
        result = _evaluate(node, values, modules)
        if result is None:
            return None
        nodes.append(node)
        inner_readers = {reader for each in values for reader in list_value_readers(each)}
        values[node] = result
        if inner_readers <= {*nodes} and (match := _name_activation(result)):
            name, factor = match
            return ActivationMatch(name, tuple(nodes), None if factor is None else GraphConstant.from_number(factor))
    return None


def list_value_readers(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read a node's elements, and not only its shape or dtype."""
    return [user for user in node.users if not is_metadata_reader(user)]


def _find_parametric_slope(
    node: fx.Node, input_node: fx.Node, modules: Mapping[str, Any], constants: ConstantFinder
) -> GraphConstant | None:
    """Return the slope of a parametric ReLU of a node's value; None for other operations."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        if is_plain_instance(module, (torch.nn.PReLU,)) and not has_hooks(module) and node.args == (input_node,):
            return GraphConstant.from_attribute(module, "weight")
        return None
    is_call = node.op == "call_function" and getattr(node.target, "__name__", "") == "prelu"
    is_call = is_call or (node.op == "call_method" and node.target == "prelu")
    if not is_call or len(node.args) != 2 or node.args[0] is not input_node:
        return None
    return constants.find(node.args[1])


def _evaluate(node: fx.Node, values: Mapping[fx.Node, Any], modules: Mapping[str, Any]) -> torch.Tensor | None:
    """Return a node's result for the values of its inputs; None if it is not a pointwise operation on them."""
    if not values.keys() >= set(node.all_input_nodes):
        return None
    function = _find_pointwise_function(node, modules)
    if function is None:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        result = function(*args, **kwargs)
    except Exception:  # of any type, for arguments that the function does not take
        return None
    is_pointwise = isinstance(result, torch.Tensor) and result.shape == SAMPLES.shape
    return result if is_pointwise and result.dtype == SAMPLES.dtype else None


def _find_pointwise_function(node: fx.Node, modules: Mapping[str, Any]) -> Callable[..., Any] | None:
    if node.op == "call_module":
        module = modules[str(node.target)]
        is_random = isinstance(module, torch.nn.RReLU) and module.training
        is_known = is_plain_instance(module, MODULE_CLASSES) and not has_hooks(module) and not is_random
        return module if is_known else None
    is_method = node.op == "call_method"
    name = str(node.target) if is_method else getattr(node.target, "__name__", "")
    if name.removesuffix("_") not in ACTIVATION_NAMES | ARITHMETIC_NAMES:
        return None
    if name.startswith("rrelu") and (node.kwargs.get("training") or True in node.args):
        return None
    function = getattr(torch.Tensor, name, None) if is_method else node.target
    package = (getattr(function, "__module__", None) or "torch").partition(".")[0]
    return function if package in ("torch", "_operator", "operator") else None


def _name_activation(y: torch.Tensor) -> tuple[str, float | None] | None:
    """Return the epilogue operation with these values at `SAMPLES`, and its slope if it has one; None if none has."""
    for name, reference in ACTIVATIONS.items():
        if torch.allclose(y, reference(SAMPLES), rtol=1e-6, atol=1e-9):
            return name, None
    slope = -float(y[_MINUS_ONE])
    if slope != 1.0 and torch.allclose(y, torch.where(_POSITIVE, SAMPLES, slope * SAMPLES), rtol=1e-6, atol=1e-9):
        return SLOPE_OP, slope
    return None
