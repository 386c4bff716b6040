"""Models with Q/DQ pairs, the operators that quantize and dequantize a tensor, as PyTorch's PT2E quantization exports.

A convolution of such a model reads dequantized tensors: an activation with one scale, and a weight of integers with one
scale or one per output channel. The pairs stay in the graph. A convolution becomes a module with the floats of its
weight, which has the integers as attributes, and ATen's operators around it become PyTorch's functions, so that the
graph is like one of a model in floats.

Source: `torch.ao.quantization.fx._decomposed`, the operators of the namespace `quantized_decomposed`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from tvmconv.torch.conv_source import CONV_ARGUMENTS
from tvmconv.torch.graph_constants import ConstantFinder

NAMESPACE = "quantized_decomposed"
QUANTIZE, DEQUANTIZE = (f"{NAMESPACE}.{name}_per_tensor.default" for name in ("quantize", "dequantize"))
DEQUANTIZE_CHANNELS = f"{NAMESPACE}.dequantize_per_channel.default"
PAIR_ARGUMENTS = ("input", "scale", "zero_point", "quant_min", "quant_max", "dtype")
CHANNELS_ARGUMENTS = ("input", "scales", "zero_points", "axis", "quant_min", "quant_max", "dtype")
OFFSETS = {torch.int8: 0, torch.uint8: 128}  # to subtract from an integer for one of int8
GUARDS = "_guards_fn"  # module of an exported model that tests shapes
# ATen's operators around convolutions, with the function or method of the same arguments.
FUNCTIONS: dict[str, Any] = {
    **{f"aten.{name}.default": getattr(torch, name) for name in ("relu", "sigmoid", "tanh", "relu_", "clamp")},
    **{
        f"aten.{name}.default": getattr(functional, name)
        for name in ("silu", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "gelu", "elu", "mish", "relu6")
    },
    **{"aten.add.Tensor": torch.add, "aten.add_.Tensor": operator.iadd, "aten.mul.Tensor": torch.mul},
}
CONV_MODULES = {
    f"aten.conv{ndim}d.{overload}": module
    for ndim, module in ((1, torch.nn.Conv1d), (2, torch.nn.Conv2d), (3, torch.nn.Conv3d))
    for overload in ("default", "padding")
}
INTEGER_WEIGHT, INTEGER_SCALE = "integer_weight", "integer_scale"  # attributes of a convolution


@dataclass(frozen=True)
class IntegerFormat:
    """The scale of a tensor in int8, and the integer that stands for zero."""

    scale: float
    zero_point: int


def has_pairs(model: Any) -> bool:
    """Return whether a model is a graph with operators that dequantize."""
    return isinstance(model, fx.GraphModule) and any(_get_name(node) == DEQUANTIZE for node in model.graph.nodes)


def read_format(node: fx.Node, name: str) -> IntegerFormat | None:
    """Return the format of the integers that an operator `QUANTIZE` or `DEQUANTIZE` writes or reads.

    None if a node is another operator, or does not use all integers of its type.
    """
    if _get_name(node) != name:
        return None
    arguments = _bind(node, PAIR_ARGUMENTS)
    scale, zero_point, dtype = arguments["scale"], arguments["zero_point"], arguments["dtype"]
    offset = OFFSETS.get(dtype)
    numbers = (scale, zero_point, arguments["quant_min"], arguments["quant_max"])
    if offset is None or not all(isinstance(each, (int, float)) for each in numbers):
        return None
    if numbers[2:] != (offset - 128, offset + 127):
        return None
    return IntegerFormat(float(scale), int(zero_point) - offset)


def normalize_graph(model: fx.GraphModule) -> None:
    """Have a graph with pairs call modules for its convolutions, and PyTorch's functions in place of ATen's."""
    constants = ConstantFinder(model)
    for node in list(model.graph.nodes):
        name = _get_name(node)
        if node.op == "call_module" and node.target == GUARDS:
            model.graph.erase_node(node)
        elif name in CONV_MODULES:
            _replace_conv(model, node, constants)
        elif name in FUNCTIONS and not (FUNCTIONS[name] is operator.iadd and node.kwargs):
            node.target = FUNCTIONS[name]
    model.graph.eliminate_dead_code()
    model.delete_all_unused_submodules()
    model.recompile()


def _replace_conv(model: fx.GraphModule, node: fx.Node, constants: ConstantFinder) -> None:
    """Have a convolution of constant weights be a module."""
    arguments = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, **_bind(node, CONV_ARGUMENTS)}
    weight, bias = _compute(arguments["weight"], constants), _compute(arguments["bias"], constants)
    if weight is None or (bias is None) != (arguments["bias"] is None):
        return
    groups = arguments["groups"]
    geometry = (_expand(arguments[key]) for key in ("stride", "padding", "dilation"))
    module: Any = CONV_MODULES[_get_name(node)](
        *(weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]), *geometry, groups),
        bias=bias is not None,
        device="meta",
    )
    module.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    if bias is not None:
        module.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    if integers := _read_integer_weight(arguments["weight"], constants):
        setattr(module, INTEGER_WEIGHT, integers[0])
        setattr(module, INTEGER_SCALE, integers[1])
    name = f"{node.name}_module"
    model.add_submodule(name, module)
    with model.graph.inserting_before(node):
        call_node = model.graph.call_module(name, (arguments["input"],))
    call_node.meta.update(node.meta)
    node.replace_all_uses_with(call_node)
    model.graph.erase_node(node)


def _expand(sizes: Any) -> Any:
    """Return an option of a module from the argument of a function, in which one number may stand for all axes."""
    return sizes if isinstance(sizes, (int, str)) else sizes[0] if len(sizes) == 1 else tuple(sizes)


def _read_integer_weight(node: Any, constants: ConstantFinder) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a weight in int8 and its scale per output channel, if a node dequantizes one without zero points."""
    name = _get_name(node)
    if name not in (DEQUANTIZE, DEQUANTIZE_CHANNELS):
        return None
    if name == DEQUANTIZE:
        arguments = _bind(node, PAIR_ARGUMENTS)
        scales, zero_points, axis = arguments["scale"], arguments["zero_point"], 0
    else:
        arguments = _bind(node, CHANNELS_ARGUMENTS)
        scales, zero_points, axis = arguments["scales"], arguments["zero_points"], arguments["axis"]
    offset = OFFSETS.get(arguments["dtype"])
    weight, scale, zero_point = (_compute(each, constants) for each in (arguments["input"], scales, zero_points))
    if offset is None or axis != 0 or weight is None or scale is None:
        return None
    if zero_points is not None and (zero_point is None or not bool((zero_point == offset).all())):
        return None
    integers = (weight.to(torch.int16) - offset).to(torch.int8)
    return integers, scale.to(weight.device, torch.float32).expand(weight.shape[0]).clone()


def _compute(value: Any, constants: ConstantFinder) -> torch.Tensor | None:
    """Return the value of a node that is a constant, or of a number; None for others."""
    constant = constants.find(value)
    result: torch.Tensor | None = None if constant is None else constant.compute().detach()
    return result


def _get_name(node: Any) -> str:
    """Return the name of the operator that a node calls; "" for other nodes."""
    return str(node.target) if isinstance(node, fx.Node) and node.op == "call_function" else ""


def _bind(node: fx.Node, names: tuple[str, ...]) -> Mapping[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
