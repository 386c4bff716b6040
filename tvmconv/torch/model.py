"""A model whose convolutions run by our kernels."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tvmconv.torch.archive import save
from tvmconv.torch.formats import laid, lay_weights
from tvmconv.torch.layer import TunedConv
from tvmconv.torch.report import Report


class Optimized(torch.nn.Module):
    """A copy of a model, for inference: what it owns, its `state_dict` too, is as the model had it.

    In training mode PyTorch computes all, and so it does where a gradient is asked for, from there on.

    Args:
        model: what it is of; it becomes part of this.
        graph: what runs otherwise, and reads the parameters of the model's modules; None for a model that cannot be
            traced, whose parts are optimised one by one.
        deciding: the arguments that the graph is for, as of `deciding`; others are left to the model.
    """

    def __init__(
        self, model: torch.nn.Module, graph: fx.GraphModule | None, deciding: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        self._plain: tuple[torch.nn.Module, ...] = (model,)  # in tuples, as its modules are registered here
        self._graph: tuple[fx.GraphModule, ...] = () if graph is None else (graph,)
        self._takes = {} if deciding is None else parameters(model)
        self._deciding = None if deciding is None else dict(deciding)
        self._run: Callable[..., Any] | None = None
        self._left = False
        self._inside: torch.memory_format | None = None
        self._outside: torch.memory_format | None = None
        # Some people set dropout alone to training, to draw samples.
        self._training = tuple(module for module in model.modules() if _trains(module))
        self._report = Report(())
        self._example: tuple[Any, ...] = ()
        self._place = torch.device("cpu")

    @property
    def plain(self) -> torch.nn.Module:
        """The model itself, which PyTorch runs."""
        return self._plain[0]

    @property
    def graph(self) -> fx.GraphModule:
        """What runs where PyTorch does not."""
        return self._graph[0]

    def run_by(self, run: Callable[..., Any] | None) -> None:
        """Have the graph run by somebody else; None ends it."""
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of the model."""
        if self._run is None and (self.training or self._left or any(module.training for module in self._training)):
            return self._plain[0](*args, **kwargs)
        if self._deciding is not None and deciding(self._takes, args, kwargs) != self._deciding:
            return self._plain[0](*args, **kwargs)
        run = self._run or (self._graph or self._plain)[0]
        if self._inside is None:
            return run(*args, **kwargs)
        result = run(*laid(args, self._inside), **laid(kwargs, self._inside))
        return result if self._outside is None else laid(result, self._outside)

    def lie(self, inside: torch.memory_format, outside: torch.memory_format | None) -> None:
        """Have images, and weights, in this memory format inside, and give them in another; None for as they come."""
        lay_weights(self.plain, {2: inside})
        self._inside, self._outside = inside, outside

    def lie_as_before(self) -> None:
        """End that."""
        if self._inside is not None:
            last = self._inside is torch.channels_last
            lay_weights(self.plain, {2: torch.contiguous_format if last else torch.channels_last})
            self._inside = self._outside = None

    def leave(self, left: bool = True) -> None:
        """Leave all to PyTorch, or end that."""
        self._left = left

    def report(self) -> Report:
        """What runs, layer by layer, and what it takes."""
        return self._report

    def tell(self, report: Report) -> None:
        """Have this told by `report`."""
        self._report = report

    def made_for(self, example: tuple[Any, ...], place: torch.device) -> None:
        """Say for what arguments this was made, and where it runs."""
        self._example, self._place = example, place

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `tvmconv.torch.load` reads: this model for inputs of the example's shapes.

        Raises:
            ModelError: `torch.export` does not take the model.
            Error: the file cannot be written.
        """
        for convolution in self._convolutions():
            convolution.refresh()  # nothing is launched when the model is exported
        save(self, self._example, self._kernels(), self._place, path)

    def _kernels(self) -> list[str]:
        """The names of the kernels that run."""
        ours = [each for part in self._parts() if not part._left for each in part._convolutions()]
        return list(dict.fromkeys(name for each in ours for name in each.kernels.values()))

    def _convolutions(self) -> list[TunedConv]:
        return [each for part in self._parts() for each in part.graph.modules() if isinstance(each, TunedConv)]

    def _parts(self) -> list[Optimized]:
        """Those that are graphs: the whole model, or modules of it."""
        return [part for part in self.modules() if isinstance(part, Optimized) and part.traced]

    def codes(self) -> list[str]:
        """What the graphs do, in Python."""
        return [part.graph.code for part in self._parts()]

    @property
    def traced(self) -> bool:
        """Whether the model as a whole is a graph."""
        return bool(self._graph)

    def train(self, mode: bool = True) -> Optimized:
        """Set the mode of the model and of this."""
        super().train(mode)
        self._plain[0].train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Optimized:
        self._plain[0]._apply(fn, recurse)  # owns the same tensors in the same places
        for convolution in self._convolutions():
            convolution.expire()
        return self

    def __getattr__(self, name: str) -> Any:
        """What the model has and this has not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            plain = self.__dict__.get("_plain")
            if plain is None or name.startswith("_"):
                raise
            return getattr(plain[0], name)


def parameters(model: torch.nn.Module) -> dict[str, Any]:
    """What `forward` takes by name, with the defaults."""
    found = inspect.signature(model.forward).parameters.values()
    return {each.name: each.default for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def deciding(parameters: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by which a model decides what to compute: flags, names, and those that are left out.

    Args:
        parameters: of its `forward`.
        args: of a call.
        kwargs: of the call.
    """
    given = {**parameters, **dict(zip(parameters, args, strict=False)), **kwargs}
    return {name: value for name, value in given.items() if value is None or type(value) in (bool, str)}


def _trains(module: torch.nn.Module) -> bool:
    """Whether the graph is of what a module does in evaluation mode: dropout, and what looks at its mode by itself.

    Modules of PyTorch's own are called by the graph, in whatever mode they are.
    """
    kind = type(module)
    if kind.__module__.startswith("torch."):
        return "Drop" in kind.__name__
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "training" in code.co_names
