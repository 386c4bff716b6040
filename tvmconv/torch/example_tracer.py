"""A trace of a model for the shapes of one call, whose Python code may look at shapes, dtypes and types.

`torch.fx` stops where a model compares a size or iterates over chunks. Here each traced value carries a fake tensor
with the shape, dtype and device that it has in the call, so that sizes are numbers and chunks are a tuple. The graph
holds for calls with the same shapes and dtypes only. Values of elements remain unknown, and code that depends on them
cannot be traced.

Source: `torch._subclasses.fake_tensor`, and the idea of `HFTracer` in the library transformers.
"""

from __future__ import annotations

import dis
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._C._functorch import peek_interpreter_stack
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

from tvmconv.errors import ModelError

TYPE_TESTS = frozenset({"isinstance", "__class__"})  # names in code that tests types
PLAIN_TYPES = (bool, int, float, str, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class TensorShape:
    """Shape, strides, dtype and device of a tensor argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def describes(self, value: Any) -> bool:
        """Return whether a value is such a tensor, of any strides."""
        if not isinstance(value, torch.Tensor):
            return False
        return tuple(value.shape) == self.shape and value.dtype is self.dtype and value.device == self.device


def describe_arguments(names: Mapping[str, Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, with `TensorShape` in place of tensors.

    `names` are the names and defaults of the parameters of `forward`.
    """

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            return TensorShape(tuple(value.shape), value.stride(), value.dtype, value.device)
        return value

    arguments = {**names, **dict(zip(names, args, strict=False)), **kwargs}
    return {name: tree_map(describe, value) for name, value in arguments.items()}


def is_example_call(example: Mapping[str, Any], names: Mapping[str, Any], args: Any, kwargs: Any) -> bool:
    """Return whether a call has tensors of the same shapes and dtypes as an example, and the same other arguments."""
    arguments = {**names, **dict(zip(names, args, strict=False)), **kwargs}
    if len(args) > len(names) or arguments.keys() != example.keys():
        return False
    for name, expected in example.items():
        value = arguments[name]
        if isinstance(expected, TensorShape):
            if not expected.describes(value):
                return False
        elif type(value) is not type(expected) or value != expected:
            return False
    return True


def can_specialize(arguments: Mapping[str, Any]) -> bool:
    """Return whether a graph can be traced for arguments that `describe_arguments` returned.

    They have to be tensors, numbers, flags, strings or None.
    """
    return all(isinstance(value, (TensorShape, bool, int, float, str, type(None))) for value in arguments.values())


@functools.cache
def list_testing_lines(code: CodeType) -> frozenset[int | None]:
    """Return the numbers of the lines of Python code that test types."""
    lines = {offset: line for start, end, line in code.co_lines() for offset in range(start, end)}
    return frozenset(lines[each.offset] for each in dis.get_instructions(code) if each.argval in TYPE_TESTS)


class ExampleProxy(fx.Proxy):
    """A proxy of a node with the value that the node has in the example, a fake tensor or a structure of some."""

    def __init__(self, node: fx.Node, tracer: Any, value: Any) -> None:
        super().__init__(node, tracer)
        self.value = value

    @property
    def __class__(self) -> Any:
        """A tensor's class, for Python code that tests types.

        C++ code that does so would read the proxy as a tensor, and crash. It is called by a line of Python without a
        test, as in `torch.as_tensor(x)`, or within a transform of `torch.func`.
        """
        frame = sys._getframe(1)
        is_tested = frame.f_lineno in list_testing_lines(frame.f_code) and peek_interpreter_stack() is None
        return torch.Tensor if is_tested and isinstance(self.value, torch.Tensor) else ExampleProxy

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("the class of a proxy cannot be set")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        own = getattr(self.value, name)
        return own if isinstance(own, PLAIN_TYPES) else super().__getattr__(name)

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[index] for index in range(len(self))])


class ExampleTracing:
    """The values of the nodes of a trace, computed with fake tensors.

    Args:
        root: The traced module.
        arguments: Arguments of its call, from `describe_arguments`.
    """

    def __init__(self, root: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._root, self._arguments = root, arguments
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._values: dict[fx.Node, Any] = {}
        self.is_evaluating = False

    def make_proxy(self, node: fx.Node, tracer: Any) -> Any:
        """Return what stands for a node's value in the model's code: a number, a tuple of proxies, or a proxy."""
        value = self._values[node] = self._evaluate(node)
        if isinstance(value, PLAIN_TYPES) and node.op != "placeholder":
            node.graph.erase_node(node)
            return value
        proxy = ExampleProxy(node, tracer, value)
        if type(value) in (tuple, list):
            return type(value)(
                tracer.create_proxy("call_function", operator.getitem, (proxy, index), {})
                for index in range(len(value))
            )
        return proxy

    def _evaluate(self, node: fx.Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self._values.__getitem__)
        target: Any = node.target
        self.is_evaluating = True
        try:
            with torch.no_grad(), self._mode:
                if node.op == "placeholder":
                    return self._make_argument(str(target))
                if node.op == "get_attr":
                    return functools.reduce(getattr, target.split("."), self._root)
                function: Callable[..., Any] = target
                if node.op == "call_method":
                    function, args = getattr(args[0], target), args[1:]
                elif node.op == "call_module":
                    function = self._root.get_submodule(target)
                return function(*args, **kwargs)
        finally:
            self.is_evaluating = False

    def _make_argument(self, name: str) -> Any:
        value = self._arguments[name.removesuffix("_1") if name not in self._arguments else name]
        if not isinstance(value, TensorShape):
            return value
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)


def list_fixed_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that are no tensors."""
    if not can_specialize(arguments):
        raise ModelError(f"an argument is {type(tree_leaves(dict(arguments))[0]).__name__}")
    return {name: value for name, value in arguments.items() if not isinstance(value, TensorShape)}
