"""Epilogues found in a model: what follows a convolution, and nothing else uses the values in between.

A batch normalisation, and a factor for each channel, are folded into the weights, as whoever deploys a model does; what
they add is a bias. Activations are told by what they compute, however they are written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tvmconv.models import pointwise
from tvmconv.models.graph import Graph, Op
from tvmconv.workloads.suites import Layer

LONGEST_ACTIVATION = 16  # operations


def layers(graph: Graph) -> list[Layer]:
    """The convolutions of a graph in its order, each with its epilogue; names are the graph's."""
    return _Fusing(graph).layers()


class _Fusing:
    """Epilogues of a graph's convolutions, where each operation belongs to one of them at most.

    Of two convolutions whose outputs are added, the later one has the other's as its residual: so the later ones choose
    first.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._uses: dict[str, list[int]] = defaultdict(list)
        for number, op in enumerate(graph.ops):
            for value in dict.fromkeys(op.reads):
                self._uses[value].append(number)
        self._taken: set[int] = set()

    def layers(self) -> list[Layer]:
        """Each convolution with its epilogue, in the graph's order."""
        found = [self._layer(number, op) for number, op in reversed([*enumerate(self._graph.ops)]) if op.workload]
        return found[::-1]

    def _layer(self, number: int, conv: Op) -> Layer:
        assert conv.workload is not None
        names, value = list(conv.workload.epilogue), conv.writes[0]
        while step := self._activation(number, value, names) or self._one(number, value, names):
            name, numbers = step
            names += [name] if name and name not in names else []
            self._taken.update(numbers)
            number = numbers[-1]
            value = self._graph.ops[number].writes[0]
        return Layer(conv.name, replace(conv.workload, epilogue=tuple(names)), 1)  # type: ignore[type-var]

    def _one(self, number: int, value: str, names: Sequence[str]) -> tuple[str, list[int]] | None:
        """The operation behind this one that adds a residual, or is folded: its name in an epilogue, and its number."""
        user = self._only_user(number, value)
        if user is None:
            return None
        op = self._graph.ops[user]
        name = self._folded(op, value, names)
        if name is None and self._adds_residual(op, value) and "add" not in names:
            name = "add"
        return None if name is None else (name, [user])

    def _folded(self, op: Op, value: str, names: Sequence[str]) -> str | None:
        """What becomes of an operation with a number for each channel: a bias, or nothing but other weights."""
        others = [read for read in op.reads if read != value]
        linear = {"bias"}.issuperset(names)
        if op.kind == "norm":
            return "bias" if linear and op.reads[0] == value and value not in op.reads[1:] else None
        if op.reads.count(value) != 1 or not all(self._of_channels(other, value) for other in others):
            return None
        if op.kind == "add" or (op.kind == "sub" and op.reads[0] == value):
            return "bias" if linear or "bias" not in names else None
        scales = op.kind == "mul" or (op.kind == "div" and op.reads[0] == value)
        return "" if scales and linear else None

    def _of_channels(self, other: str, value: str) -> bool:
        """Whether a tensor is constant and has a number for each channel of another."""
        shape, like = self._graph.shapes.get(other), self._graph.shapes.get(value)
        if other not in self._graph.constants or shape is None or like is None or len(shape) > len(like):
            return False
        padded = (1,) * (len(like) - len(shape)) + shape
        return all(size == 1 or axis == 1 for axis, size in enumerate(padded)) and padded[1] in (1, like[1])

    def _adds_residual(self, op: Op, value: str) -> bool:
        """Whether an operation adds a tensor of the same shape."""
        if op.kind != "add" or len(op.reads) != 2 or op.reads.count(value) != 1:
            return False
        first, second = (self._graph.shapes.get(read) for read in op.reads)
        return first is not None and first == second

    def _activation(self, number: int, value: str, names: Sequence[str]) -> tuple[str, list[int]] | None:
        """The most operations behind this one that are together an operation of an epilogue, and its name.

        They see nothing but the value and numbers, and but for the last nobody else sees what they give.
        """
        found: tuple[str, list[int]] | None = None
        samples, inside = {value: pointwise.SAMPLES}, [number]
        while (following := self._next_inside(samples, inside)) is not None:
            op = self._graph.ops[following]
            assert op.compute is not None
            with np.errstate(all="ignore"):
                samples[op.writes[0]] = op.compute(*(samples[read] for read in op.reads))
            inside.append(following)
            if self._open(samples, inside) == {op.writes[0]}:
                name = pointwise.activation(samples[op.writes[0]])
                found = (name, inside[1:]) if name is not None and name not in names else found
        return found

    def _next_inside(self, samples: dict[str, np.ndarray], inside: list[int]) -> int | None:
        """The next operation that is pointwise on known values alone."""
        if len(inside) > LONGEST_ACTIVATION:
            return None
        users = {user for value in samples for user in self._uses[value] if user > inside[-1]} - self._taken
        ops = self._graph.ops
        return min((n for n in users if ops[n].compute and samples.keys() >= {*ops[n].reads}), default=None)

    def _open(self, samples: dict[str, np.ndarray], inside: list[int]) -> set[str]:
        """The values that somebody outside sees, or nobody at all."""
        users = {value: self._uses[value] for value in samples}
        return {
            value
            for value, numbers in users.items()
            if value in self._graph.outputs or not numbers or not {*inside}.issuperset(numbers)
        }

    def _only_user(self, number: int, value: str) -> int | None:
        """The number of the one operation that uses a value, unless it belongs to another convolution."""
        users = self._uses[value]
        if len(users) != 1 or value in self._graph.outputs or users[0] <= number or users[0] in self._taken:
            return None
        return users[0]
