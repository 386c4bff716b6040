"""A model as graphs that give what it gives: of the whole, or of those of its parts that can be traced."""

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

from tvmconv.torch.layer import CONVOLUTIONS
from tvmconv.torch.model import Optimized, deciding, parameters
from tvmconv.torch.sites import trace

ALIKE = 1e-3  # of the largest element, by which results of the same operations may differ
Calls = dict[torch.nn.Module, dict[str, Any]]  # of modules, with the arguments by which they decide what to compute


@dataclass(frozen=True)
class Part:
    """A part of a model that is a graph; the whole model, if that can be traced.

    Attributes:
        path: of the part in the model.
        module: which is in its place.
    """

    path: str
    module: Optimized


@contextlib.contextmanager
def calls_of(model: torch.nn.Module) -> Iterator[Calls]:
    """The modules of a model that are called meanwhile."""
    calls: Calls = {}

    def watch(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(module, deciding(parameters(module), args, kwargs))

    with contextlib.ExitStack() as hooks:
        for module in _modules(model):
            hook = module.register_forward_pre_hook(watch, prepend=True, with_kwargs=True)
            hooks.callback(hook.remove)
        yield calls


def _modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of a model, but for those that are compiled, and take no hooks."""
    dynamo: Any = sys.modules.get("torch._dynamo")  # to import it takes seconds; without it nothing is compiled
    if not isinstance(model, (torch.jit.ScriptModule, *([dynamo.OptimizedModule] if dynamo else []))):
        yield model
        for child in model.children():
            yield from _modules(child)


def split(model: torch.nn.Module, calls: Calls, arguments: Sequence[Any]) -> tuple[Optimized, list[Part]]:
    """A model in the form of graphs: of one, or, where it cannot be traced, of one for each part that can be.

    A graph that does not give what its module gives, as one that looks at the type of its input, counts as one that
    there is not. The parts of a model that cannot be traced are replaced in it.

    Args:
        model: to be split.
        calls: of its modules, in a run on the arguments.
        arguments: of the model.
    """
    left = dict(calls)
    while True:
        parts: list[Part] = []
        made = _split(model, "", left, parts)
        whole = made if isinstance(made, Optimized) else Optimized(made, None)
        wrong = _wrong(whole, parts, arguments)
        if not wrong:
            return whole, parts
        for module in [*model.modules()]:
            for name, child in module.named_children():
                if isinstance(child, Optimized):
                    module._modules[name] = child.plain
        for part in wrong:
            left.pop(part.module.plain, None)


def _split(module: torch.nn.Module, path: str, calls: Calls, parts: list[Part]) -> torch.nn.Module:
    if not any(type(each) in CONVOLUTIONS for each in module.modules()):
        return module
    try:
        part = Part(path, Optimized(module, trace(module, calls[module]), calls[module]))
    except Exception:  # whatever the user's code raises when its inputs are no tensors; or it was not called
        for name, child in list(module.named_children()):
            made = _split(child, f"{path}.{name}".removeprefix("."), calls, parts)
            if made is not child:
                module._modules[name] = made
        return module
    parts.append(part)
    return part.module


def _wrong(whole: Optimized, parts: Sequence[Part], arguments: Sequence[Any]) -> list[Part]:
    """The parts whose graphs do not give what their modules give."""
    wrong: list[Part] = []

    def compared(part: Part, *args: Any, **kwargs: Any) -> Any:
        given, named = copied((args, kwargs))
        try:
            with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
                got = part.module.graph.forward(*given, **named)
        except Exception:  # whatever a graph raises that makes no sense
            got = object()
        wanted = part.module.plain(*args, **kwargs)
        if part not in wrong and not _alike(got, wanted):
            wrong.append(part)
        return wanted

    for part in parts:
        part.module.run_by(functools.partial(compared, part))
    with torch.no_grad():
        whole(*copied(arguments))
    for part in parts:
        part.module.run_by(None)
    return wrong


def copied(values: Any) -> Any:
    """The same values, with tensors of their own, that lie as before."""
    return tree_map_only(torch.Tensor, lambda tensor: copy.deepcopy(tensor.detach()), values)


def _alike(got: Any, wanted: Any) -> bool:
    """Whether two results are the same, but for the order of sums."""
    (ours, form), (theirs, expected) = tree_flatten(got), tree_flatten(wanted)
    return form == expected and all(map(_same, ours, theirs))


def _same(ours: Any, theirs: Any) -> bool:
    if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return type(ours) is type(theirs)
    if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
        return False
    largest = float(theirs.abs().nan_to_num(posinf=0).max()) if theirs.is_floating_point() and theirs.numel() else 0
    return torch.allclose(ours, theirs, rtol=0, atol=ALIKE * largest, equal_nan=True)
