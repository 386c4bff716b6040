"""A model whose convolutions run on tvmconv's kernels, and the memory format in which they are fastest.

Tensor cores are fastest with channels last, also in PyTorch's own kernels. In float32 without TF32, tvmconv's kernels
are faster with channels first. A model in the other format is converted: its weights once, its inputs and results per
call.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from tvmconv.torch.archive import save
from tvmconv.torch.example_tracer import is_example_call
from tvmconv.torch.layer import TunedConv, is_tf32_allowed
from tvmconv.torch.operator_library import is_transformed
from tvmconv.torch.quantized_layer import QuantizedConv
from tvmconv.torch.report import Report

MEMORY_FORMAT_BY_NAME = {"channels last": torch.channels_last, "channels first": torch.contiguous_format}


class Optimized(torch.nn.Module):
    """A copy of a model for inference; its parameters, buffers and `state_dict` are those of the model.

    In training mode, where a gradient is needed, and in transforms of `torch.func`, PyTorch computes everything.

    Args:
        model: The model, which becomes part of this module.
        graph: Traced graph that runs in place of the model and reads the parameters of the model's modules. None for a
            model that cannot be traced; its parts are then optimized one by one.
        static_values: Arguments for which the graph was traced, as `static_arguments` returns them; calls with other
            values run the model itself.
        example_values: Arguments for whose shapes the graph was traced, as `describe_arguments` returns them; calls
            with other shapes run the model itself. None for a graph of any shapes.

    Attributes:
        interpreter: Callable that runs in place of the graph, if there is one.
        uses_eager: Whether PyTorch runs everything.
        is_quantized: Whether the graph has convolutions of 8-bit operands. The model itself then computes calls that
            need gradients.
        quantized_shapes: Shapes of the tensors of a call for which the quantized graph has kernels; the model itself
            computes other calls. None for any shapes.

    Examples:
        >>> import torch, tvmconv.torch
        >>> model = torch.nn.Conv2d(4, 4, 3, padding=1)
        >>> x = torch.randn(1, 4, 8, 8)
        >>> optimized = tvmconv.torch.optimize(model, x)  # doctest: +SKIP
        >>> optimized.forward(x).shape  # doctest: +SKIP
        torch.Size([1, 4, 8, 8])
        >>> print(optimized.report())  # doctest: +SKIP
        >>> optimized.save("model.tvmconv")  # doctest: +SKIP
        >>> len(optimized.list_tuned_convs()), len(optimized.graph_code())  # doctest: +SKIP
        >>> optimized.set_memory_format(torch.channels_last, torch.contiguous_format)  # doctest: +SKIP
        >>> optimized.restore_memory_format()  # doctest: +SKIP
        >>> untouched = tvmconv.torch.Optimized(model, graph=None)
        >>> untouched.set_example((x,), torch.device("cpu"))
        >>> untouched.set_report(tvmconv.torch.Report(()))
        >>> untouched.train(False)(x).shape
        torch.Size([1, 4, 8, 8])
    """

    def __init__(
        self,
        model: torch.nn.Module,
        graph: fx.GraphModule | None,
        static_values: Mapping[str, Any] | None = None,
        example_values: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        self._plain: tuple[torch.nn.Module, ...] = (model,)  # tuples hide modules that are registered already
        self._graph: tuple[fx.GraphModule, ...] = () if graph is None else (graph,)
        self._forward_defaults = {} if static_values is None else get_forward_defaults(model)
        self._static_arguments = None if static_values is None else dict(static_values)
        self._example_values = None if example_values is None else dict(example_values)
        self.interpreter: Callable[..., Any] | None = None
        self.uses_eager = self.is_quantized = False
        self.quantized_shapes: list[tuple[int, ...]] | None = None
        self._inner_format: torch.memory_format | None = None
        self._outer_format: torch.memory_format | None = None
        # Dropout alone may be set to training mode, in order to draw samples.
        self._mode_dependent_modules = tuple(module for module in model.modules() if _uses_training_mode(module))
        self._report = Report(())
        self._example: tuple[Any, ...] = ()
        self._torch_device = torch.device("cpu")

    @property
    def original(self) -> torch.nn.Module:
        """The model that PyTorch runs."""
        return self._plain[0]

    @property
    def graph(self) -> fx.GraphModule:
        """The traced graph, whose convolutions run on tvmconv's kernels."""
        return self._graph[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model's result from the model's arguments.

        Args:
            args: Positional arguments of the model's `forward`.
            kwargs: Keyword arguments of the model's `forward`.

        Returns:
            What the model returns.
        """
        if self.interpreter is None and (
            self.training
            or self.uses_eager
            or is_transformed()
            or any(module.training for module in self._mode_dependent_modules)
        ):
            return self._plain[0](*args, **kwargs)
        if (
            self._static_arguments is not None
            and static_arguments(self._forward_defaults, args, kwargs) != self._static_arguments
        ):
            return self._plain[0](*args, **kwargs)
        if self._example_values is not None and not is_example_call(
            self._example_values, self._forward_defaults, args, kwargs
        ):
            return self._plain[0](*args, **kwargs)
        if self.is_quantized and self.interpreter is None and not self._is_quantized_call(args, kwargs):
            return self._plain[0](*args, **kwargs)
        call = self.interpreter or (self._graph or self._plain)[0]
        if self._inner_format is None:
            return call(*args, **kwargs)
        result = call(*to_memory_format(args, self._inner_format), **to_memory_format(kwargs, self._inner_format))
        return result if self._outer_format is None else to_memory_format(result, self._outer_format)

    def _is_quantized_call(self, args: Any, kwargs: Any) -> bool:
        """Return whether the quantized graph computes a call."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if torch.is_grad_enabled() and any(each.requires_grad for each in (*tensors, *self.parameters())):
            return False
        return self.quantized_shapes is None or list_shapes((args, kwargs)) == self.quantized_shapes

    def set_memory_format(self, inner_format: torch.memory_format, outer_format: torch.memory_format | None) -> None:
        """Convert weights and images inside the model to one memory format, and resulting images to another.

        Args:
            inner_format: Memory format of weights and of images inside the model.
            outer_format: Memory format of the images that the model returns; None keeps the inner one.
        """
        convert_weight_memory_format(self.original, {2: inner_format})
        self._inner_format, self._outer_format = inner_format, outer_format

    def restore_memory_format(self) -> None:
        """Undo `set_memory_format`."""
        if self._inner_format is not None:
            is_channels_last = self._inner_format is torch.channels_last
            former_format = torch.contiguous_format if is_channels_last else torch.channels_last
            convert_weight_memory_format(self.original, {2: former_format})
            self._inner_format = self._outer_format = None

    def report(self) -> Report:
        """Return the report of what runs for each layer, and how long it takes."""
        return self._report

    def set_report(self, report: Report) -> None:
        """Set the report that `report` returns.

        Args:
            report: Report of the optimization.
        """
        self._report = report

    def set_example(self, example: tuple[Any, ...], torch_device: torch.device) -> None:
        """Set the example arguments and the PyTorch device for which the model was optimized.

        Args:
            example: Positional arguments of the model.
            torch_device: PyTorch device of the model's tensors.
        """
        self._example, self._torch_device = example, torch_device

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model for inputs of the example's shapes to a file that `tvmconv.torch.load` reads.

        Args:
            path: Path of the file.

        Raises:
            ModelError: `torch.export` does not accept the model.
            Error: The file cannot be written.
        """
        kernel_names: dict[str, None] = {}  # in order
        for part in self._list_traced_parts():
            for convolution in part.list_tuned_convs():
                convolution.refresh()  # the export launches nothing, so weights are packed here
                if not part.uses_eager:
                    kernel_names.update(dict.fromkeys(convolution.kernels.values()))
        save(self, self._example, list(kernel_names), self._torch_device, path)

    def list_tuned_convs(self) -> list[TunedConv | QuantizedConv]:
        """Return the tuned convolutions that the graphs call."""
        return [
            module
            for part in self._list_traced_parts()
            for node in part.graph.graph.nodes
            if node.op == "call_module"
            and isinstance(module := part.graph.get_submodule(node.target), (TunedConv, QuantizedConv))
        ]

    def _list_traced_parts(self) -> list[Optimized]:
        """Return the parts that are traced graphs: the whole model, or modules of it."""
        return [module for module in self.modules() if isinstance(module, Optimized) and module._graph]

    def graph_code(self) -> list[str]:
        """Return the Python code of the graphs."""
        return [traced_part.graph.code for traced_part in self._list_traced_parts()]

    def train(self, mode: bool = True) -> Optimized:
        """Set the training mode of the model and of this module.

        Args:
            mode: Whether the modules are in training mode; False is evaluation mode.

        Returns:
            This module.
        """
        super().train(mode)
        self._plain[0].train(mode)
        if mode:  # normalizations will write to their statistics, which PyTorch does not report
            self._invalidate_packed_weights()
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Optimized:
        self._plain[0]._apply(fn, recurse)  # the model owns the same tensors
        self._invalidate_packed_weights()
        return self

    def _invalidate_packed_weights(self) -> None:
        for convolution in self.list_tuned_convs():
            convolution.invalidate_packed_weights()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model that this module lacks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_plain")
            if original is None or name.startswith("_"):
                raise
            return getattr(original[0], name)


def list_shapes(values: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors among the leaves of some values."""
    return [tuple(leaf.shape) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def get_forward_defaults(model: torch.nn.Module) -> dict[str, Any]:
    """Return the names and defaults of the parameters of a model's `forward`."""
    signature_parameters = inspect.signature(model.forward).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in signature_parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def static_arguments(defaults: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that decide what a model computes: flags, strings, and None for those left out.

    `defaults` are the names and defaults of the parameters of `forward`.
    """
    arguments = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    return {name: value for name, value in arguments.items() if value is None or type(value) in (bool, str)}


def _uses_training_mode(module: torch.nn.Module) -> bool:
    """Return whether a module's training mode invalidates the graph, which was traced in evaluation mode.

    This is true for dropout and for modules of the user that read `training`. The graph calls PyTorch's other modules,
    which read their mode themselves.
    """
    module_type = type(module)
    if module_type.__module__.startswith("torch."):
        return "Drop" in module_type.__name__
    code = getattr(inspect.unwrap(module_type.forward), "__code__", None)
    return code is not None and "training" in code.co_names


def choose_memory_format(model: torch.nn.Module, arguments: Sequence[Any], torch_device: torch.device) -> str | None:
    """Return the memory format, a name of `MEMORY_FORMAT_BY_NAME`, to which a model on a device should be converted.

    Its two-dimensional convolutions decide. The result is None if the model has that format already, or no format is
    faster, as on the CPU.
    """
    convolutions = [module for module in model.modules() if type(module) is torch.nn.Conv2d]
    if torch_device.type != "cuda" or not convolutions:
        return None
    dtype = convolutions[0].weight.dtype
    if torch.is_autocast_enabled(torch_device.type):
        dtype = torch.get_autocast_dtype(torch_device.type)
    name = "channels first" if dtype is torch.float32 and not is_tf32_allowed() else "channels last"
    tensors = [*arguments, *(module.weight for module in convolutions)]
    return None if all(_has_memory_format(tensor, MEMORY_FORMAT_BY_NAME[name]) for tensor in tensors) else name


def find_memory_format(values: Iterable[Any]) -> torch.memory_format | None:
    """Return the memory format that all images among some values share; None if there is none or it is ambiguous."""
    images = [value for value in values if isinstance(value, torch.Tensor) and value.dim() == 4]
    common_formats = [
        memory_format
        for memory_format in MEMORY_FORMAT_BY_NAME.values()
        if images and all(_has_memory_format(image, memory_format) for image in images)
    ]
    return common_formats[0] if len(common_formats) == 1 else None


def to_memory_format(values: Any, memory_format: torch.memory_format) -> Any:
    """Return values with the images among them, also in nested containers, in a memory format."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous(memory_format=memory_format) if tensor.dim() == 4 else tensor

    return tree_map_only(torch.Tensor, convert, values)


def convert_weight_memory_format(model: torch.nn.Module, formats_by_ndim: Mapping[int, torch.memory_format]) -> None:
    """Convert the weights of a model's convolutions to memory formats that are keyed by number of spatial axes."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.conv._ConvNd) and not torch.nn.parameter.is_lazy(module.weight):
            weight = module.weight
            if memory_format := formats_by_ndim.get(weight.dim() - 2):
                weight.data = weight.data.contiguous(memory_format=memory_format)


def _has_memory_format(value: Any, memory_format: torch.memory_format) -> bool:
    images = isinstance(value, torch.Tensor) and value.dim() == 4
    return not images or value.is_contiguous(memory_format=memory_format)
