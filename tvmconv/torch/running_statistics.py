"""Updates of the running statistics and the counters of all batch normalizations of a graph at once.

A batch normalization in training updates two running statistics, and a counter of its calls. A compiler writes kernels
for each of these vectors and numbers, whose launches take longer than their work. Here, all updates of a graph are two
operators at its end, which PyTorch runs in a few kernels for lists of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from tvmconv.torch.conv_site import Metadata
from tvmconv.torch.operator_library import define_operator


def correct_variance(count: int) -> float:
    """Return the factor that makes a variance of `count` elements unbiased."""
    return count / (count - 1)


def update_in_graph(
    means: Sequence[torch.Tensor],
    variances: Sequence[torch.Tensor],
    stats: Sequence[torch.Tensor],
    corrections: Sequence[float],
    momentum: float,
) -> None:
    """Update running statistics by the operator.

    Args:
        means: Running means.
        variances: Running variances.
        stats: Mean and biased variance of each channel in this call, of shape (2, channels), for each pair of them.
        corrections: Factors of these variances.
        momentum: Weight of the new statistics.
    """
    with torch.no_grad():
        update_running_stats(means, variances, [each.detach() for each in stats], corrections, momentum)


@dataclass
class RunningUpdates:
    """Updates of running statistics by one operator; none of them is updated twice."""

    momentum: float
    means: list[fx.Node] = field(default_factory=list)
    variances: list[fx.Node] = field(default_factory=list)
    stats: list[fx.Node] = field(default_factory=list)
    corrections: list[float] = field(default_factory=list)

    def add(self, mean: fx.Node, variance: fx.Node, stats: fx.Node, count: int) -> None:
        """Add the update of a running mean and variance by the statistics of `count` elements per channel."""
        self.means.append(mean)
        self.variances.append(variance)
        self.stats.append(stats)
        self.corrections.append(correct_variance(count))

    def insert(self, graph: fx.Graph) -> None:
        """Insert the operator at the end of a graph."""
        with graph.inserting_before(graph.output_node()):
            graph.call_function(
                update_in_graph, (self.means, self.variances, self.stats, self.corrections, self.momentum)
            )


def merge_counters(graph: fx.Graph, metadata: Metadata) -> None:
    """Increase all counters of a graph by one operator.

    A counter is an input with one integer that nothing else reads, and to which the graph adds a constant.

    Args:
        graph: The graph, which is changed.
        metadata: Metadata of its inputs by their nodes.
    """
    nodes_by_summand: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if (
            node.target == "add_"
            and node.op == "call_method"
            and len(node.args) == 2
            and not (node.users or node.kwargs)
        ):
            counter, summand = node.args
            is_counter = isinstance(counter, fx.Node) and counter.op == "placeholder" and len(counter.users) == 1
            counter_info = metadata.get(counter) if is_counter else None
            if type(summand) is int and counter_info and counter_info.dtype is torch.int64 and not counter_info.shape:
                nodes_by_summand.setdefault(summand, []).append(node)
    for summand, nodes in nodes_by_summand.items():
        with graph.inserting_before(graph.output_node()):
            graph.call_function(increase_counters, ([node.args[0] for node in nodes], summand))
        for node in nodes:
            graph.erase_node(node)


def _update_running_stats(
    means: Sequence[torch.Tensor],
    variances: Sequence[torch.Tensor],
    stats: Sequence[torch.Tensor],
    corrections: Sequence[float],
    momentum: float,
) -> None:
    new_means, new_variances = zip(*(each.unbind() for each in stats), strict=True)
    torch._foreach_lerp_(means, new_means, momentum)
    torch._foreach_lerp_(variances, torch._foreach_mul(new_variances, corrections), momentum)
    torch.autograd.graph.increment_version([*means, *variances])


def _increase_counters(counters: Sequence[torch.Tensor], summand: int) -> None:
    torch._foreach_add_(counters, summand)
    torch.autograd.graph.increment_version(counters)


update_running_stats = define_operator(
    "update_running_stats(Tensor(a!)[] means, Tensor(b!)[] variances, Tensor[] stats, float[] corrections, "
    "float momentum) -> ()",
    cpu=_update_running_stats,
    fake=lambda *_: None,
)
increase_counters = define_operator(
    "increase_counters(Tensor(a!)[] counters, int summand) -> ()", cpu=_increase_counters, fake=lambda *_: None
)
