"""The partition of a model into traced graphs: one of the whole model, or one of each part that can be traced."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from tvmconv.torch.fusion import trace_model
from tvmconv.torch.layer import CONVOLUTIONS
from tvmconv.torch.model import Optimized, get_forward_defaults, static_arguments

EQUAL_TOLERANCE = 1e-3  # tolerated difference of equal results, relative to the largest element
StaticCalls = dict[torch.nn.Module, dict[str, Any]]  # called modules with the result of `static_arguments`


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
        static_calls.setdefault(module, static_arguments(get_forward_defaults(module), args, kwargs))

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
            remaining_calls.pop(partition.module.original, None)


def _partition_module(
    module: torch.nn.Module, path: str, static_calls: StaticCalls, partitions: list[GraphPartition]
) -> torch.nn.Module:
    """Trace a module, or else its children; append the traced parts to `partitions` and return the replacement."""
    if not any(type(submodule) in CONVOLUTIONS for submodule in module.modules()):
        return module
    try:
        traced = Optimized(module, trace_model(module, static_calls[module]), static_calls[module])
    except Exception:  # user code may raise anything on proxies; KeyError if the module was not called
        for name, child in list(module.named_children()):
            traced_child = _partition_module(child, f"{path}.{name}".removeprefix("."), static_calls, partitions)
            if traced_child is not child:
                module._modules[name] = traced_child
        return module
    partitions.append(GraphPartition(path, traced))
    return traced


def _find_mismatching(
    whole_model: Optimized, partitions: Sequence[GraphPartition], arguments: Sequence[Any]
) -> list[GraphPartition]:
    """Return the parts whose graphs compute other results than their modules."""
    mismatching: list[GraphPartition] = []

    def run_and_compare(partition: GraphPartition, *args: Any, **kwargs: Any) -> Any:
        positional, keyword = clone_tensors((args, kwargs))
        try:
            with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
                result = partition.module.graph.forward(*positional, **keyword)
        except Exception:  # an invalid graph may raise anything
            result = object()
        expected = partition.module.original(*args, **kwargs)
        if partition not in mismatching and not _are_equal(result, expected):
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


def _are_equal(result: Any, expected: Any) -> bool:
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
