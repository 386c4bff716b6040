"""Constant folding in a traced graph: values that depend on parameters and buffers only, such as a computed weight.

A weight may be a parameter, or the result of weight normalization, weight standardization or another
parametrization. A normalization with constant statistics may be written as a product and a sum. All of these are nodes
that read no input of the graph. A kernel's packed weight is computed from their values, and again when a parameter or
buffer changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from tvmconv.torch.torch_modules import has_hooks

PURE_MODULES = ("torch", "_operator", "operator", "builtins", "math")  # top packages of functions that may be called
PARAMETRIZATION_MODULES = ("torch.nn.utils.parametrize", "torch.nn.utils.parametrizations")
WRITING_METHODS = ("copy_", "data", "numpy", "item", "tolist")
MAX_NODES = 64  # of the computation of one constant


@dataclass(frozen=True)
class _Reference:
    """The result of an earlier step of a computation."""

    index: int


@dataclass(frozen=True)
class _Step:
    """One step: the operation of a node, and its target, whose module is an object."""

    op: str
    target: Any
    owner: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class GraphConstant:
    """A value that is computed from parameters and buffers, which are read anew at each computation.

    It refers to modules and functions instead of graph nodes, so that a copy of a model has constants of its own.
    """

    def __init__(self, steps: tuple[_Step, ...]) -> None:
        self._steps = steps

    @classmethod
    def from_attribute(cls, owner: torch.nn.Module, name: str) -> GraphConstant:
        """Return the constant that is an attribute of a module."""
        return cls((_Step("get_attr", name, owner, (), {}),))

    @classmethod
    def from_number(cls, number: float) -> GraphConstant:
        """Return a number as a tensor without axes in float64."""
        return cls((_Step("tensor", torch.tensor(number, dtype=torch.float64), None, (), {}),))

    @torch.no_grad()
    def compute(self) -> Any:
        """Return the current value; that of an attribute is the tensor itself."""
        results: list[Any] = []
        for step in self._steps:
            args, kwargs = tree_map_only(
                _Reference, lambda reference: results[reference.index], (step.args, step.kwargs)
            )
            if step.op == "tensor":
                result = step.target
            elif step.op == "get_attr":
                result = getattr(step.owner, step.target)
            elif step.op == "call_module":
                result = step.owner(*args, **kwargs)
            elif step.op == "call_method":
                result = getattr(args[0], step.target)(*args[1:], **kwargs)
            else:
                result = step.target(*args, **kwargs)
            results.append(result)
        return results[-1]

    def list_sources(self) -> list[torch.Tensor]:
        """Return the parameters and buffers that the value is computed from."""
        sources: list[torch.Tensor] = []
        for step in self._steps:
            if step.op == "get_attr":
                sources.append(getattr(step.owner, step.target))
            elif step.op == "call_module":
                sources += [*step.owner.parameters(), *step.owner.buffers()]
            elif step.op == "tensor":
                sources.append(step.target)
        return sources

    @property
    def is_attribute(self) -> bool:
        """Whether the value is an attribute of a module, or a given tensor, without any computation."""
        return len(self._steps) == 1 and self._steps[0].op in ("get_attr", "tensor")

    @property
    def is_number(self) -> bool:
        """Whether the value is a given number."""
        return len(self._steps) == 1 and self._steps[0].op == "tensor"

    @property
    def attribute(self) -> tuple[torch.nn.Module, str] | None:
        """The module and the name of the attribute that the value is; None for any other value."""
        (step, *others) = self._steps
        return None if others or step.op != "get_attr" else (step.owner, step.target)


class ConstantFinder:
    """A finder of the constants of a graph.

    Args:
        graph: The traced graph.
        values: Values of placeholders that are parameters or buffers of the model.
    """

    def __init__(self, graph: fx.GraphModule, values: Mapping[fx.Node, torch.Tensor] | None = None) -> None:
        self._graph, self._values = graph, values or {}
        self._modules = dict(graph.named_modules())
        self._found: dict[fx.Node, GraphConstant | None] = {}

    def find(self, value: Any) -> GraphConstant | None:
        """Return the constant of a node's value, or of a number; None if the node is none."""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return GraphConstant.from_number(float(value))
        if not isinstance(value, fx.Node):
            return None
        if value not in self._found:
            self._found[value] = self._make_constant(value)
        return self._found[value]

    def _make_constant(self, node: fx.Node) -> GraphConstant | None:
        nodes: dict[fx.Node, None] = {}
        if not self._collect(node, nodes) or len(nodes) > MAX_NODES:
            return None
        order = {each: index for index, each in enumerate(nodes)}
        constant = GraphConstant(tuple(self._make_step(each, order) for each in nodes))
        try:
            value = constant.compute()
            if not isinstance(value, torch.Tensor):
                return None
            is_repeatable = constant.is_attribute or torch.equal(value, constant.compute())
        except Exception:  # the code of a model may raise anything
            return None
        return constant if is_repeatable else None  # random numbers, for example, are no constant

    def _collect(self, node: fx.Node, nodes: dict[fx.Node, None]) -> bool:
        """Add the nodes of a computation in order; return whether all of them are constants."""
        if node in nodes:
            return True
        if len(nodes) > MAX_NODES or not self._may_be_constant(node):
            return False
        if not all(self._collect(each, nodes) for each in node.all_input_nodes):
            return False
        nodes[node] = None
        return True

    def _may_be_constant(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return node in self._values
        if node.op == "get_attr":
            return isinstance(self._find_attribute(node), torch.Tensor)
        if node.op == "call_module":
            module = self._modules[str(node.target)]
            is_parametrization = type(module).__module__ in PARAMETRIZATION_MODULES
            return is_parametrization and not module.training and not has_hooks(module)
        if node.op == "call_method":
            name = str(node.target)
            return bool(node.all_input_nodes) and not name.endswith("_") and name not in WRITING_METHODS
        if node.op != "call_function" or not node.all_input_nodes or "out" in node.kwargs:
            return False
        name = getattr(node.target, "__name__", "")
        package = (getattr(node.target, "__module__", None) or "torch").partition(".")[0]
        return package in PURE_MODULES and (name == "getattr" or not name.endswith("_")) and name != "setitem"

    def _find_attribute(self, node: fx.Node) -> Any:
        owner, _, name = str(node.target).rpartition(".")
        return getattr(self._modules.get(owner), name, None)

    def _make_step(self, node: fx.Node, order: Mapping[fx.Node, int]) -> _Step:
        if node.op == "placeholder":
            return _Step("tensor", self._values[node], None, (), {})
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            return _Step("get_attr", name, self._modules[owner], (), {})
        module = self._modules[str(node.target)] if node.op == "call_module" else None
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: _Reference(order[each]))
        target = None if node.op == "call_module" else node.target
        return _Step(node.op, target, module, _to_plain(args), _to_plain(kwargs))


def _to_plain(value: Any) -> Any:
    """Return the immutable containers of a graph as plain ones, which can be copied."""
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        plain = [_to_plain(item) for item in value]
        return tuple(plain) if isinstance(value, tuple) else plain
    return value
