"""The partition of a model into traced graphs: one of the whole model, or one of each part that can be traced."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_map_only

from tvmconv.errors import ModelError
from tvmconv.torch.conv_source import expand_padding_modes
from tvmconv.torch.example_tracer import (
    ExampleProxy,
    ExampleTracing,
    can_specialize,
    describe_arguments,
    list_fixed_arguments,
)
from tvmconv.torch.metadata_readers import remove_shape_assertions
from tvmconv.torch.model import Optimized, get_forward_defaults, static_arguments
from tvmconv.torch.torch_modules import (
    CONVOLUTIONS,
    contains_convolution,
    has_hooks,
    inherits_forward,
    is_plain_instance,
)

MODEL_NAME = "model"  # attribute of the graph module that holds the model
NO_OP_MODULES = (torch.nn.Identity, torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d)
NO_OP_FUNCTIONS = {"dropout": 2, "stochastic_depth": 3}  # index of the argument `training`, in PyTorch and torchvision
SPECTRAL_NORM_NAME = "_SpectralNorm"  # PyTorch's parametrization, whose weight is left to PyTorch
EQUAL_TOLERANCE = 1e-3  # tolerated difference of equal results, relative to the largest element


@dataclass(frozen=True)
class ModuleCall:
    """The first call of a module."""

    static: dict[str, Any]  # the result of `static_arguments`
    arguments: dict[str, Any]  # the result of `describe_arguments`
    allows_any_shape: bool = True  # whether a graph may be tried that holds for calls with other shapes, too


StaticCalls = dict[torch.nn.Module, ModuleCall]  # by module


@dataclass(frozen=True)
class GraphPartition:
    """A traced part of a model, or the whole model if it can be traced."""

    path: str  # path of the part in the model
    module: Optimized  # module with the graph, which replaces the part


@contextlib.contextmanager
def record_calls(model: torch.nn.Module) -> Iterator[StaticCalls]:
    """Record which modules of a model are called inside the context."""
    static_calls: StaticCalls = {}

    def record_call(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module not in static_calls:
            defaults = get_forward_defaults(module)
            arguments = describe_arguments(defaults, args, kwargs)
            static_calls[module] = ModuleCall(static_arguments(defaults, args, kwargs), arguments)

    with contextlib.ExitStack() as hooks:
        for module in _iterate_modules(model):
            hook = module.register_forward_pre_hook(record_call, prepend=True, with_kwargs=True)
            hooks.callback(hook.remove)
        yield static_calls


def _iterate_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules of a model except compiled ones, which accept no hooks."""
    dynamo: Any = sys.modules.get("torch._dynamo")  # importing it takes seconds, and no module is compiled without it
    if not isinstance(model, (torch.jit.ScriptModule, *([dynamo.OptimizedModule] if dynamo else []))):
        yield model
        for child in model.children():
            yield from _iterate_modules(child)


def partition_model(
    model: torch.nn.Module, static_calls: StaticCalls, arguments: Sequence[Any]
) -> tuple[Optimized, list[GraphPartition]]:
    """Trace a model as one graph, or each part of it that can be traced as a graph of its own.

    If a model's code looks at shapes, its graph holds only for calls with the shapes of the recorded one.
    A graph is discarded if its result differs from its module's, as for a module that tests the type of its input. In a
    model that cannot be traced, the traced parts replace the original ones. `static_calls` are the calls of the model's
    modules in a run on the arguments.
    """
    remaining_calls = dict(static_calls)
    while True:
        partitions: list[GraphPartition] = []
        traced_model = _partition_module(model, "", remaining_calls, partitions)
        whole = traced_model if isinstance(traced_model, Optimized) else Optimized(traced_model, None)
        mismatching = _find_mismatching(whole, partitions, arguments)
        if not mismatching:
            return whole, partitions
        for module in [*model.modules()]:
            for name, child in module.named_children():
                if isinstance(child, Optimized):
                    module._modules[name] = child.original
        for partition in mismatching:
            call = remaining_calls.pop(partition.module.original, None)
            if call and call.allows_any_shape:
                remaining_calls[partition.module.original] = replace(call, allows_any_shape=False)


def _partition_module(
    module: torch.nn.Module, path: str, static_calls: StaticCalls, partitions: list[GraphPartition]
) -> torch.nn.Module:
    """Trace a module, or else its children; append the traced parts to `partitions` and return the replacement."""
    if not contains_convolution(module):
        return module
    traced = _trace_call(module, static_calls[module]) if module in static_calls else None
    if traced is None:
        for name, child in list(module.named_children()):
            traced_child = _partition_module(child, f"{path}.{name}".removeprefix("."), static_calls, partitions)
            if traced_child is not child:
                module._modules[name] = traced_child
        return module
    partitions.append(GraphPartition(path, traced))
    return traced


def _trace_call(module: torch.nn.Module, call: ModuleCall) -> Optimized | None:
    """Trace a module for calls of any shape, or else for the recorded one; return None if it cannot be traced."""
    if call.allows_any_shape:
        with contextlib.suppress(Exception):  # user code may raise anything on proxies
            return Optimized(module, trace_model(module, call.static), call.static)
    if can_specialize(call.arguments):
        with contextlib.suppress(Exception):
            graph = trace_model(module, list_fixed_arguments(call.arguments), call.arguments)
            return Optimized(module, graph, call.static, call.arguments)
    return None


def _find_mismatching(
    whole_model: Optimized, partitions: Sequence[GraphPartition], arguments: Sequence[Any]
) -> list[GraphPartition]:
    """Return the parts whose graphs compute other results than their modules."""
    mismatching: list[GraphPartition] = []

    def run_and_compare(partition: GraphPartition, *args: Any, **kwargs: Any) -> Any:
        try:
            positional, keyword = clone_tensors((args, kwargs))
            with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
                result = partition.module.graph.forward(*positional, **keyword)
        except Exception:  # an invalid graph may raise anything, and tensors within `torch.func` cannot be copied
            result = object()
        expected = partition.module.original(*args, **kwargs)
        if partition not in mismatching and not are_equal(result, expected):
            mismatching.append(partition)
        return expected

    for partition in partitions:
        partition.module.interpreter = functools.partial(run_and_compare, partition)
    with torch.no_grad():
        whole_model(*clone_tensors(arguments))
    for partition in partitions:
        partition.module.interpreter = None
    return mismatching


def clone_tensors(values: Any) -> Any:
    """Return the same values with copies of the tensors in the same memory format."""
    return tree_map_only(torch.Tensor, lambda tensor: copy.deepcopy(tensor.detach()), values)


def are_equal(result: Any, expected: Any) -> bool:
    """Return whether two results have the same structure and, within a tolerance, the same tensors."""
    (result_leaves, result_spec), (expected_leaves, expected_spec) = tree_flatten(result), tree_flatten(expected)
    return result_spec == expected_spec and all(map(_are_close, result_leaves, expected_leaves))


def _are_close(result: Any, expected: Any) -> bool:
    if not (isinstance(result, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return type(result) is type(expected)
    if result.shape != expected.shape or result.dtype is not expected.dtype:
        return False
    max_magnitude = 0.0
    if expected.is_floating_point() and expected.numel():
        max_magnitude = float(expected.abs().nan_to_num(posinf=0).max())
    return torch.allclose(result, expected, rtol=0, atol=EQUAL_TOLERANCE * max_magnitude, equal_nan=True)


class _ModelHolder(torch.nn.Module):
    """A module that calls the model, so that a model that is a single convolution is a module in the graph, too."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return self.model(x)


class _FusionTracer(fx.Tracer):
    """A tracer that enters all modules except PyTorch's own and those with hooks, which must be called."""

    proxy_buffer_attributes = True  # computations on buffers run at each call

    def __init__(self, example: ExampleTracing | None = None) -> None:
        super().__init__()
        self._autocast, self._example = _get_autocast_dtypes(), example

    def proxy(self, node: fx.Node) -> Any:
        """Return what stands for a node in the model's code."""
        return self._example.make_proxy(node, self) if self._example else super().proxy(node)

    def create_arg(self, a: Any) -> Any:
        """Return an argument of a node."""
        return a.node if type(a) is ExampleProxy else super().create_arg(a)

    def call_module(self, m: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Add the call of a module to the graph, or call it to compute the value of a node."""
        if self._example and self._example.is_evaluating:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        """Return an attribute of a module, in the graph a proxy of it."""
        if self._example and self._example.is_evaluating:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node; raise ModelError if the model has changed autocast, which a graph does not reproduce."""
        if _get_autocast_dtypes() != self._autocast:
            raise ModelError("it changes autocast")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module becomes one node."""
        if has_hooks(m):
            return True
        if parametrize.is_parametrized(m):  # its weight is a node of its own, except for spectral normalization
            lists = m.parametrizations.values()
            return any(type(each).__name__ == SPECTRAL_NORM_NAME for each_list in lists for each in each_list)
        return inherits_forward(m) or super().is_leaf_module(m, module_qualified_name)


def _get_autocast_dtypes() -> list[torch.dtype | None]:
    """Return the autocast dtypes on the CPU and on GPUs; None where autocast is off."""
    return [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")]


def trace_model(
    model: torch.nn.Module,
    fixed_arguments: Mapping[str, Any] | None = None,
    example: Mapping[str, Any] | None = None,
) -> fx.GraphModule:
    """Trace a model as a graph that shares the model's modules and parameters; the model is its attribute `MODEL_NAME`.

    Fixed arguments keep one value in the graph whatever it is called with. With an example, the result of
    `describe_arguments`, the graph holds for arguments of the same shapes. A model that cannot be traced may raise any
    exception.
    """
    holder, tracer = _ModelHolder(model), _FusionTracer(ExampleTracing(model, example) if example else None)
    if is_plain_instance(model, CONVOLUTIONS) or has_hooks(model):
        graph = tracer.trace(holder)
    else:
        graph = tracer.trace(model, dict(fixed_arguments or {}))
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                node.target = f"{MODEL_NAME}.{node.target}"
        _remove_guards(graph, fixed_arguments or {})
    modules = dict(holder.named_modules())
    remove_no_ops(graph, modules)
    remove_shape_assertions(graph)
    expand_padding_modes(graph, modules)
    traced = fx.GraphModule(holder, graph, type(model).__name__)
    traced.model = model  # `GraphModule` has put empty modules in place of parents
    return traced


def _remove_guards(graph: fx.Graph, fixed_arguments: Mapping[str, Any]) -> None:
    """Restore the names of the placeholders of fixed arguments, and remove the guards on their values."""
    names = {f"{name}_1": name for name in fixed_arguments}  # the tracer appends _1
    for node in [node for node in graph.nodes if node.op == "placeholder" and node.target in names]:
        node.target = names[node.target]
        for user in list(node.users):
            for guard_node in list(user.users):
                graph.erase_node(guard_node)
            graph.erase_node(user)


def remove_no_ops(graph: fx.Graph, modules: dict[str, Any]) -> None:
    """Remove nodes that return their input in evaluation mode."""
    for node in graph.nodes:
        is_no_op = False
        if node.op == "call_module":
            module = modules.get(str(node.target))
            is_no_op = isinstance(module, NO_OP_MODULES) and not has_hooks(module)
        elif node.op == "call_function" and (index := NO_OP_FUNCTIONS.get(getattr(node.target, "__name__", ""))):
            is_no_op = node.kwargs.get("training", (*node.args, *[True] * index)[index]) is False
        if is_no_op and node.args:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
