"""Batch normalizations in graphs with gradients that the operators of `batch_norm_operators.py` compute.

A site is a normalization in training of a convolution's output, with the sum and the activation after it. Operators
compute it if everything around it runs in kernels of its own as well: the convolution before it, and all readers of its
result, which are convolutions, poolings, and sums of other sites. Elsewhere the compiler fuses the normalization and
its gradients with the operations around it, and needs as few passes over memory. Without such a compiler, operators
compute all normalizations in training that their kernels can read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from tvmconv.torch.batch_norm_operators import (
    average_in_graph,
    compute_stats_in_graph,
    normalize_in_graph,
    read_in_graph,
)
from tvmconv.torch.channel_affine import NORM_ARGUMENTS
from tvmconv.torch.conv_call import KERNEL_DTYPES
from tvmconv.torch.conv_site import Metadata
from tvmconv.torch.fusion_steps import IN_PLACE_ADDS, is_in_place_write, is_sum
from tvmconv.torch.running_statistics import RunningUpdates
from tvmconv.workloads.layout import CHANNELS_LAST

DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
POOLING_NAMES = {f"{kind}_pool{ndim}d" for kind in ("avg", "max", "adaptive_avg", "adaptive_max") for ndim in (1, 2, 3)}
AVERAGE_POOLINGS = {getattr(functional, f"adaptive_avg_pool{ndim}d") for ndim in (1, 2, 3)}
RELU6_BOUNDS = (0.0, 6.0)  # arguments of `hardtanh`
ACTIVATION_NAMES: dict[Any, str] = {
    **dict.fromkeys((functional.relu, torch.relu, torch.relu_, "relu", "relu_"), "relu"),
    functional.relu6: "relu6",
    functional.hardtanh: "relu6",
    functional.silu: "silu",
    functional.hardswish: "hardswish",
}

IsConvolution = Callable[[fx.Node], bool]


@dataclass
class NormSite:
    """A batch normalization, with the sum and the activation after it."""

    norm: fx.Node
    arguments: Mapping[str, Any]  # of the normalization by name
    sum_node: fx.Node | None = None
    residual: fx.Node | None = None  # other operand of the sum
    activation: str = ""  # name of the activation; "" for none
    last: fx.Node | None = None  # node whose result the site computes

    @property
    def input(self) -> fx.Node:
        """Node of the convolution's output."""
        node: fx.Node = self.arguments["input"]
        return node

    @property
    def result(self) -> fx.Node:
        """Node whose result the site computes."""
        return self.last or self.norm


def find_norm_sites(
    graph: fx.Graph, metadata: Metadata, is_convolution: IsConvolution, *, is_eager: bool = False
) -> list[NormSite]:
    """Return the sites of a graph that operators should compute, in the order of the normalizations.

    Args:
        graph: The graph.
        metadata: Metadata of the results of its nodes in a run.
        is_convolution: Function that returns whether a node is a convolution.
        is_eager: Whether no compiler fuses the operations that the operators do not compute.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    sites: list[NormSite] = []
    for node in graph.nodes:
        arguments = bind_training_norm(node)
        is_site = arguments and (is_eager or is_convolution(arguments["input"]))
        if arguments and is_site and _has_kernels(arguments["input"], metadata):
            site = _extend(NormSite(node, arguments), metadata, {each.sum_node for each in sites})
            if not _is_overwritten(site, order, metadata):
                sites.append(site)
    while not is_eager:
        sums = {(site.sum_node, site.residual) for site in sites}
        valid = [
            site
            for site in sites
            if all(
                (reader, site.result) in sums or _is_kernel(reader, site.result, is_convolution)
                for reader in site.result.users
            )
        ]
        if len(valid) == len(sites):
            break
        sites = valid
    return sites


def bind_training_norm(node: fx.Node) -> dict[str, Any] | None:
    """Return the arguments of a batch normalization in training by name; None for other nodes."""
    if node.target is not functional.batch_norm:
        return None
    arguments = {**DEFAULTS, **dict(zip(NORM_ARGUMENTS, node.args, strict=False)), **node.kwargs}
    is_constant = all(isinstance(arguments[name], float) for name in ("momentum", "eps"))
    return arguments if arguments["training"] is True and is_constant else None


def _has_kernels(node: fx.Node, metadata: Metadata) -> bool:
    """Return whether the operators' kernels can read a tensor; they need several elements per channel."""
    input_info = metadata.get(node)
    return (
        input_info is not None
        and input_info.dtype in KERNEL_DTYPES
        and input_info.layout == CHANNELS_LAST
        and math.prod(input_info.shape) > input_info.shape[1]
    )


def _extend(site: NormSite, metadata: Metadata, used_sums: set[fx.Node | None]) -> NormSite:
    """Add the sum and the activation after a normalization to a site."""
    reader = _find_reader(site.norm)
    if reader is not None and is_sum(reader) and reader not in used_sums:
        others = [arg for arg in reader.args if arg is not site.norm]
        first, second = (metadata.get(each) for each in (site.norm, others[0] if len(others) == 1 else None))
        is_alike = first and second and (first.shape, first.dtype) == (second.shape, second.dtype)
        overwrites_residual = reader.target in IN_PLACE_ADDS and reader.args[0] is not site.norm
        if is_alike and not overwrites_residual:
            site.sum_node, site.residual, site.last = reader, others[0], reader
            reader = _find_reader(reader)
    if reader is not None and (activation := _match_activation(reader)):
        site.activation, site.last = activation, reader
    return site


def _find_reader(node: fx.Node) -> fx.Node | None:
    """Return the only reader of a node; None if there are several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def _match_activation(node: fx.Node) -> str:
    """Return the name of an activation that operators compute, in place or not; "" for other nodes."""
    name = ACTIVATION_NAMES.get(node.target, "")
    is_hardtanh = node.target is functional.hardtanh
    if is_hardtanh and (*node.args[1:3], *map(node.kwargs.get, ("min_val", "max_val")))[:2] != RELU6_BOUNDS:
        return ""
    return name


def _is_overwritten(site: NormSite, order: Mapping[fx.Node, int], metadata: Metadata) -> bool:
    """Return whether a node before the end of a site may write to what the operators read there."""
    own_nodes = (site.norm, site.sum_node, site.last)
    read = [metadata.get(node) for node in (site.input, site.residual) if node is not None]
    memories = {each and each.memory for each in read}
    for node in list(order)[order[site.input] + 1 : order[site.result]]:
        if node in own_nodes or not is_in_place_write(node, {}):
            continue
        written = metadata.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if written is None or None in memories or "out" in node.kwargs or written.memory in memories:
            return True
    return False


def _is_kernel(reader: fx.Node, node: fx.Node, is_convolution: IsConvolution) -> bool:
    """Return whether a reader of a node is a convolution of it or a pooling, which runs in a kernel of its own."""
    name = getattr(reader.target, "__name__", "")
    is_input = bool(reader.args) and reader.args[0] is node and node not in reader.args[1:]
    return is_input and (is_convolution(reader) or name in POOLING_NAMES)


def replace_norm_sites(
    graph: fx.Graph,
    sites: Sequence[NormSite],
    copies: Mapping[fx.Node, fx.Node],
    results_with_stats: Mapping[fx.Node, tuple[fx.Node, fx.Node]],
    metadata: Metadata,
    is_convolution: IsConvolution,
) -> None:
    """Compute sites by operators in a copy of their graph.

    Args:
        graph: The copy, which is changed.
        sites: The sites.
        copies: Nodes of the copy by those of the sites' graph.
        results_with_stats: Nodes of the copy with output and statistics, by the convolutions of the sites' graph that
            return both.
        metadata: Metadata of the nodes of the sites' graph.
        is_convolution: Function that returns whether a node of the sites' graph is a convolution.
    """
    # By the sites' results: the new results, and the stand-ins of those that have several readers.
    replaced: dict[fx.Node, fx.Node] = {}
    stand_ins: dict[fx.Node | None, fx.Node] = {}
    order = {node: number for number, node in enumerate(copies)}
    updates: dict[float, RunningUpdates] = {}  # by momentum
    merged = {site.norm for site in sites if _can_merge_updates(site, metadata)}
    residuals = {site.residual for site in sites}

    def convert(value: Any) -> Any:
        return replaced.get(value) or copies[value] if isinstance(value, fx.Node) else value

    for site in sorted(sites, key=lambda site: order[site.result]):
        arguments = {name: convert(value) for name, value in site.arguments.items()}
        running = arguments["running_mean"], arguments["running_var"]
        x, stats = results_with_stats.get(site.input, (arguments["input"], None))
        if site.norm in merged:
            stats = stats or _insert_call(graph, x, compute_stats_in_graph, (x,))
            momentum, shape = arguments["momentum"], metadata[site.input].shape
            update = updates.setdefault(momentum, RunningUpdates(momentum))
            update.add(*running, stats, math.prod(shape) // shape[1])
            running = None, None
        values: list[Any] = [x, stats, None if None in running else running]
        values += [arguments[name] for name in ("weight", "bias", "momentum", "eps")]
        # A stand-in has one gradient, and therefore one reader.
        values += [site.activation, convert(site.residual), stand_ins.pop(site.residual, None)]
        last = copies[site.result]
        pair = _insert_call(graph, last, normalize_in_graph, tuple(values))
        stand_in = _insert_call(graph, pair, operator.getitem, (pair, 1))
        z = replaced[site.result] = _insert_call(graph, pair, operator.getitem, (pair, 0))
        if len(site.result.users) > 1 and not _replace_mean(last, z, stand_in):
            stand_ins[site.result] = stand_in
            if site.result not in residuals:
                readers = [copies[each] for each in site.result.users if _is_kernel(each, site.result, is_convolution)]
                _read_with_stand_in(graph, readers[1:], z, stand_in)
        last.replace_all_uses_with(z)
        for node in dict.fromkeys((site.result, site.sum_node, site.norm)):
            if node is not None:
                graph.erase_node(copies[node])
    for update in updates.values():
        update.insert(graph)


def _insert_call(graph: fx.Graph, node: fx.Node, function: Callable[..., Any], arguments: tuple[Any, ...]) -> fx.Node:
    """Insert the call of a function behind a node."""
    with graph.inserting_after(node):
        return graph.call_function(function, arguments)


def _read_with_stand_in(graph: fx.Graph, readers: Sequence[fx.Node], z: fx.Node, stand_in: fx.Node) -> None:
    """Have the last one of some readers of a site's result differentiate the stand-in, if there is any reader."""
    for reader in readers[-1:]:
        with graph.inserting_before(reader):
            reader.update_arg(0, graph.call_function(read_in_graph, (z, stand_in)))


def _replace_mean(node: fx.Node, z: fx.Node, stand_in: fx.Node) -> bool:
    """Have the operator compute the mean over all pixels of a node's result; return whether there is one.

    Args:
        node: The node, in whose place `z` comes.
        z: Result of a site.
        stand_in: Its stand-in.
    """
    mean = next((reader for reader in node.users if _is_mean(reader, node)), None)
    if mean is None:
        return False
    mean.op, mean.target, mean.args, mean.kwargs = "call_function", average_in_graph, (z, stand_in), {}
    return True


def _is_mean(reader: fx.Node, node: fx.Node) -> bool:
    """Return whether a reader of images computes the mean of each channel over all pixels."""
    if not reader.args or reader.args[0] is not node:
        return False
    if reader.target in AVERAGE_POOLINGS:
        sizes = [*reader.args[1:], *reader.kwargs.values()]
        return len(sizes) == 1 and (sizes[0] == 1 or (isinstance(sizes[0], Sequence) and {*sizes[0]} == {1}))
    arguments = [*reader.args[1:], *reader.kwargs.values()]
    is_mean = reader.target is torch.mean or (reader.op == "call_method" and reader.target == "mean")
    return (
        is_mean
        and len(arguments) == 2
        and arguments[1] is True
        and arguments[0] in ([2, 3], (2, 3), [-2, -1], (-2, -1))
    )


def _can_merge_updates(site: NormSite, metadata: Metadata) -> bool:
    """Return whether the update of a site's running statistics can be one of many at the end of the graph."""
    return all(
        isinstance(node, fx.Node)
        and node.op == "placeholder"
        and len(node.users) == 1
        and node in metadata
        and metadata[node].dtype is torch.float32
        for node in (site.arguments["running_mean"], site.arguments["running_var"])
    )
