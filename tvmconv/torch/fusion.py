"""The convolutions of a traced model, with the operations after each that one kernel can compute, and the workloads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch.nn.utils import parametrize

from tvmconv.errors import ModelError, WorkloadError
from tvmconv.torch.activation_match import list_value_readers
from tvmconv.torch.conv_site import ConvSite, Metadata, TensorMetadata
from tvmconv.torch.conv_source import find_conv, find_zero_padding
from tvmconv.torch.fusion_steps import ADD, GraphView, is_in_place_write
from tvmconv.torch.graph_constants import ConstantFinder
from tvmconv.torch.metadata_readers import is_metadata_reader
from tvmconv.torch.model import Optimized
from tvmconv.torch.partition import GraphPartition
from tvmconv.torch.shape_recorder import ShapeRecorder
from tvmconv.torch.site_workload import make_site_workload
from tvmconv.torch.torch_modules import CONVOLUTIONS
from tvmconv.workloads.layout import CHANNELS_FIRST

__all__ = ["ConvSite", "ShapeRecorder", "TensorMetadata", "find_fusion_sites", "match_convolutions", "replace_sites"]

ROOT_PATH = "(itself)"  # path of a model that is itself a convolution
NOT_RUN_REASON = "it did not run on the example, or it is in a module with hooks or a subclass of a convolution"


def find_fusion_sites(
    graph: fx.GraphModule, metadata: Metadata, constants: ConstantFinder | None = None
) -> Iterator[ConvSite]:
    """Yield the convolutions of a graph, each with the operations around it that one kernel can compute.

    `metadata` describes the results of the nodes in a run of the model.
    """
    view = GraphView(graph, metadata, constants or ConstantFinder(graph))
    used_nodes: set[fx.Node] = set()
    for node in view.order:
        conv = find_conv(node, view.modules, view.constants)
        if conv is None:
            continue
        site = ConvSite(_find_path(node), conv, [node])
        if isinstance(conv, str):
            site.conv, site.reason = None, conv
        else:
            _include_zero_padding(site, view)
            _include_next_steps(site, view, used_nodes)
            used_nodes.update(site.nodes)
        site.former_names = " + ".join(
            view.describe_operation(each) for each in [*reversed(site.pad_nodes), *site.nodes]
        )
        yield site


def _include_next_steps(site: ConvSite, view: GraphView, used_nodes: set[fx.Node]) -> None:
    """Add the operations after a convolution to its site, and the name and reason of the first that is left out."""
    while not isinstance(step := view.find_next_step(site, used_nodes), str):
        if step.affine is not None:
            site.affines.append(step.affine)
        else:
            site.epilogue_names.append(step.name)
            site.slope = site.slope or step.slope
        if step.name == ADD:
            site.add_node = step.nodes[0]
        site.nodes += step.nodes
    names = filter(None, map(view.name_reported, list_value_readers(site.nodes[-1])))
    site.followed_by = next(names, "") if step else ""
    site.missed_reason = step if site.followed_by else ""


def _include_zero_padding(site: ConvSite, view: GraphView) -> None:
    """Add the zero padding before a convolution to its site."""
    if site.is_transposed or site.conv.padding_mode != "zeros":
        return
    while (pads := find_zero_padding(site.input_node, view.modules)) is not None:
        pad_node = site.input_node
        if len(pads) > 2 * len(site.conv.kernel_size) or _is_written_between(view, pad_node, site.nodes[0]):
            return
        site.pad_nodes.append(pad_node)
        num_sides = max(len(pads), len(site.pads))
        former = (*site.pads, *(0,) * (num_sides - len(site.pads)))
        site.pads = tuple(map(sum, zip(former, (*pads, *(0,) * (num_sides - len(pads))), strict=True)))


def _is_written_between(view: GraphView, first: fx.Node, last: fx.Node) -> bool:
    """Return whether an operation between two nodes may write to an existing tensor."""
    nodes = [node for node in view.order if view.order[first] < view.order[node] < view.order[last]]
    return any(is_in_place_write(node, view.modules) for node in nodes)


def _find_path(node: fx.Node) -> str:
    """Return the path in the model of the module that computes a node; without one, the name of the node."""
    if node.op == "call_module":
        return str(node.target).partition(".")[2]
    stack = [*(node.meta.get("nn_module_stack") or {}).values()]
    return str(stack[-1][0]) if stack and stack[-1][0] else node.name


def replace_sites(graph: fx.GraphModule, sites: Sequence[ConvSite]) -> None:
    """Replace the sites of a graph by tuned modules: their own, or new ones."""
    constants = ConstantFinder(graph)
    for number, site in enumerate(sites):
        name = f"conv{number}"
        site.module = site.module or site.make_module()
        graph.add_submodule(name, site.module)
        last_node = site.nodes[-1]
        with graph.graph.inserting_after(last_node):
            args = (site.input_node, *([site.residual] if site.add_node else []))
            call_node = graph.graph.call_module(name, args)
        last_node.replace_all_uses_with(call_node)
        inner_nodes = [*reversed(site.nodes), *site.list_private_pad_nodes()]
        inputs = {each for node in site.nodes for each in node.all_input_nodes} - {*inner_nodes}
        for node in inner_nodes:
            graph.graph.erase_node(node)
        for node in inputs:
            _erase_unread_constants(graph, node, constants)
    graph.recompile()


def _erase_unread_constants(graph: fx.GraphModule, node: fx.Node, constants: ConstantFinder) -> None:
    """Erase the computation of a weight, for example, that nothing reads any more."""
    if node.users or node.op == "placeholder" or constants.find(node) is None:
        return
    inputs = node.all_input_nodes
    graph.graph.erase_node(node)
    for each in inputs:
        _erase_unread_constants(graph, each, constants)


def _move_metadata_readers(site: ConvSite) -> None:
    """Let what reads the shape or dtype of an inner result read that of the last result, which is the same."""
    last_node = site.nodes[-1]
    for node in site.nodes[:-1]:
        for reader in [user for user in node.users if is_metadata_reader(user)]:
            last_node.append(reader)
            reader.replace_input_with(node, last_node)


class GraphPlanner(Protocol):
    """What decides about the layouts inside a graph; see `tvmconv.torch.layout_plan`."""

    def make_recorder(self, graph: fx.GraphModule, image_ndims: Collection[int]) -> Any:
        """Return the `ShapeRecorder` with which the graph has to be run; images have one of these numbers of axes."""

    def plan(self, graph: fx.GraphModule, sites: Sequence[ConvSite], recorder: Any) -> None:
        """Set the layouts of the sites, and insert conversions into the graph."""


def match_convolutions(
    model: Optimized,
    partitions: Sequence[GraphPartition],
    arguments: Sequence[Any],
    planner: GraphPlanner | None = None,
) -> list[ConvSite]:
    """Match the convolutions of a model in a run on the example; replace those that have a workload.

    Without a planner, all images keep the layouts that they have in PyTorch. Returns all convolutions of the model, in
    the order of the graphs of its traced parts.
    """
    modules: list[Any] = [module for module in model.modules() if isinstance(module, tuple(CONVOLUTIONS))]
    image_ndims = {len(module.kernel_size) + 2 for module in modules} or {3, 4, 5}
    recorders: list[ShapeRecorder] = [
        planner.make_recorder(partition.module.graph, image_ndims) if planner else ShapeRecorder(partition.module.graph)
        for partition in partitions
    ]
    for partition, recorder in zip(partitions, recorders, strict=True):
        partition.module.interpreter = recorder.run_with_arguments
    with torch.no_grad():
        model(*arguments)
    sites: list[ConvSite] = []
    for partition, recorder in zip(partitions, recorders, strict=True):
        partition.module.interpreter = None
        sites += _replace_convolutions(partition, recorder, planner)
    matched_paths = {site.path for site in sites}
    for path, module in model.named_modules():
        if isinstance(module, tuple(CONVOLUTIONS)) and (path or ROOT_PATH) not in matched_paths:
            sites.append(ConvSite(path, reason=_explain_unmatched(module)))
    return sites


def _explain_unmatched(module: Any) -> str:
    """Return the reason for which a convolution of a model was not found in its graphs."""
    if not parametrize.is_parametrized(module):
        return NOT_RUN_REASON
    steps = [step for steps in module.parametrizations.values() for step in steps]
    names = ", ".join(dict.fromkeys(type(step).__name__.lstrip("_") for step in steps))
    return f"its weight is computed by {names}, which cannot be fused, or it did not run on the example"


def _replace_convolutions(
    partition: GraphPartition, recorder: ShapeRecorder, planner: GraphPlanner | None
) -> list[ConvSite]:
    """Match the convolutions of one part and replace those that have a workload."""
    sites = match_graph(partition.module.graph, recorder, planner)
    replace_sites(partition.module.graph, [site for site in sites if site.workload_text])
    for site in sites:
        site.path = f"{partition.path}.{site.path}".strip(".") or ROOT_PATH
    return sites


def match_graph(
    graph: fx.GraphModule,
    recorder: ShapeRecorder,
    planner: GraphPlanner | None,
    constant_values: Mapping[fx.Node, torch.Tensor] | None = None,
) -> list[ConvSite]:
    """Match the convolutions of a graph that a recorder has run, with their workloads, and plan its layouts.

    `constant_values` are the values of placeholders that are parameters or buffers of the model.
    """
    metadata = recorder.metadata
    sites = list(find_fusion_sites(graph, metadata, ConstantFinder(graph, constant_values)))
    layouts = [metadata[site.nodes[0]].layout for site in sites if site.nodes[0] in metadata]
    known_layouts = [layout for layout in layouts if layout]
    default_layout = max(known_layouts, key=known_layouts.count, default=CHANNELS_FIRST)
    for site in sites:
        try:
            if not site.reason:
                site.workload_text = make_site_workload(site, metadata, default_layout).text
        except (WorkloadError, ModelError) as error:
            site.reason = str(error)
        if site.workload_text:
            site.input_metadata = metadata[site.input_node]
            site.residual_metadata = None if site.residual is None else metadata[site.residual]
            _move_metadata_readers(site)
    if planner:
        planner.plan(graph, [site for site in sites if site.workload_text], recorder)
    return sites
