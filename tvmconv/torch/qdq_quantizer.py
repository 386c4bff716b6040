"""The quantization of a model by its own Q/DQ pairs, the operators that quantize and dequantize a tensor.

A convolution that reads a dequantized tensor, with a weight of integers, gets operands of 8 bits. If its output is read
by operators alone that quantize it to one format, its kernel stores 8 bits; a residual has to be a dequantized tensor,
too. Other readers of dequantized tensors read floats.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tvmconv.errors import ModelError, WorkloadError
from tvmconv.torch.calibration import ConvNodes
from tvmconv.torch.conv_site import ConvSite
from tvmconv.torch.layer import TunedConv
from tvmconv.torch.partition import GraphPartition
from tvmconv.torch.qdq import DEQUANTIZE, INTEGER_SCALE, INTEGER_WEIGHT, QUANTIZE, IntegerFormat, read_format
from tvmconv.torch.quantization import GraphQuantizer, get_output_dtype, make_quantized_text
from tvmconv.torch.quantization_plan import QuantizedGraph, find_residual
from tvmconv.torch.quantized_epilogue import ADD, plan_epilogue
from tvmconv.torch.quantized_layer import Dequantize, Quantize, QuantizedConv, ZeroPoints
from tvmconv.workloads.dtypes import INT8


class QdqQuantizer(GraphQuantizer):
    """The quantization of a model by its own pairs; the arguments are those of `GraphQuantizer`."""

    dtype = INT8
    may_choose = False  # its own floats would pass through the pairs of operators

    def __init__(self, partitions: Sequence[GraphPartition], sites: Sequence[ConvSite]) -> None:
        super().__init__(partitions, sites)
        for convs in self._convs:
            for node, module in convs.items():
                site = self._sites[id(module)]
                if reason := _find_obstacle(node, site):
                    self.reasons[id(module)] = reason
                    continue
                try:
                    layer = _make_layer(node, module, get_output_dtype(site), None)
                    self.float_output_texts[id(module)] = make_quantized_text(site, layer, self.dtype)
                except (WorkloadError, ModelError) as problem:
                    self.reasons[id(module)] = str(problem)

    def describe(self, num_layers: int, num_convs: int) -> str:
        """Return a sentence on a quantization of some of all convolutions."""
        return f"{num_layers} of {num_convs} convolutions have operands in {self.dtype.text}, as the model says."

    def quantize_graph(
        self, graph_module: fx.GraphModule, convs: ConvNodes, quantized: Sequence[fx.Node]
    ) -> QuantizedGraph:
        """Return the graph of a module in which some convolutions have operands of 8 bits."""
        former, graph = graph_module.graph, copy.deepcopy(graph_module.graph)
        copies = dict(zip(former.nodes, graph.nodes, strict=True))
        stored = {
            node: output_format
            for node in quantized
            if (output_format := _find_output_format(node, convs[node])) is not None
        }
        integers: dict[fx.Node, fx.Node] = {}  # nodes of tensors in int8, by former nodes that quantize

        def find_integers(dequantize: fx.Node, device: torch.device) -> fx.Node:
            """Return the node of the integers of a dequantized tensor; the first call adds one that rounds them."""
            quantize = dequantize.all_input_nodes[0]
            source = quantize.all_input_nodes[0]
            if source in stored:
                return copies[source]
            if quantize not in integers:
                layout = read_format(quantize, QUANTIZE)
                assert layout is not None
                name = f"quantize_{quantize.name}"
                graph_module.add_submodule(name, Quantize(layout.scale, torch.int8, device, layout.zero_point))
                with graph.inserting_before(copies[quantize]):
                    integers[quantize] = graph.call_module(name, (copies[source],))
            return integers[quantize]

        layers: dict[fx.Node, QuantizedConv] = {}
        for node in quantized:
            device = convs[node].conv.weight.device
            layer = layers[node] = _make_layer(
                node, convs[node], self._get_output_dtypes(convs, [node])[node], stored.get(node)
            )
            new_node = copies[node]
            new_node.update_arg(0, find_integers(node.all_input_nodes[0], device))
            residual = find_residual(node)
            if node in stored and residual is not None:
                new_node.update_arg(1, find_integers(residual, device))
            name = f"quantized_{node.name}"
            graph_module.add_submodule(name, layer)
            new_node.target = name
        for node, output_format in stored.items():
            _widen_for_readers(
                graph_module, graph, copies[node], output_format, get_output_dtype(self._sites[id(convs[node])])
            )
        for each in reversed([*graph.nodes]):
            if not each.users and (read_format(each, QUANTIZE) or read_format(each, DEQUANTIZE)):
                graph.erase_node(each)
        return QuantizedGraph(graph, layers)


def _widen_for_readers(
    graph_module: fx.GraphModule, graph: fx.Graph, node: fx.Node, output_format: IntegerFormat, dtype: torch.dtype
) -> None:
    """Have readers of floats read those that the integers of a stored output stand for."""
    for quantize in [user for user in node.users if read_format(user, QUANTIZE)]:
        for dequantize in list(quantize.users):
            if dequantize.users:
                name = f"dequantize_{dequantize.name}"
                graph_module.add_submodule(name, Dequantize(output_format.scale, dtype, output_format.zero_point))
                with graph.inserting_before(dequantize):
                    widened = graph.call_module(name, (node,))
                dequantize.replace_all_uses_with(widened)
            graph.erase_node(dequantize)
        graph.erase_node(quantize)


def _find_obstacle(node: fx.Node, site: ConvSite) -> str:
    """Return the reason why a convolution is not computed in 8 bits; "" if it is."""
    if site.is_transposed:
        return "no kernel computes a transposed convolution of 8-bit operands"
    if not hasattr(site.module.conv, INTEGER_WEIGHT) or site.module.affines:
        return "its weight is no dequantized one of int8 without zero points"
    if _read_pair(node.args[0]) is None:
        return "its input is no dequantized tensor of all integers of 8 bits with one scale"
    return ""


def _read_pair(dequantize: Any) -> IntegerFormat | None:
    """Return the format of a tensor that is quantized and dequantized; None for others."""
    if not isinstance(dequantize, fx.Node):
        return None
    layout = read_format(dequantize, DEQUANTIZE)
    quantize = dequantize.all_input_nodes[0] if layout else None
    return layout if quantize is not None and read_format(quantize, QUANTIZE) == layout else None


def _find_output_format(node: fx.Node, module: TunedConv) -> IntegerFormat | None:
    """Return the format in which a convolution stores its output; None if it stores floats."""
    formats = {read_format(user, QUANTIZE) for user in node.users}
    (output_format, *others) = formats or {None}
    dequantized = [user for quantize in node.users for user in quantize.users]
    if others or output_format is None or any(_read_pair(user) != output_format for user in dequantized):
        return None
    residual = find_residual(node)
    residual_format = None if residual is None else _read_pair(residual)
    if residual is not None and residual_format is None:
        return None
    names = module.epilogue_names
    if residual_format and residual_format.zero_point and names[0] != ADD:
        return None  # the zero point would be added before an activation
    plan = plan_epilogue(
        names, has_bias=True, output_scale=1.0, residual_scale=None if residual_format is None else 1.0
    )
    channels = module.conv.weight.shape[0] // module.conv.groups
    return output_format if plan is not None and channels % 2 == 0 else None


def _make_layer(
    node: fx.Node, module: TunedConv, output_dtype: torch.dtype, output_format: IntegerFormat | None
) -> QuantizedConv:
    """Return the layer of a convolution, which stores its output in a format, or as floats without one."""
    input_format, residual = _read_pair(node.args[0]), find_residual(node)
    assert input_format is not None
    residual_format = None if residual is None or output_format is None else _read_pair(residual)
    return QuantizedConv(
        module,
        torch.int8,
        output_dtype if output_format is None else torch.int8,
        input_format.scale,
        None if output_format is None else output_format.scale,
        None if residual_format is None else residual_format.scale,
        ZeroPoints(
            input_format.zero_point,
            output_format.zero_point if output_format else 0,
            residual_format.zero_point if residual_format else 0,
        ),
        (getattr(module.conv, INTEGER_WEIGHT), getattr(module.conv, INTEGER_SCALE)),
    )
