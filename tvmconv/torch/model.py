"""A model whose convolutions run by our kernels."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tvmconv.torch.archive import save
from tvmconv.torch.layer import TunedConv
from tvmconv.torch.memory_format import convert_weight_memory_format, to_memory_format
from tvmconv.torch.report import Report


class Optimized(torch.nn.Module):
    """A copy of a model, for inference: what it owns, its `state_dict` too, is as the model had it.

    In training mode PyTorch computes all, and so it does where a gradient is asked for, from there on.

    Args:
        model: what it is of; it becomes part of this.
        graph: what runs otherwise, and reads the parameters of the model's modules; None for a model that cannot be
            traced, whose parts are optimised one by one.
        static_values: the arguments that the graph is for, as of `static_values`; others are left to the model.
    """

    def __init__(
        self, model: torch.nn.Module, graph: fx.GraphModule | None, static_values: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        self._plain: tuple[torch.nn.Module, ...] = (model,)  # in tuples, as its modules are registered here
        self._graph: tuple[fx.GraphModule, ...] = () if graph is None else (graph,)
        self._forward_defaults = {} if static_values is None else get_forward_defaults(model)
        self._static_arguments = None if static_values is None else dict(static_values)
        self._interpreter: Callable[..., Any] | None = None
        self._uses_eager = False
        self._inner_format: torch.memory_format | None = None
        self._outer_format: torch.memory_format | None = None
        # Some people set dropout alone to training, to draw samples.
        self._mode_dependent_modules = tuple(module for module in model.modules() if _uses_training_mode(module))
        self._report = Report(())
        self._example: tuple[Any, ...] = ()
        self._torch_device = torch.device("cpu")

    @property
    def original(self) -> torch.nn.Module:
        """The model itself, which PyTorch runs."""
        return self._plain[0]

    @property
    def graph(self) -> fx.GraphModule:
        """What runs where PyTorch does not."""
        return self._graph[0]

    def set_interpreter(self, interpreter: Callable[..., Any] | None) -> None:
        """Have the graph run by somebody else; None ends it."""
        self._interpreter = interpreter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of the model."""
        if self._interpreter is None and (
            self.training or self._uses_eager or any(module.training for module in self._mode_dependent_modules)
        ):
            return self._plain[0](*args, **kwargs)
        if (
            self._static_arguments is not None
            and static_arguments(self._forward_defaults, args, kwargs) != self._static_arguments
        ):
            return self._plain[0](*args, **kwargs)
        call = self._interpreter or (self._graph or self._plain)[0]
        if self._inner_format is None:
            return call(*args, **kwargs)
        result = call(*to_memory_format(args, self._inner_format), **to_memory_format(kwargs, self._inner_format))
        return result if self._outer_format is None else to_memory_format(result, self._outer_format)

    def set_memory_format(self, inner_format: torch.memory_format, outer_format: torch.memory_format | None) -> None:
        """Have images, and weights, in this memory format inside, and give them in another; None for as they come."""
        convert_weight_memory_format(self.original, {2: inner_format})
        self._inner_format, self._outer_format = inner_format, outer_format

    def restore_memory_format(self) -> None:
        """End that."""
        if self._inner_format is not None:
            is_channels_last = self._inner_format is torch.channels_last
            convert_weight_memory_format(
                self.original, {2: torch.contiguous_format if is_channels_last else torch.channels_last}
            )
            self._inner_format = self._outer_format = None

    def use_eager(self, enabled: bool = True) -> None:
        """Leave all to PyTorch, or end that."""
        self._uses_eager = enabled

    def report(self) -> Report:
        """What runs, layer by layer, and what it takes."""
        return self._report

    def set_report(self, report: Report) -> None:
        """Have this told by `report`."""
        self._report = report

    def set_example(self, example: tuple[Any, ...], torch_device: torch.device) -> None:
        """Say for what arguments this was made, and where it runs."""
        self._example, self._torch_device = example, torch_device

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `tvmconv.torch.load` reads: this model for inputs of the example's shapes.

        Raises:
            ModelError: `torch.export` does not take the model.
            Error: the file cannot be written.
        """
        for convolution in self._list_tuned_convs():
            convolution.refresh()  # nothing is launched when the model is exported
        save(self, self._example, self._list_kernel_names(), self._torch_device, path)

    def _list_kernel_names(self) -> list[str]:
        """The names of the kernels that run."""
        tuned_convs = [
            tuned_conv
            for traced_part in self._list_traced_parts()
            if not traced_part._uses_eager
            for tuned_conv in traced_part._list_tuned_convs()
        ]
        return list(dict.fromkeys(name for tuned_conv in tuned_convs for name in tuned_conv.kernels.values()))

    def _list_tuned_convs(self) -> list[TunedConv]:
        return [
            module
            for traced_part in self._list_traced_parts()
            for module in traced_part.graph.modules()
            if isinstance(module, TunedConv)
        ]

    def _list_traced_parts(self) -> list[Optimized]:
        """Those that are graphs: the whole model, or modules of it."""
        return [module for module in self.modules() if isinstance(module, Optimized) and module.is_traced]

    def graph_code(self) -> list[str]:
        """What the graphs do, in Python."""
        return [traced_part.graph.code for traced_part in self._list_traced_parts()]

    @property
    def is_traced(self) -> bool:
        """Whether the model as a whole is a graph."""
        return bool(self._graph)

    def train(self, mode: bool = True) -> Optimized:
        """Set the mode of the model and of this."""
        super().train(mode)
        self._plain[0].train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Optimized:
        self._plain[0]._apply(fn, recurse)  # owns the same tensors in the same places
        for convolution in self._list_tuned_convs():
            convolution.invalidate_packed_weights()
        return self

    def __getattr__(self, name: str) -> Any:
        """What the model has and this has not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_plain")
            if original is None or name.startswith("_"):
                raise
            return getattr(original[0], name)


def get_forward_defaults(model: torch.nn.Module) -> dict[str, Any]:
    """What `forward` takes by name, with the defaults."""
    signature_parameters = inspect.signature(model.forward).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in signature_parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def static_arguments(defaults: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by which a model decides what to compute: flags, names, and those that are left out.

    Args:
        defaults: of its `forward`.
        args: of a call.
        kwargs: of the call.
    """
    arguments = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    return {name: value for name, value in arguments.items() if value is None or type(value) in (bool, str)}


def _uses_training_mode(module: torch.nn.Module) -> bool:
    """Whether the graph is of what a module does in evaluation mode: dropout, and what looks at its mode by itself.

    Modules of PyTorch's own are called by the graph, in whatever mode they are.
    """
    module_type = type(module)
    if module_type.__module__.startswith("torch."):
        return "Drop" in module_type.__name__
    code = getattr(inspect.unwrap(module_type.forward), "__code__", None)
    return code is not None and "training" in code.co_names
