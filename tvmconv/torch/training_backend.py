"""Graphs with gradients under the backend `tvmconv` of `torch.compile`.

The convolutions whose products have faster kernels become calls of the operator `tvmconv::convolution`. The other
backend differentiates and compiles the graph, and finds the gradients of the operator, which are operators as well.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tvmconv.deadline import Deadline
from tvmconv.torch.device_match import find_device_for
from tvmconv.torch.functional import convolve, convolve_by_operator, record_calls
from tvmconv.torch.kernel_table import RecordedCall, table
from tvmconv.torch.kernels import make_training_provider
from tvmconv.torch.product_selection import collect_tasks, fill_table, make_reports
from tvmconv.torch.selection import ChooseMode
from tvmconv.torch.training_report import TrainingReport

CONVOLUTION_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED_NAMES = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}
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
) -> fx.GraphModule:
    """Return a graph with the operator in place of the convolutions that have kernels; log a report at level INFO.

    The graph itself is returned if it has no convolutions that kernels could compute. Raises DeviceError if tvmconv has
    no device for PyTorch's.
    """
    is_static = all(isinstance(value, torch.Tensor) for value in inputs)
    if not is_static or not any(_is_convolution(node) for node in gm.graph.nodes):
        return gm
    calls = _record(gm, inputs)
    torch_devices = {recorded.call.device for recorded in calls}
    if len(torch_devices) != 1:
        return gm
    (torch_device,) = torch_devices
    device = find_device_for(torch_device, None)
    provider = make_training_provider(device, torch_device, log, lambda text: _logger.debug("%s", text))
    tasks = collect_tasks(calls)
    with torch.no_grad():
        notes = fill_table(tasks, provider, choose, deadline)
    _logger.info("%s", TrainingReport(make_reports(tasks), notes=tuple(notes)))
    return _replace_nodes(gm, {recorded.path for recorded in calls if recorded.call in table.calls})


class _Recorder(fx.Interpreter):
    """An interpreter that records the convolutions of a graph by the names of their nodes."""

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; a convolution is recorded and run by PyTorch."""
        if not _is_convolution(n):
            return super().run_node(n)
        arguments = self.map_nodes_to_values((_bind(n),), n)[0]
        function: Any = n.target
        return convolve(function, *arguments, path=n.name, uses_operator=False)


def _record(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[RecordedCall]:
    """Run a graph on copies of its inputs, to which it may write, and return the recorded calls."""
    arguments = [value if isinstance(value, torch.nn.Parameter) else _clone(value) for value in inputs]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with record_calls() as calls, torch.random.fork_rng(devices):
        _Recorder(gm).run(*arguments)
    return calls


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


def _replace_nodes(gm: fx.GraphModule, names: set[str]) -> fx.GraphModule:
    """Return a copy of a graph in which the named convolutions are calls of the operator."""
    if not names:
        return gm
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    output = graph.graph_copy(gm.graph, copies)
    graph.output(output)
    for node, copied_node in copies.items():
        if node.name in names and _is_convolution(node):
            copied_node.args, copied_node.kwargs = fx.map_arg(_bind(node), copies.__getitem__), {}
            copied_node.target = convolve_by_operator
    graph.lint()
    return fx.GraphModule(gm, graph)
