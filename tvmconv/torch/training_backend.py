"""Graphs with gradients under the backend `tvmconv` of `torch.compile`.

The convolutions whose products have faster kernels become calls of the operator `tvmconv::convolution`, and batch
normalizations between convolutions those of `batch_norm_operators.py`. Without a compiler for the rest, more operations
become those of `row_operators.py`. The other backend differentiates and compiles
the graph, and finds the gradients of the operators, which are operators as well.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tvmconv.deadline import Deadline
from tvmconv.torch.batch_norm_fusion import NormSite, find_norm_sites, replace_norm_sites
from tvmconv.torch.conv_call import STATS_IN_GRAPHS
from tvmconv.torch.conv_dispatch import convolve, convolve_by_operator, convolve_with_stats_by_operator
from tvmconv.torch.conv_site import Metadata
from tvmconv.torch.device_match import find_device_for
from tvmconv.torch.functional import record_calls
from tvmconv.torch.kernel_table import RecordedCall, table
from tvmconv.torch.kernels import make_training_provider
from tvmconv.torch.max_pool import replace_poolings
from tvmconv.torch.product_selection import fill_table, make_reports
from tvmconv.torch.product_task import can_return_stats, collect_tasks
from tvmconv.torch.row_fusion import LINEAR, fuse_rows
from tvmconv.torch.running_statistics import merge_counters
from tvmconv.torch.selection import ChooseMode
from tvmconv.torch.shape_recorder import ShapeRecorder
from tvmconv.torch.training_report import TrainingReport
from tvmconv.torch.weight_casts import merge_weight_casts

CONVOLUTION_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED_NAMES = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}
MIN_CAPABILITY = (8, 0)  # of GPUs that convert float32 to bfloat16, as the kernels of batch normalizations do
TRANSPOSED_CONVOLUTIONS = {torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d}

_logger = logging.getLogger("tvmconv.torch")


def needs_gradients(inputs: Sequence[Any]) -> bool:
    """Return whether a graph with these inputs is differentiated."""
    return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)


def insert_operators(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    log: Any,
    choose: ChooseMode,
    deadline: Deadline | None,
    is_eager: bool = False,
    is_selecting: bool = True,
    skips_compared: bool = False,
) -> fx.GraphModule:
    """Return a graph with the operator in place of the convolutions that have kernels; log a report at level INFO.

    With `is_eager`, no compiler fuses the rest of the graph. Without `is_selecting`, kernels are those that the kernel
    table has, and no others are compared. With `skips_compared`, none are compared a second time, as without a
    deadline. The graph itself is returned if it has no convolutions that kernels could compute. Raises DeviceError if
    tvmconv has no device for PyTorch's.
    """
    is_static = all(isinstance(value, torch.Tensor) for value in inputs)
    if not is_static or not any(_is_convolution(node) for node in gm.graph.nodes):
        return gm
    recorder, calls = _record(gm, inputs)
    torch_devices = {recorded.call.device for recorded in calls}
    if len(torch_devices) != 1:
        return gm
    (torch_device,) = torch_devices
    device = find_device_for(torch_device, None)
    sites, has_kernels = [], _has_norm_kernels(torch_device) or choose == "tuned"
    if has_kernels and is_eager and (fused := fuse_rows(gm, recorder.metadata, _is_convolution)) is not gm:
        gm = fused
        recorder, calls = _record(gm, inputs)
    if has_kernels:
        sites = find_norm_sites(gm.graph, recorder.metadata, _is_convolution, is_eager=is_eager)
    normalized_names = {site.input.name for site in sites}
    calls = [
        replace(
            recorded,
            is_normalized=recorded.path in normalized_names
            and recorded.bias_dtype is None
            and can_return_stats(recorded.call, device),
        )
        for recorded in calls
    ]
    if is_selecting:
        provider = make_training_provider(device, torch_device, log, lambda text: _logger.debug("%s", text))
        tasks = collect_tasks(calls)
        if deadline is None or skips_compared:  # `optimize` or another graph may have compared products before
            tasks = [task for task in tasks if (task.product, task.call) not in table.compared]
        with torch.no_grad():
            notes = fill_table(tasks, provider, choose, deadline)
        _logger.info("%s", TrainingReport(make_reports(tasks), notes=tuple(notes)))
    return _replace_nodes(gm, inputs, recorder.metadata, calls, sites, has_kernels, is_eager)


def _has_norm_kernels(torch_device: torch.device) -> bool:
    return torch_device.type == "cuda" and torch.cuda.get_device_capability(torch_device) >= MIN_CAPABILITY


class _Recorder(ShapeRecorder):
    """An interpreter that records the convolutions of a graph by the names of their nodes, and all metadata."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self._node: fx.Node | None = None  # the node that is running

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and record the metadata of its result."""
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a function; a convolution is recorded and run by PyTorch."""
        node = self._node
        if node is None or not _is_convolution(node):
            return super().call_function(target, args, kwargs)
        arguments = self.map_nodes_to_values((_bind(node),), node)[0]
        return convolve(target, *arguments, path=node.name, uses_operator=False)


def _record(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[_Recorder, list[RecordedCall]]:
    """Run a graph on copies of its inputs, to which it may write; return the metadata and the recorded calls."""
    arguments = [value if isinstance(value, torch.nn.Parameter) else _clone(value) for value in inputs]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    recorder = _Recorder(gm)
    with record_calls() as calls, torch.random.fork_rng(devices):
        recorder.run(*arguments)
    return recorder, calls


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _is_convolution(node: fx.Node) -> bool:
    return node.target in CONVOLUTIONS or node.target in TRANSPOSED_CONVOLUTIONS


def _bind(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a convolution's node in the order of `convolve`."""
    is_transposed = node.target in TRANSPOSED_CONVOLUTIONS
    names = TRANSPOSED_NAMES if is_transposed else CONVOLUTION_NAMES
    values: Mapping[str, Any] = {**DEFAULTS, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    options = (values[name] for name in CONVOLUTION_NAMES)
    return *options, values.get("output_padding", 0) if is_transposed else None


def _replace_nodes(
    gm: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    metadata: Metadata,
    calls: Sequence[RecordedCall],
    sites: Sequence[NormSite],
    has_kernels: bool,
    is_eager: bool,
) -> fx.GraphModule:
    """Return a copy of a graph in which operators compute the sites, and the convolutions in the kernel table.

    Convolutions that the table has with statistics of their output return these as well. With `has_kernels`, operators
    compute maximum poolings, too. With `is_eager`, weights of all layers are cast at once.
    """
    calls = [recorded for recorded in calls if recorded.call in table.calls]
    if not calls and not sites:
        return gm
    names = {recorded.path for recorded in calls}
    names_with_stats = {
        recorded.path
        for recorded in calls
        if recorded.is_normalized and table.find(STATS_IN_GRAPHS, recorded.call) is not None
    }
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    output = graph.graph_copy(gm.graph, copies)
    graph.output(output)
    results: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    convolutions: dict[str, fx.Node] = {}  # of the copy, by name
    for node in list(copies):
        if node.name in names and _is_convolution(node):
            copied_node = convolutions[node.name] = copies[node]
            copied_node.args, copied_node.kwargs = fx.map_arg(_bind(node), copies.__getitem__), {}
            copied_node.target = convolve_by_operator
            if node.name in names_with_stats:
                results[node] = _return_stats(copied_node)
    if has_kernels:
        replace_poolings(copies, metadata)
    placeholders = [copies[node] for node in gm.graph.nodes if node.op == "placeholder"]
    readers = {convolutions[recorded.path]: recorded.call.dtype for recorded in calls if recorded.needs_wgrad}
    if is_eager:
        readers |= _list_layers(gm.graph, metadata, copies)
    merge_weight_casts(graph, readers, dict(zip(placeholders, inputs, strict=True)))
    replace_norm_sites(graph, sites, copies, results, metadata, _is_convolution)
    merge_counters(graph, {copies[node]: info for node, info in metadata.items() if node in copies})
    graph.lint()
    return fx.GraphModule(gm, graph)


def _list_layers(graph: fx.Graph, metadata: Metadata, copies: Mapping[fx.Node, Any]) -> dict[Any, torch.dtype]:
    """Return convolutions and linear layers of a copy of a graph, with the data types in which they compute."""
    layers = [node for node in graph.nodes if node.target is LINEAR or _is_convolution(node)]
    return {copies[node]: metadata[node].dtype for node in layers if node in metadata}


def _return_stats(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Have a convolution return the statistics of its output as well; return the nodes of output and statistics."""
    graph = node.graph
    node.target = convolve_with_stats_by_operator
    with graph.inserting_after(node):
        stats = graph.call_function(operator.getitem, (node, 1))
        y = graph.call_function(operator.getitem, (node, 0))
    node.replace_all_uses_with(y, delete_user_cb=lambda user: user not in (stats, y))
    return y, stats
