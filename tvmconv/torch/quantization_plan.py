"""Which tensors of a graph are stored in 8 bits, and the graph with quantized convolutions.

A convolution's output is stored in 8 bits if all its readers are quantized convolutions, and its kernel then ends with
the rounding. A residual has the type of the output: where a convolution reads a residual of 8 bits and stores floats,
an operator widens the residual. All other inputs of quantized convolutions are rounded by an operator of their own. It
also computes a product that nothing else reads, such as that of an activation and the gate of squeeze-and-excitation.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx

from tvmconv.torch.activation_match import list_value_readers
from tvmconv.torch.calibration import ConvNodes
from tvmconv.torch.fusion_steps import is_in_place_write, is_product
from tvmconv.torch.layer import TunedConv
from tvmconv.torch.quantized_epilogue import ADD, can_fold_zero_point, plan_epilogue
from tvmconv.torch.quantized_layer import Dequantize, Quantize, QuantizedConv, ZeroPoints
from tvmconv.torch.site_workload import resolve_padding


def find_residual(node: fx.Node) -> fx.Node | None:
    """Return the node of the residual of a convolution of a graph; None if it has none."""
    return node.args[1] if len(node.args) > 1 and isinstance(node.args[1], fx.Node) else None


def find_stored(convs: ConvNodes, quantized: Collection[fx.Node]) -> set[fx.Node]:
    """Return the quantized convolutions of which the outputs are stored in 8 bits.

    Args:
        convs: All tuned convolutions of the graph.
        quantized: Those that have operands of 8 bits.
    """
    stored = {node for node in quantized if node.users and _can_store(convs[node])}

    def is_read_in_8_bits(node: fx.Node) -> bool:
        return any(
            reader in quantized and (reader.args[0] is node or (reader in stored and find_residual(reader) is node))
            for reader in node.users
        )

    while True:
        dropped = set()
        for node in stored:
            residual = find_residual(node)
            # A residual that only this convolution reads in 8 bits is not worth a rounding of its own.
            is_residual_ready = residual is None or residual in stored or _is_input(residual, quantized)
            is_taken = all(reader in quantized for reader in list_value_readers(node))
            if not (is_residual_ready and is_taken and is_read_in_8_bits(node)):
                dropped.add(node)
        if not dropped:
            return stored
        stored -= dropped


def list_read_in_8_bits(node: fx.Node, stored: Collection[fx.Node]) -> list[fx.Node]:
    """Return the tensors that a quantized convolution reads in 8 bits: its input, and the residual of a stored one."""
    input_node, residual = node.args[0], find_residual(node)
    assert isinstance(input_node, fx.Node)
    return [input_node, *([residual] if residual is not None and node in stored else [])]


def _is_input(node: fx.Node, quantized: Collection[fx.Node]) -> bool:
    """Return whether a quantized convolution reads a tensor as its input."""
    return any(reader in quantized and reader.args[0] is node for reader in node.users)


def _can_store(module: TunedConv) -> bool:
    """Return whether a kernel can store the output of a layer in 8 bits.

    Kernels on tensor cores store pairs of channels of a group, and those of depthwise convolutions any.
    """
    weight, groups = module.conv.weight, module.conv.groups
    channels = weight.shape[0] // (groups if weight.shape[1] > 1 else 1)
    epilogue = plan_epilogue(module.epilogue_names, has_bias=True, output_scale=1.0, residual_scale=1.0)
    return channels % 2 == 0 and epilogue is not None


def can_have_zero_point(convs: ConvNodes, tensor: fx.Node) -> bool:
    """Return whether the smallest integer may stand for zero in a tensor, whichever convolutions are quantized.

    No reader may pad it, as kernels pad with zeros. A residual is added before activations, so that the bias has its
    zero point, and so does the bias of the convolution that computes the tensor, if one does.
    """
    if tensor in convs and not can_fold_zero_point(convs[tensor].epilogue_names):
        return False
    for reader in tensor.users:
        if reader not in convs:
            continue
        if reader.args[0] is tensor and any(resolve_padding(convs[reader].conv, convs[reader].pads)):
            return False
        if find_residual(reader) is tensor and convs[reader].epilogue_names[0] != ADD:
            return False
    return True


def list_factors(tensor: fx.Node) -> list[fx.Node]:
    """Return the two factors of a tensor that is a product, and that one node reads; none for others."""
    factors = [factor for factor in tensor.args if isinstance(factor, fx.Node)]
    is_read_once = [reader.args.count(tensor) for reader in tensor.users] == [1]
    return factors if is_product(tensor) and is_read_once and len(factors) == 2 else []


@dataclass(frozen=True)
class QuantizedGraph:
    """A graph with quantized convolutions.

    Attributes:
        graph: The nodes.
        layers: Quantized convolutions by their node in the former graph.
    """

    graph: fx.Graph
    layers: dict[fx.Node, QuantizedConv]


def quantize_graph(
    module: fx.GraphModule,
    convs: ConvNodes,
    quantized: Collection[fx.Node],
    scales: Mapping[fx.Node, float],
    dtype: torch.dtype,
    output_dtypes: Mapping[fx.Node, torch.dtype],
    zero_points: Mapping[fx.Node, int] = MappingProxyType({}),
) -> QuantizedGraph:
    """Return the graph of a module with quantized convolutions, which are registered as modules of its own.

    Args:
        module: The traced graph, which keeps its nodes.
        convs: Its tuned convolutions.
        quantized: Those that get operands of 8 bits.
        scales: Scales of the tensors that they read, by node.
        dtype: The 8-bit type.
        output_dtypes: Types of their outputs that are not stored in 8 bits.
        zero_points: Integers that stand for zero in tensors that they read, by node; 0 by default.
    """
    former, graph = module.graph, copy.deepcopy(module.graph)
    copies = dict(zip(former.nodes, graph.nodes, strict=True))
    stored = find_stored(convs, quantized)
    builder = _GraphBuilder(module, graph, _has_in_place_writes(module))
    layers: dict[fx.Node, QuantizedConv] = {}
    for node in (each for each in former.nodes if each in quantized):
        source, residual = convs[node], find_residual(node)
        is_stored = node in stored
        input_node = node.args[0]
        assert isinstance(input_node, fx.Node)
        layer = QuantizedConv(
            source,
            dtype,
            dtype if is_stored else output_dtypes[node],
            scales[input_node],
            scales[node] if is_stored else None,
            scales[residual] if is_stored and residual is not None else None,
            ZeroPoints(
                zero_points.get(input_node, 0),
                zero_points.get(node, 0) if is_stored else 0,
                zero_points.get(residual, 0) if is_stored and residual is not None else 0,
            ),
            folds_zero_point=is_stored and bool(zero_points.get(node, 0)),
        )
        layers[node] = layer
        new_node = copies[node]
        for index, read in enumerate(list_read_in_8_bits(node, stored)):
            if read not in stored:
                grid = scales[read], zero_points.get(read, 0)
                new_node.update_arg(index, builder.round(read, copies[read], new_node, grid, source, dtype))
        if not is_stored and residual in stored:
            grid = scales[residual], zero_points.get(residual, 0)
            new_node.update_arg(1, builder.widen(copies[residual], new_node, grid, layer))
        new_node.target = builder.add_module(f"quantized_{node.name}", layer)
    return QuantizedGraph(graph, layers)


class _GraphBuilder:
    """The insertion of operators that round tensors to 8 bits.

    Several readers of a tensor share one, unless the graph writes to tensors in place.
    """

    def __init__(self, module: fx.GraphModule, graph: fx.Graph, has_in_place_writes: bool) -> None:
        self._module, self._graph, self._has_in_place_writes = module, graph, has_in_place_writes
        self._rounded: dict[fx.Node, fx.Node] = {}

    def add_module(self, name: str, module: torch.nn.Module) -> str:
        """Register a module and return its name."""
        self._module.add_submodule(name, module)
        return name

    def round(
        self,
        former: fx.Node,
        node: fx.Node,
        reader: fx.Node,
        grid: tuple[float, int],
        source: TunedConv,
        dtype: torch.dtype,
    ) -> fx.Node:
        """Return a node that rounds a tensor before one of its readers; the grid is a scale and a zero point."""
        if former in self._rounded:
            return self._rounded[former]
        scale, zero_point = grid
        quantize = Quantize(scale, dtype, source.conv.weight.device, zero_point)
        name = self.add_module(f"quantize_{reader.name}_{former.name}", quantize)
        factors = [] if self._has_in_place_writes else list_factors(node)
        with self._graph.inserting_before(reader):
            rounded = self._graph.call_module(name, tuple(factors) or (node,))
        if factors:
            reader.replace_input_with(node, rounded)
            self._graph.erase_node(node)
        if not self._has_in_place_writes:
            self._rounded[former] = rounded
        return rounded

    def widen(self, node: fx.Node, reader: fx.Node, grid: tuple[float, int], layer: QuantizedConv) -> fx.Node:
        """Return a node that computes the floats of a tensor of 8 bits before one of its readers."""
        scale, zero_point = grid
        name = self.add_module(f"dequantize_{reader.name}", Dequantize(scale, layer.output_dtype, zero_point))
        with self._graph.inserting_before(reader):
            return self._graph.call_module(name, (node,))


def _has_in_place_writes(module: fx.GraphModule) -> bool:
    modules = dict(module.named_modules())
    own = (TunedConv, QuantizedConv, Quantize)
    return any(
        is_in_place_write(node, modules)
        for node in module.graph.nodes
        if not (node.op == "call_module" and isinstance(modules[node.target], own))
    )
