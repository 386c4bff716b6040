"""The quantization of an optimized model: which convolutions get 8-bit operands, and the graphs that run them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tvmconv.errors import ModelError, WorkloadError, translate_to_model_error
from tvmconv.torch.calibration import ConvNodes, find_conv_nodes, measure_errors, record_activations
from tvmconv.torch.conv_site import ConvSite
from tvmconv.torch.layer import TunedConv
from tvmconv.torch.model import Optimized
from tvmconv.torch.partition import GraphPartition
from tvmconv.torch.quantization_choice import StepCosts, choose_quantized
from tvmconv.torch.quantization_options import QuantizationOptions
from tvmconv.torch.quantization_plan import QuantizedGraph, can_have_zero_point, quantize_graph
from tvmconv.torch.quantized_epilogue import SMALLEST_INTEGER
from tvmconv.torch.quantized_layer import Dequantize, Quantize, QuantizedConv, ZeroPoints
from tvmconv.torch.site_workload import DTYPES
from tvmconv.workloads import parse
from tvmconv.workloads.dtypes import INT8, Dtype
from tvmconv.workloads.layout import CHANNELS_LAST

QUANTIZED_MODULES = (Dequantize, Quantize, QuantizedConv)
MIN_CHANNELS = 16  # per group; with fewer, products are few, and tensor cores mostly idle

# Weights of a convolution of single pixels, such as those of a squeeze-and-excitation block. With fewer, all tensors
# are so small that 8 bits save less time than a launch takes.
MIN_WEIGHTS = 1 << 19


@dataclass(frozen=True)
class QuantizedSite:
    """A convolution with 8-bit operands of a graph.

    Attributes:
        site: The same convolution in 16 or 32 bits.
        module: The module that computes it.
        workload_text: Text of its workload.
    """

    site: ConvSite
    module: QuantizedConv
    workload_text: str


class GraphQuantizer(ABC):
    """The quantization of the convolutions of a model; it may be repeated with fewer of them.

    Args:
        partitions: The model's graphs, which call tuned convolutions.
        sites: All convolutions.

    Attributes:
        reasons: Reasons why convolutions keep the model's precision, by the identity of their module.
        errors: Relative L2 errors of convolutions with 8-bit operands, likewise.
        float_output_texts: Texts of their workloads with outputs in the model's precision, likewise.
    """

    dtype: Dtype  # of the operands
    may_choose: bool  # whether the model's precision is an alternative to 8 bits, layer by layer

    def __init__(self, partitions: Sequence[GraphPartition], sites: Sequence[ConvSite]) -> None:
        self._partitions = partitions
        self._former_graphs = [partition.module.graph.graph for partition in partitions]
        self._convs = [find_conv_nodes(partition.module.graph) for partition in partitions]
        self._sites = {id(site.module): site for site in sites if site.module is not None}
        self.reasons: dict[int, str] = {}
        self.errors: dict[int, float] = {}
        self.float_output_texts: dict[int, str] = {}

    @abstractmethod
    def describe(self, num_layers: int, num_convs: int) -> str:
        """Return a sentence on a quantization of some of all convolutions."""

    @abstractmethod
    def quantize_graph(
        self, graph_module: fx.GraphModule, convs: ConvNodes, quantized: Sequence[fx.Node]
    ) -> QuantizedGraph:
        """Return the graph of a module in which some convolutions have operands of 8 bits."""

    def choose(self, costs: StepCosts, has_time: Callable[[], bool]) -> set[int]:
        """Return the identities of the modules whose quantization lowers the time of the model.

        Args:
            costs: Seconds of the steps of a graph.
            has_time: Function that returns whether to go on.
        """
        quantized, chosen = self._list_quantized(), set[int]()
        for convs in self._convs:
            candidates = [node for node in convs if node in quantized]
            chosen |= {id(convs[node]) for node in choose_quantized(convs, candidates, costs, has_time)}
        return chosen

    def make_float_output(self, site: QuantizedSite) -> QuantizedSite:
        """Return a convolution whose output has the model's precision in place of 8 bits."""
        module = site.module
        zero_points = ZeroPoints(module.zero_points.input)
        arguments = module.source, module.dtype, get_output_dtype(site.site), module.input_scale
        layer = QuantizedConv(*arguments, zero_points=zero_points)
        return replace(site, module=layer, workload_text=self.float_output_texts[id(site.site.module)])

    def get_site(self, node: fx.Node) -> ConvSite:
        """Return the convolution of a node."""
        (module,) = (convs[node] for convs in self._convs if node in convs)
        return self._sites[id(module)]

    def _list_quantized(self) -> dict[Any, TunedConv]:
        return {
            node: module for convs in self._convs for node, module in convs.items() if id(module) not in self.reasons
        }

    def apply(self) -> list[QuantizedSite]:
        """Quantize all convolutions that have no reason against it, and return them."""
        self.restore()
        sites: list[QuantizedSite] = []
        quantized_nodes = self._list_quantized()
        for partition, convs in zip(self._partitions, self._convs, strict=True):
            graph_module = partition.module.graph
            quantized = [node for node in convs if node in quantized_nodes]
            result = self.quantize_graph(graph_module, convs, quantized)
            graph_module.graph = result.graph
            sites += [self._make_site(convs[node], node, result) for node in quantized]
        return sites

    def _make_site(self, source: TunedConv, node: fx.Node, result: QuantizedGraph) -> QuantizedSite:
        site, layer = self._sites[id(source)], result.layers[node]
        return QuantizedSite(site, layer, make_quantized_text(site, layer, self.dtype))

    def restore(self) -> None:
        """Have the model run the convolutions in its own precision."""
        for partition, graph in zip(self._partitions, self._former_graphs, strict=True):
            module = partition.module.graph
            module.graph = graph
            for name in [name for name, child in module.named_children() if isinstance(child, QUANTIZED_MODULES)]:
                module.delete_submodule(name)

    def _get_output_dtypes(self, convs: ConvNodes, nodes: Sequence[fx.Node]) -> dict[fx.Node, torch.dtype]:
        return {node: get_output_dtype(self._sites[id(convs[node])]) for node in nodes}


class ModelQuantizer(GraphQuantizer):
    """The quantization of a model in floats, with scales from calibration.

    Args:
        model: The model, whose graphs call tuned convolutions.
        partitions: Its graphs.
        sites: All convolutions.
        options: Type, batches and bounds.
    """

    may_choose = True

    def __init__(
        self,
        model: Optimized,
        partitions: Sequence[GraphPartition],
        sites: Sequence[ConvSite],
        options: QuantizationOptions,
    ) -> None:
        super().__init__(partitions, sites)
        self._model, self._options, self.dtype = model, options, options.dtype
        self._zero_points: dict[fx.Node, int] = {}  # by the node of the tensor; 0 for others
        with translate_to_model_error("the model does not run on an input for calibration"):
            self._scales = self._calibrate()
            self._measure_errors()

    def describe(self, num_layers: int, num_convs: int) -> str:
        """Return a sentence on a quantization of some of all convolutions."""
        options = self._options
        source = f"scales by {options.observer} from {len(options.batches)} inputs"
        return (
            f"{num_layers} of {num_convs} convolutions have operands in {options.dtype.text}, with {source}; "
            f"the error of a layer is at most {options.max_error:g}."
        )

    def quantize_graph(
        self, graph_module: fx.GraphModule, convs: ConvNodes, quantized: Sequence[fx.Node]
    ) -> QuantizedGraph:
        """Return the graph of a module in which some convolutions have operands of 8 bits."""
        output_dtypes = self._get_output_dtypes(convs, quantized)
        dtype, zero_points = self._options.torch_dtype, self._zero_points
        return quantize_graph(graph_module, convs, quantized, self._scales, dtype, output_dtypes, zero_points)

    def _calibrate(self) -> dict[fx.Node, float]:
        """Return the scales of all tensors that convolutions read, after choosing their zero points."""
        options = self._options
        histograms = record_activations(self._model, self._partitions, options)
        for convs in self._convs:
            for node, module in convs.items():
                site = self._sites[id(module)]
                if node.args[0] not in histograms:
                    self.reasons[id(module)] = "it did not run on the inputs for calibration"
                elif reason := _find_obstacle(site, self.dtype):
                    self.reasons[id(module)] = reason
        if self.dtype is INT8:  # of integers, half would stand for no number if none is negative
            convs = {node: module for each in self._convs for node, module in each.items()}
            nonnegative = [node for node, each in histograms.items() if each.largest and not each.has_negative]
            self._zero_points = {node: SMALLEST_INTEGER for node in nonnegative if can_have_zero_point(convs, node)}
        return {
            node: each.choose_scale(options.torch_dtype, options.observer, self._zero_points.get(node, 0))
            for node, each in histograms.items()
        }

    def _measure_errors(self) -> None:
        """Measure the error of each convolution, and keep the model's precision where it exceeds the bound."""
        dtype, nodes = self._options.torch_dtype, self._list_quantized()
        layers = {}
        for node, module in nodes.items():
            site = self._sites[id(module)]
            try:
                zero_points = ZeroPoints(self._zero_points.get(node.args[0], 0))
                scale = self._scales[node.args[0]]
                layer = QuantizedConv(module, dtype, get_output_dtype(site), scale, zero_points=zero_points)
                self.float_output_texts[id(module)] = make_quantized_text(site, layer, self.dtype)
            except (WorkloadError, ModelError) as problem:
                self.reasons[id(module)] = str(problem)
            else:
                layers[node] = layer
        for node, error in measure_errors(self._model, self._partitions, self._options, layers).items():
            module = nodes[node]
            self.errors[id(module)] = error
            if not error <= self._options.max_error:
                self.reasons[id(module)] = f"its error would be {error:.2g}, more than {self._options.max_error:.2g}"


def _find_obstacle(site: ConvSite, dtype: Dtype) -> str:
    """Return the reason why a convolution cannot be quantized; "" if it can."""
    conv: Any = site.module.conv
    workload: Any = parse(site.workload_text)
    if site.is_transposed:
        return "no kernel computes a transposed convolution of 8-bit operands"
    channels = conv.weight.shape[1]
    if channels == 1 < conv.groups and dtype is INT8:  # depthwise: bound by the bytes of the images
        return ""
    has_one_pixel = tuple(workload.output_size) == (1,) * len(conv.kernel_size)
    if has_one_pixel and conv.weight.numel() < MIN_WEIGHTS:
        return f"it computes one pixel per image with {conv.weight.numel():,} weights, and takes little time"
    if channels < MIN_CHANNELS:
        return f"it has {channels} input channels per group, fewer than {MIN_CHANNELS}"
    return ""


def get_output_dtype(site: ConvSite) -> torch.dtype:
    """Return the type of a convolution's output in the model."""
    storage = parse(site.workload_text).storage
    result: torch.dtype = getattr(torch, storage)
    return result


def make_quantized_text(site: ConvSite, layer: QuantizedConv, dtype: Dtype) -> str:
    """Return the text of the workload of a quantized convolution; raise WorkloadError if there is none."""
    names = {**DTYPES, layer.dtype: dtype.storage}
    workload: Any = parse(site.workload_text)
    changes: dict[str, Any] = {}
    if layer.is_padded_before:
        sizes = zip(workload.SPACE, workload.pad_low, workload.pad_high, strict=True)
        changes = {name: getattr(workload, name) + low + high for name, low, high in sizes} | {"padding": 0}
    quantized = replace(
        workload,
        dtype=dtype.name,
        layout=CHANNELS_LAST,
        epilogue=layer.epilogue.ops,
        out_dtype=names[layer.output_dtype],
        **changes,
    )
    text: str = quantized.text
    return text
