"""The group and instance normalizations of traced graphs that kernels compute, each with the activation after it.

A kernel is used in the layouts in which it is faster than PyTorch, and correct. PyTorch's group normalization returns
a contiguous tensor, so that a chain of convolutions that are channels last is interrupted; the kernels keep the layout.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.operator_schemas import normalize_function

from tvmconv.errors import Error, get_first_line
from tvmconv.torch.accuracy import TOLERANCE_FACTOR, compute_relative_error
from tvmconv.torch.activation_match import match_activation
from tvmconv.torch.concatenation_fusion import ConcatenationReplacer
from tvmconv.torch.conv_call import KERNEL_DTYPES
from tvmconv.torch.conv_site import TensorMetadata
from tvmconv.torch.graph_constants import ConstantFinder
from tvmconv.torch.group_norm_layer import FusedNorm, NormParameters
from tvmconv.torch.group_norm_operator import LEAKY_RELU, find_kernel_layout
from tvmconv.torch.group_norm_source import ACTIVATION_CODE
from tvmconv.torch.model import Optimized
from tvmconv.torch.partition import GraphPartition, clone_tensors
from tvmconv.torch.report import PYTORCH_NAME, LayerReport
from tvmconv.torch.shape_recorder import ShapeRecorder
from tvmconv.torch.signature import SLOPE_OP
from tvmconv.torch.tensor_layout import lay_out
from tvmconv.torch.torch_modules import has_hooks, is_plain_instance
from tvmconv.workloads import dtypes
from tvmconv.workloads.epilogues.operations import SLOPES
from tvmconv.workloads.layout import UNIFORM_LAYOUTS

KERNEL_NAME = "group_norm"  # of the implementation in reports
INSTANCE_NORMS = (torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)
FUNCTIONS = (torch.nn.functional.group_norm, torch.nn.functional.instance_norm, torch.group_norm)
NO_SLOWER = "PyTorch is no slower"
TimeCall = Callable[[str, Callable[[], object]], float]  # from a name and a call to the seconds of the call


@dataclass
class GroupNormSite:
    """A normalization of a graph, with the activation that a kernel computes with it."""

    path: str  # path of its module in the model
    nodes: tuple[fx.Node, ...]  # the normalization, and the nodes of the activation
    layer: FusedNorm
    metadata: TensorMetadata  # of its input
    former_names: str  # names of the operations in the model

    @property
    def key(self) -> str:
        """A text that is equal for sites with equal times."""
        parameters = self.layer.parameters_of_norm
        has_parameters = [each is not None for each in (parameters.weight, parameters.bias)]
        return f"{self.former_names}, {self.metadata}, {parameters.num_groups} groups, {has_parameters}"


def find_norm_sites(
    graph: fx.GraphModule, metadata: Mapping[fx.Node, TensorMetadata], path: str
) -> list[GroupNormSite]:
    """Return the normalizations of a graph that the kernels can compute, given the metadata of its nodes in a run."""
    modules: dict[str, Any] = dict(graph.named_modules())
    constants, order = ConstantFinder(graph), {node: number for number, node in enumerate(graph.graph.nodes)}
    sites = []
    for node in graph.graph.nodes:
        parameters = _match_norm(node, modules, constants, metadata)
        if parameters is None:
            continue
        input_info, result = metadata[node.args[0]], metadata.get(node)
        if result is None or input_info.dtype is not result.dtype:
            continue
        match = match_activation(node, order, modules, constants)
        nodes: tuple[fx.Node, ...] = (node,)
        activation, slope = "", 0.0
        if match is not None:
            name, factor = match.name, SLOPES.get(match.name, 0.0)
            if name == SLOPE_OP and match.slope is not None and match.slope.is_number:
                name, factor = LEAKY_RELU, float(match.slope.compute())
            name = LEAKY_RELU if name in SLOPES else name
            if name in ACTIVATION_CODE:
                activation, slope, nodes = name, factor, (node, *match.nodes)
        names = " + ".join(_name_operation(each, modules) for each in nodes)
        own_path = str(node.target).partition(".")[2] if node.op == "call_module" else node.name
        full_path = f"{path}.{own_path}".strip(".")
        sites.append(GroupNormSite(full_path, nodes, FusedNorm(parameters, activation, slope), input_info, names))
    return sites


def _match_norm(
    node: fx.Node, modules: Mapping[str, Any], constants: ConstantFinder, metadata: Mapping[fx.Node, TensorMetadata]
) -> NormParameters | None:
    """Return the normalization that a node computes from its first argument; None for another operation."""
    source = node.args[0] if node.args else None
    input_info = metadata.get(source) if isinstance(source, fx.Node) else None
    if input_info is None or input_info.dtype not in KERNEL_DTYPES or len(input_info.shape) < 3:
        return None
    if node.op == "call_module":
        module = modules[str(node.target)]
        if has_hooks(module) or len(node.args) > 1 or node.kwargs:
            return None
        return _describe_module(module, len(input_info.shape))
    if node.op != "call_function" or node.target not in FUNCTIONS:
        return None
    return _describe_function(node, constants)


def _describe_module(module: Any, ndim: int) -> NormParameters | None:
    if is_plain_instance(module, (torch.nn.GroupNorm,)):
        num_groups = module.num_groups
    elif is_plain_instance(module, INSTANCE_NORMS) and not module.track_running_stats:
        if ndim != next(number for number, each in enumerate(INSTANCE_NORMS, 3) if isinstance(module, each)):
            return None  # without a batch axis
        num_groups = None
    else:
        return None
    weight, bias = ((module, name) if getattr(module, name) is not None else None for name in ("weight", "bias"))
    return NormParameters(num_groups, module.eps, weight, bias, module)


def _describe_function(node: fx.Node, constants: ConstantFinder) -> NormParameters | None:
    call = normalize_function(node.target, node.args, node.kwargs, normalize_to_only_use_kwargs=True)
    if call is None:
        return None
    arguments = call.kwargs
    eps, num_groups = arguments.get("eps", 1e-5), arguments.get("num_groups")
    if node.target is torch.nn.functional.instance_norm:
        is_by_statistics = arguments.get("running_mean") is None and arguments.get("running_var") is None
        if not is_by_statistics or arguments.get("use_input_stats", True) is not True:
            return None
    elif not isinstance(num_groups, int):
        return None
    attributes = []
    for value in (arguments.get("weight"), arguments.get("bias")):
        constant = constants.find(value)
        attributes.append(None if value is None or constant is None else constant.attribute)
        if value is not None and attributes[-1] is None:
            return None
    return NormParameters(num_groups, eps, *attributes) if isinstance(eps, float) else None


def _name_operation(node: fx.Node, modules: Mapping[str, Any]) -> str:
    if node.op == "call_module":
        return type(modules[str(node.target)]).__name__
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))


@dataclass(frozen=True)
class _Timing:
    """The measurements of a normalization."""

    pytorch_seconds: float | None
    tvmconv_seconds: float | None = None
    reason: str = ""  # why PyTorch computes it
    layouts: tuple[str, ...] = ()  # in which a kernel does


class NormFuser:
    """What replaces normalizations of a model's graphs, and concatenations of images, by kernels.

    Args:
        time_call: Function that measures calls; None to use the kernels wherever they are correct.
        has_time: Function that returns whether there is time for further measurements, of the largest images first.
            Without time, kernels are used if they are correct.
    """

    def __init__(self, time_call: TimeCall | None, has_time: Callable[[], bool] = lambda: True) -> None:
        self._time_call, self._has_time = time_call, has_time
        self._concatenations = ConcatenationReplacer(time_call, has_time)
        self._timings: dict[str, _Timing] = {}
        self.layers: list[tuple[FusedNorm, str]] = []  # the modules that kernels compute, with texts of their sites
        self.reports: list[LayerReport] = []
        self.num_concatenations = 0  # that kernels compute

    def fuse(self, model: Optimized, partitions: Sequence[GraphPartition], arguments: Sequence[Any]) -> None:
        """Replace what the kernels compute faster, in a model that runs on these arguments."""
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            return  # PyTorch would compute them in float32
        recorders = [ShapeRecorder(partition.module.graph) for partition in partitions]
        for partition, recorder in zip(partitions, recorders, strict=True):
            partition.module.interpreter = recorder.run_with_arguments
        model(*clone_tensors(arguments))
        sites = []
        for partition, recorder in zip(partitions, recorders, strict=True):
            partition.module.interpreter = None
            sites.append(find_norm_sites(partition.module.graph, recorder.metadata, partition.path))
        for site in sorted(itertools.chain(*sites), key=lambda site: -math.prod(site.metadata.shape)):
            if site.key not in self._timings:
                self._timings[site.key] = self._measure(site, self._time_call if self._has_time() else None)
        former_graphs = [copy.deepcopy(partition.module.graph.graph) for partition in partitions]
        for partition, recorder, own_sites in zip(partitions, recorders, sites, strict=True):
            graph = partition.module.graph
            for site in own_sites:
                self._fuse_site(site, graph, recorder.metadata)
            self.num_concatenations += self._concatenations.replace(graph, recorder.metadata)
            graph.recompile()
        try:
            model(*clone_tensors(arguments))
        except RuntimeError as failure:  # a `view`, for example, needs the contiguous results of PyTorch
            for partition, former_graph in zip(partitions, former_graphs, strict=True):
                partition.module.graph.graph = former_graph
            self._drop(get_first_line(failure))

    def _drop(self, reason: str) -> None:
        """Report that PyTorch computes everything for a reason."""
        self.layers.clear()
        self.num_concatenations = 0
        self.reports = [
            replace(line, implementation=PYTORCH_NAME, reason=line.reason or reason) for line in self.reports
        ]

    def describe(self) -> list[str]:
        """Return a sentence about the concatenations that a kernel computes, if there are any."""
        count = self.num_concatenations
        return [f"A kernel computes {count} concatenation{'s' * (count > 1)} of images."] if count else []

    def _fuse_site(self, site: GroupNormSite, graph: fx.GraphModule, metadata: dict[fx.Node, TensorMetadata]) -> None:
        timing = self._timings[site.key]
        is_used = bool(timing.layouts)
        self.reports.append(
            LayerReport(
                site.path,
                "",
                KERNEL_NAME if is_used else PYTORCH_NAME,
                timing.reason,
                timing.pytorch_seconds,
                timing.tvmconv_seconds,
                former=site.former_names,
            )
        )
        if not is_used:
            return
        for layout in timing.layouts:
            site.layer.add_input(lay_out(site.metadata.make_random_like(), layout))
        self.layers.append((site.layer, f"{site.path} {site.key} {timing.layouts}"))
        name = f"norm{len(self.layers)}"
        graph.add_submodule(name, site.layer)
        first, last = site.nodes[0], site.nodes[-1]
        with graph.graph.inserting_before(first):
            call = graph.graph.call_module(name, (first.args[0],))
        metadata[call] = metadata[last]
        for node in dict.fromkeys((last, *site.nodes)):  # others read only shapes of the inner results
            node.replace_all_uses_with(call, delete_user_cb=lambda user: user not in site.nodes)
        inputs = {each for node in site.nodes for each in node.all_input_nodes} - {*site.nodes}
        for node in reversed(site.nodes):
            graph.graph.erase_node(node)
        for node in inputs:
            if node.op == "get_attr" and not node.users:
                graph.graph.erase_node(node)

    def _measure(self, site: GroupNormSite, time_call: TimeCall | None) -> _Timing:
        """Compare the kernels with PyTorch in both layouts; without `time_call`, compare the results alone."""

        def measure(name: str, call: Callable[[], object]) -> float | None:
            return time_call(name, call) if time_call else None

        example = site.metadata.make_random_like()
        own_layout, layer = find_kernel_layout(example), site.layer
        expected = layer.run_eager(example)
        pytorch_seconds = measure(f"PyTorch: {site.key}", lambda: layer.run_eager(example))
        if own_layout is None:
            return _Timing(pytorch_seconds, reason="its input has another layout")
        tolerance = TOLERANCE_FACTOR * dtypes.DTYPES[KERNEL_DTYPES[example.dtype]].tolerance
        layouts: list[str] = []
        tvmconv_seconds = None
        for layout in sorted(UNIFORM_LAYOUTS, key=own_layout.__ne__):
            x = lay_out(example, layout)
            layer.add_input(x)
            try:
                error = compute_relative_error(layer(x), expected if layout == own_layout else layer.run_eager(x))
                seconds = measure(f"{KERNEL_NAME}, {layout}: {site.key}", functools.partial(layer.forward, x))
            except (Error, RuntimeError) as failure:
                return _Timing(pytorch_seconds, reason=get_first_line(failure))
            finally:
                layer.clear_inputs()
            if layout == own_layout:
                tvmconv_seconds = seconds
            if error > tolerance:
                return _Timing(pytorch_seconds, seconds, f"the kernel's result differs by {error:.1e}")
            if seconds is None or pytorch_seconds is None or seconds < pytorch_seconds:
                layouts.append(layout)
            elif layout == own_layout:
                return _Timing(pytorch_seconds, seconds, NO_SLOWER)
        return _Timing(pytorch_seconds, tvmconv_seconds, layouts=tuple(layouts))
