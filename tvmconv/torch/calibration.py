"""Calibration: the scales of activations, and the error of each convolution with operands of 8 bits.

The model runs on the given batches twice. In the first runs, histograms record the inputs and residuals of all
convolutions. In the second runs, each convolution is computed from the same input in the model's precision and with
quantized operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import fx

from tvmconv.torch.eight_bit_rounding import round_to_8_bits
from tvmconv.torch.layer import TunedConv
from tvmconv.torch.model import Optimized
from tvmconv.torch.observers import AbsoluteHistogram
from tvmconv.torch.partition import GraphPartition, clone_tensors
from tvmconv.torch.quantization_options import QuantizationOptions
from tvmconv.torch.quantized_layer import QuantizedConv
from tvmconv.torch.shape_recorder import ShapeRecorder

MAX_ERROR_BATCHES = 4  # batches for which errors are computed

ConvNodes = Mapping[fx.Node, TunedConv]


def find_conv_nodes(graph: fx.GraphModule) -> dict[fx.Node, TunedConv]:
    """Return the nodes of tuned convolutions with their modules, in the graph's order."""
    modules = dict(graph.named_modules())
    nodes = [node for node in graph.graph.nodes if node.op == "call_module"]
    return {node: modules[node.target] for node in nodes if isinstance(modules[node.target], TunedConv)}


class _ActivationRecorder(ShapeRecorder):
    """An interpreter that adds what convolutions read to histograms, by the node of the tensor."""

    def __init__(self, graph: fx.GraphModule, histograms: dict[fx.Node, AbsoluteHistogram]) -> None:
        super().__init__(graph)
        self._convs, self._histograms = find_conv_nodes(graph), histograms
        self._recorded: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, after recording what it reads."""
        if n in self._convs:
            args, _ = self.fetch_args_kwargs_from_env(n)
            for node, value in zip(n.args, args, strict=True):
                if isinstance(node, fx.Node) and node not in self._recorded:
                    self._recorded.add(node)
                    self._histograms.setdefault(node, AbsoluteHistogram()).add(value)
        return super().run_node(n)


class _ErrorRecorder(ShapeRecorder):
    """An interpreter that adds up the squares of outputs of convolutions, and of the errors of quantized ones."""

    def __init__(
        self, graph: fx.GraphModule, quantized: Mapping[fx.Node, QuantizedConv], squares: dict[fx.Node, torch.Tensor]
    ) -> None:
        super().__init__(graph)
        self._quantized, self._squares = quantized, squares

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and compute it with quantized operands, too."""
        layer = self._quantized.get(n)
        if layer is None:
            return super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        rounded = round_to_8_bits(args[0].float() / layer.input_scale, layer.dtype, layer.zero_points.input)
        output = layer.run_reference(rounded, *args[1:])
        result = super().run_node(n)
        error = (output.double() - result.double()).square().sum()
        sums = torch.stack([error, result.double().square().sum()]).cpu()
        self._squares[n] = self._squares.get(n, torch.zeros(2, dtype=torch.float64)) + sums
        return result


def run_recorders(
    model: Optimized, partitions: Sequence[GraphPartition], recorders: Sequence[ShapeRecorder], batch: Sequence[Any]
) -> None:
    """Run a model with a recorder in place of the graph of each part."""
    for partition, recorder in zip(partitions, recorders, strict=True):
        partition.module.interpreter = recorder.run_with_arguments
    try:
        with torch.no_grad():
            model(*clone_tensors(batch))
    finally:
        for partition in partitions:
            partition.module.interpreter = None


def record_activations(
    model: Optimized, partitions: Sequence[GraphPartition], options: QuantizationOptions
) -> dict[fx.Node, AbsoluteHistogram]:
    """Return histograms of the tensors that convolutions read, by the tensor's node, over all batches."""
    histograms: dict[fx.Node, AbsoluteHistogram] = {}
    for batch in options.batches:
        recorders = [_ActivationRecorder(partition.module.graph, histograms) for partition in partitions]
        run_recorders(model, partitions, recorders, batch)
    return histograms


def measure_errors(
    model: Optimized,
    partitions: Sequence[GraphPartition],
    options: QuantizationOptions,
    quantized: Mapping[fx.Node, QuantizedConv],
) -> dict[fx.Node, float]:
    """Return the relative L2 error of each convolution with quantized operands, over the first batches.

    The quantized convolutions have outputs in the model's precision.
    """
    squares: dict[fx.Node, torch.Tensor] = {}
    for batch in islice(options.batches, MAX_ERROR_BATCHES):
        recorders = [_ErrorRecorder(partition.module.graph, quantized, squares) for partition in partitions]
        run_recorders(model, partitions, recorders, batch)
    ratios = {node: float(error / norm) if norm else float(error) for node, (error, norm) in squares.items()}
    return {node: ratio**0.5 for node, ratio in ratios.items()}
