"""Models for training, whose convolutions run their forward and backward passes on the kernels of the kernel table.

The convolutions of a copy of the model are replaced by modules of the same names, parameters and options, which call
`convolve`. So are batch normalizations, which take the statistics that convolutions return. The copy has the parameters
and buffers of the model, so that optimizers, checkpoints and wrappers for distributed training see what they saw
before.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from tvmconv.errors import translate_to_model_error
from tvmconv.torch.conv_dispatch import convolve, convolve_with_stats
from tvmconv.torch.kernel_table import table
from tvmconv.torch.normalization import BATCH_NORM_TYPES, attach_source

ROOT_PATH = "(itself)"  # path of a model that is itself a convolution
ZEROS = "zeros"  # padding mode that the operators compute
TYPE_ATTRIBUTES = ("__dict__", "__weakref__")  # attributes of a class that Python makes for each
NOT_RUN_REASON = "it did not run on the example, or not by a kernel's dtype and shape"
SUBCLASS_REASON = "a subclass of PyTorch's convolution"


class TrainableConv1d(nn.Conv1d):
    """A 1-D convolution that runs on the kernels of the kernel table."""

    path = ""  # of the module in its model
    uses_kernels = False  # whether a product of its calls has a kernel
    is_fused = False  # whether graphs that are being compiled have PyTorch's function, which a backend replaces
    normalized_by = ""  # path of the batch normalization that reads its output, if there is one
    returns_stats = False  # whether a kernel returns the statistics of its output
    output_stats = None  # its output with statistics, in a graph that is being compiled

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _convolve_layer(self, functional.conv1d, input, weight, bias)


class TrainableConv2d(nn.Conv2d):
    """A 2-D convolution that runs on the kernels of the kernel table."""

    path = ""
    uses_kernels = False
    is_fused = False
    normalized_by = ""
    returns_stats = False
    output_stats = None

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _convolve_layer(self, functional.conv2d, input, weight, bias)


class TrainableConv3d(nn.Conv3d):
    """A 3-D convolution that runs on the kernels of the kernel table."""

    path = ""
    uses_kernels = False
    is_fused = False
    normalized_by = ""
    returns_stats = False
    output_stats = None

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _convolve_layer(self, functional.conv3d, input, weight, bias)


class TrainableConvTranspose1d(nn.ConvTranspose1d):
    """A 1-D transposed convolution that runs on the kernels of the kernel table."""

    path = ""
    uses_kernels = False
    is_fused = False

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        """Compute the output from the input, as `torch.nn.ConvTranspose1d`."""
        return _transpose_layer(self, functional.conv_transpose1d, 1, input, output_size)


class TrainableConvTranspose2d(nn.ConvTranspose2d):
    """A 2-D transposed convolution that runs on the kernels of the kernel table."""

    path = ""
    uses_kernels = False
    is_fused = False

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        """Compute the output from the input, as `torch.nn.ConvTranspose2d`."""
        return _transpose_layer(self, functional.conv_transpose2d, 2, input, output_size)


class TrainableConvTranspose3d(nn.ConvTranspose3d):
    """A 3-D transposed convolution that runs on the kernels of the kernel table."""

    path = ""
    uses_kernels = False
    is_fused = False

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        """Compute the output from the input, as `torch.nn.ConvTranspose3d`."""
        return _transpose_layer(self, functional.conv_transpose3d, 3, input, output_size)


TRAINABLE_TYPES: dict[type, type] = {
    nn.Conv1d: TrainableConv1d,
    nn.Conv2d: TrainableConv2d,
    nn.Conv3d: TrainableConv3d,
    nn.ConvTranspose1d: TrainableConvTranspose1d,
    nn.ConvTranspose2d: TrainableConvTranspose2d,
    nn.ConvTranspose3d: TrainableConvTranspose3d,
}


def _convolve_layer(
    layer: Any, function: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    padding = layer.padding
    if layer.padding_mode != ZEROS:
        x = functional.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = 0
    options = layer.stride, padding, layer.dilation, layer.groups
    if layer.is_fused and torch.compiler.is_dynamo_compiling():
        return convolve(function, x, weight, bias, *options, uses_operator=False)
    wants_stats = layer.training and layer.uses_kernels and bool(layer.normalized_by)
    if torch.compiler.is_dynamo_compiling() and wants_stats and layer.returns_stats and bias is None:
        results = convolve_with_stats(x, weight, *options)
        if results is not None:
            layer.output_stats = results  # the batch normalization takes them, and resets this attribute
            return results[0]
    y = convolve(
        *(function, x, weight, bias, *options),
        path=layer.path,
        uses_operator=layer.uses_kernels,
        wants_stats=wants_stats,
    )
    return y if table.recorded is None else attach_source(y, layer)


def _transpose_layer(
    layer: Any, function: Any, ndim: int, x: torch.Tensor, output_size: list[int] | None
) -> torch.Tensor:
    if layer.padding_mode != ZEROS:
        raise ValueError(f"padding_mode={layer.padding_mode!r}: expected {ZEROS!r} for a transposed convolution")
    output_padding = layer._output_padding(
        x, output_size, layer.stride, layer.padding, layer.kernel_size, ndim, layer.dilation
    )
    options = layer.stride, layer.padding, layer.dilation, layer.groups, tuple(output_padding)
    uses_operator = layer.uses_kernels and not (layer.is_fused and torch.compiler.is_dynamo_compiling())
    return convolve(function, x, layer.weight, layer.bias, *options, path=layer.path, uses_operator=uses_operator)


def make_trainable(model: nn.Module) -> nn.Module:
    """Return a copy of a model with trainable convolutions, which shares all parameters and buffers with the model.

    Raises ModelError if the model cannot be copied.
    """
    # Weight normalization by a hook computes the weight as an attribute, which PyTorch cannot copy.
    computed = [each for module in model.modules() for each in vars(module).values() if _is_computed(each)]
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *computed)}
    with translate_to_model_error("the model cannot be copied"):
        model_copy = copy.deepcopy(model, shared)
    replaced: dict[int, Any] = {}  # by the identity of the module, which may have several names
    for module in model_copy.modules():
        if layer_type := (TRAINABLE_TYPES | BATCH_NORM_TYPES).get(parametrize.type_before_parametrizations(module)):
            replaced[id(module)] = _make_trainable_layer(module, layer_type)
    trainable: nn.Module = replaced.get(id(model_copy), model_copy)
    for module in list(trainable.modules()):
        for name, child in module._modules.items():
            if id(child) in replaced:
                module._modules[name] = replaced[id(child)]
    for path, layer in trainable.named_modules():
        if isinstance(layer, (*TRAINABLE_TYPES.values(), *BATCH_NORM_TYPES.values())):
            layer.__dict__["path"] = path or ROOT_PATH
    return trainable


def _make_trainable_layer(module: nn.Module, layer_type: Any) -> Any:
    """Return a trainable layer with the attributes of a module, hooks included."""
    if parametrize.is_parametrized(module):  # its weight is a property of a class of its own
        own_attributes = {name: value for name, value in vars(type(module)).items() if name not in TYPE_ATTRIBUTES}
        layer_type = type(type(module).__name__, (layer_type,), own_attributes)
    layer = layer_type.__new__(layer_type)
    layer.__dict__.update(module.__dict__)
    return layer


def _is_computed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_leaf


def list_layers(model: nn.Module) -> dict[str, Any]:
    """Return the trainable convolutions of a model by path."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, tuple(TRAINABLE_TYPES.values()))]
    return {layer.path: layer for layer in layers}


def find_other_convolutions(model: nn.Module) -> dict[str, str]:
    """Return the reasons why convolutions of a model are not trainable ones, by path."""
    types = tuple(TRAINABLE_TYPES)
    trainable_types = tuple(TRAINABLE_TYPES.values())
    return {
        path: f"{type(module).__name__} is {SUBCLASS_REASON}"
        for path, module in model.named_modules()
        if isinstance(module, types) and not isinstance(module, trainable_types)
    }
