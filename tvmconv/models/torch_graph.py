"""What a PyTorch module executes, as a graph: every operation is seen, of modules and of functions alike.

Source: `torch.utils._python_dispatch.TorchDispatchMode`, and ATen's operators in native_functions.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from tvmconv.errors import WorkloadError
from tvmconv.models.graph import Graph, Op, convolution
from tvmconv.workloads import Conv

UNARY = ("neg", "exp", "erf", "tanh", "mish", "sigmoid", "relu", "relu6", "silu", "hardswish", "hardsigmoid")
BINARY = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "minimum": "min", "maximum": "max"}
SAME = ("clone", "alias", "detach", "lift_fresh", "_to_copy")
NORMS = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")
LIMITS = {
    "hardtanh": {"min_val": "low", "max_val": "high"},
    "clamp": {"min": "low", "max": "high"},
    "clamp_min": {"min": "low"},
    "clamp_max": {"max": "high"},
}
OTHER_CONVOLUTIONS = re.compile(r"conv(?!ert)")


def record(module: torch.nn.Module, positional: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]) -> Graph:
    """Run a module and write down what it executes.

    What the module gives, and whatever else is still there when it has returned, is seen by others than its operations.

    Args:
        module: in evaluation mode.
        positional: arguments of its forward pass.
        named: keyword arguments.
    """
    recorder = _Recorder()
    for tensor in (*positional, *named.values()):
        recorder.know(tensor)
    with recorder.in_modules(module), recorder:
        result = module(*positional, **named)
    recorder.graph.outputs.update(recorder.alive())
    del result
    return recorder.graph


class _Recorder(TorchDispatchMode):
    """Writes down each operation; names of tensors are numbers, a new one whenever a tensor is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self._values: Any = WeakTensorKeyDictionary()
        self._count = 0
        self._path = [""]

    def know(self, tensor: torch.Tensor) -> str:
        """Give a tensor a name of its own."""
        self._count += 1
        value = str(self._count)
        self._values[tensor] = value
        self.graph.shapes[value] = tuple(tensor.shape)
        return value

    def alive(self) -> list[str]:
        """The names of all tensors that are still there."""
        return list(self._values.values())

    @contextmanager
    def in_modules(self, root: torch.nn.Module) -> Iterator[None]:
        """Know at each operation which module is executing."""
        with ExitStack() as hooks:
            for path, module in root.named_modules():
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    continue
                before = module.register_forward_pre_hook(partial(self._enter, path))
                behind = module.register_forward_hook(self._leave, always_call=True)
                hooks.callback(before.remove)
                hooks.callback(behind.remove)
            yield

    def _enter(self, path: str, *_: object) -> None:
        self._path.append(path)

    def _leave(self, *_: object) -> None:
        self._path.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute an operation and write it down, or what it consists of."""
        kwargs = kwargs or {}
        with self:  # under inference mode operations arrive that consist of others
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        reads = tuple(self._value(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        result = func(*args, **kwargs)
        if func.namespace != "prim":  # asks for properties, not for elements
            writes = tuple(self.know(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
            self._write_down(func, _arguments(func, args, kwargs), reads, writes)
        return result

    def _value(self, tensor: torch.Tensor) -> str:
        """A tensor's name; one that nothing has made and that is no input is a parameter, or another constant."""
        value = self._values.get(tensor)
        if value is None:
            value = self.know(tensor)
            self.graph.constants.add(value)
        return value

    def _write_down(self, func: Any, given: dict[str, Any], reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
        kind = func._schema.name.partition("::")[2].removesuffix("_")
        if func.namespace == "aten" and kind == "convolution" and not given["transposed"]:
            self.graph.add_conv(self._name(), reads, writes, lambda: _workload(given))
        elif func.namespace == "aten" and kind in NORMS and not given.get("training", False):
            self.graph.add(Op("norm", reads, writes))
        elif func.namespace == "aten" and writes and (translated := _pointwise(kind, given)):
            name, operands, how = translated
            named = iter(reads)
            values = [next(named) if isinstance(each, torch.Tensor) else float(each) for each in operands]
            self.graph.add_pointwise(name, values, writes, **how)
        else:
            if OTHER_CONVOLUTIONS.search(kind):
                what = "a transposed convolution" if kind == "convolution" else func._schema.name
                self.graph.leave_out(self._name(), f"{what} is no workload of tvmconv")
            self.graph.add(Op("", reads, writes))

    def _name(self) -> str:
        """A name for a convolution: of the module that is executing."""
        return self._path[-1] or "conv"


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An operation's arguments by name, with those that are left out at their defaults."""
    schema = func._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    return {**defaults, **dict(zip((each.name for each in schema), args, strict=False)), **kwargs}


def _workload(given: Mapping[str, Any]) -> Conv:
    """The workload of a convolution; raises WorkloadError."""
    x, weight = given["input"], given["weight"]
    if weight.dtype != x.dtype:
        raise WorkloadError(f"its input is of {x.dtype}, its weight of {weight.dtype}")
    return convolution(
        tuple(x.shape),
        tuple(weight.shape),
        stride=tuple(given["stride"]),
        padding=tuple(given["padding"]),
        dilation=tuple(given["dilation"]),
        groups=given["groups"],
        dtype=str(x.dtype).removeprefix("torch."),
        bias=given["bias"] is not None,
    )


def _pointwise(kind: str, given: Mapping[str, Any]) -> tuple[str, list[Any], dict[str, Any]] | None:
    """An operation on each element: its name in the graph, its operands and options; None if it is something else."""
    x = given.get("self")
    if kind in UNARY:
        return kind, [x], {}
    if kind in SAME:
        return ("same", [x], {}) if given.get("dtype") in (None, given["self"].dtype) else None
    if kind == "leaky_relu":
        return kind, [x], {"slope": given["negative_slope"]}
    if kind == "elu" and given["scale"] == given["input_scale"] == 1:
        return kind, [x], {"alpha": given["alpha"]}
    if kind == "softplus" and given["threshold"] >= 20:
        return kind, [x], {"beta": given["beta"]}
    if kind == "gelu":
        return "gelu", [x], {"by_tanh": given["approximate"] == "tanh"}
    if kind in BINARY:
        plain = given.get("alpha", 1) == 1 and given.get("rounding_mode") is None
        return (BINARY[kind], [x, given["other"]], {}) if plain and _is_number_or_tensor(given["other"]) else None
    if kind == "rsub" and given.get("alpha", 1) == 1 and _is_number_or_tensor(given["other"]):
        return "sub", [given["other"], x], {}
    if kind in LIMITS:
        limits = {to: given[name] for name, to in LIMITS[kind].items() if given[name] is not None}
        return None if any(isinstance(each, torch.Tensor) for each in limits.values()) else ("clip", [x], limits)
    return None


def _is_number_or_tensor(value: object) -> bool:
    return isinstance(value, (int, float, torch.Tensor))
