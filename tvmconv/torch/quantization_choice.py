"""The choice of the convolutions of a graph that get 8-bit operands, by the estimated time of the whole graph.

A convolution by itself may be slower in 8 bits because an operator rounds its input, or faster because its readers
round its output. So the choice starts with all convolutions, and leaves out those without which the sum of all times
is lower: one at a time, those that read a tensor which is rounded, or all up to a convolution or from it on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from tvmconv.torch.calibration import ConvNodes
from tvmconv.torch.quantization_plan import find_residual, find_stored, list_read_in_8_bits


@dataclass(frozen=True)
class StepCosts:
    """Functions that return the seconds of a step; infinite for what cannot be computed.

    Attributes:
        former: Seconds of a convolution in the model's precision.
        quantized: Seconds of a convolution with 8-bit operands, and whether it stores 8 bits.
        rounding: Seconds of the rounding of a tensor that a convolution reads: the convolution, and the tensor.
        widening: Seconds of the widening of a convolution's residual.
    """

    former: Callable[[fx.Node], float]
    quantized: Callable[[fx.Node, bool], float]
    rounding: Callable[[fx.Node, fx.Node], float]
    widening: Callable[[fx.Node], float]


def estimate_seconds(
    convs: ConvNodes, candidates: Collection[fx.Node], quantized: Collection[fx.Node], costs: StepCosts
) -> float:
    """Return the seconds of the convolutions of a graph that may be quantized, of which some are.

    Args:
        convs: All tuned convolutions of the graph.
        candidates: Those that may be quantized.
        quantized: Those that are.
        costs: Seconds of all steps.
    """
    quantized = dict.fromkeys(quantized)
    stored = find_stored(convs, quantized)
    steps = [costs.former(node) for node in candidates if node not in quantized]
    rounded = _find_rounded(quantized, stored)
    steps += [costs.rounding(readers[0], tensor) for tensor, readers in rounded.items()]
    for node in quantized:
        steps.append(costs.quantized(node, node in stored))
        if node not in stored and find_residual(node) in stored:
            steps.append(costs.widening(node))
    return sum(steps)


def _find_rounded(quantized: Collection[fx.Node], stored: Collection[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return the tensors that operators of their own round, with the convolutions that read each of them."""
    rounded: dict[fx.Node, list[fx.Node]] = {}
    for node in quantized:
        for tensor in list_read_in_8_bits(node, stored):
            if tensor not in stored:
                rounded.setdefault(tensor, []).append(node)
    return rounded


def choose_quantized(
    convs: ConvNodes, candidates: Sequence[fx.Node], costs: StepCosts, has_time: Callable[[], bool]
) -> set[fx.Node]:
    """Return the convolutions of a graph to quantize.

    Args:
        convs: All tuned convolutions of the graph.
        candidates: Those that may be quantized, in the order of the graph.
        costs: Seconds of all steps.
        has_time: Function that returns whether to go on.
    """
    chosen = _drop_infinite(convs, candidates, costs)
    seconds, is_better = estimate_seconds(convs, candidates, chosen, costs), True
    while is_better and has_time():
        is_better = False
        for group in _list_groups(convs, chosen):
            rest = [node for node in chosen if node not in group]
            if len(rest) < len(chosen) and (rest_seconds := estimate_seconds(convs, candidates, rest, costs)) < seconds:
                chosen, seconds, is_better = rest, rest_seconds, True
            if not has_time():
                break
    return set(chosen)


def _drop_infinite(convs: ConvNodes, candidates: Sequence[fx.Node], costs: StepCosts) -> list[fx.Node]:
    """Return the convolutions that have kernels if all of them are quantized."""
    chosen = [*candidates]
    while True:
        stored = find_stored(convs, chosen)
        rest = [node for node in chosen if costs.quantized(node, node in stored) < math.inf]
        if len(rest) == len(chosen):
            return chosen
        chosen = rest


def _list_groups(convs: ConvNodes, chosen: Sequence[fx.Node]) -> Iterator[set[fx.Node]]:
    """Return the sets of convolutions that may be left out together, the small ones first."""
    yield from ({node} for node in chosen)
    yield from (set(readers) for readers in _find_rounded(chosen, find_stored(convs, chosen)).values())
    for count in range(2, len(chosen) + 1):
        yield set(chosen[:count])
        yield set(chosen[-count:])
