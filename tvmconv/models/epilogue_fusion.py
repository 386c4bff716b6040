"""Epilogues of a model's convolutions: the operations after each whose intermediate values have no other reader.

Batch normalizations and per-channel factors are folded into the weights, as deployment tools do; their summands become
a bias. Activations are recognized by the values that they compute, however they are written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tvmconv.models.model_graph import ModelGraph, ModelOp
from tvmconv.workloads import epilogue
from tvmconv.workloads.dtypes import DTYPES
from tvmconv.workloads.suites import Layer

MAX_ACTIVATION_OPS = 16
# Points at which activations are compared, and the tolerated difference. A GELU with constants rounded to bfloat16
# differs from the exact one by 3e-5, and its tanh approximation differs by 5e-4. Large points tell limits apart.
_LARGE = np.geomspace(16.0, 1e30, 60)
LINEAR_OPS = frozenset({"scale", "bias"})  # operations into which factors and summands per channel are folded
SAMPLES = np.concatenate([np.linspace(-8.0, 8.0, 257), _LARGE, -_LARGE])
TOLERANCE, RELATIVE_TOLERANCE = 1e-4, 1e-5


@dataclass(frozen=True)
class FusedOp:
    """One step of an epilogue: "bias", "add", an activation, or "" if it changes the weights or nothing.

    It stands for operations of the graph, the last of which writes its result.
    """

    name: str
    op_indices: tuple[int, ...]


@dataclass(frozen=True)
class FusedConvolution:
    """A convolution with its epilogue, and the operations of the graph that the epilogue stands for."""

    layer: Layer
    conv_index: int  # index of the convolution in the graph
    fused_ops: tuple[FusedOp, ...]  # in the order of execution


def fuse_epilogues(graph: ModelGraph) -> list[Layer]:
    """Return the convolutions of a graph in its order, each with its epilogue, under the graph's names."""
    return [convolution.layer for convolution in fuse_convolutions(graph)]


def fuse_convolutions(graph: ModelGraph) -> list[FusedConvolution]:
    """Return the convolutions of a graph in its order, each with its epilogue and the operations in it."""
    return _EpilogueFuser(graph).fuse_all()


def match_activation(y: Any) -> str | None:
    """Return the epilogue operation whose values at `SAMPLES` are `y`, "" for the identity, None if there is none."""
    if np.shape(y) != SAMPLES.shape:
        return None
    references = {op.name: op.reference for op in epilogue.load_ops().values() if op.argument_kind is None}
    for name, reference in {"": lambda x: x, **references}.items():
        if np.allclose(y, reference(SAMPLES), rtol=RELATIVE_TOLERANCE, atol=TOLERANCE):
            return name
    return None


class _EpilogueFuser:
    """The assignment of a graph's operations to epilogues; each operation belongs to at most one convolution.

    If the outputs of two convolutions are added, the later one reads the other's as its residual. Therefore later
    convolutions are assigned first. An epilogue operation and the indices of the operations that it stands for are
    passed as a pair.
    """

    def __init__(self, graph: ModelGraph) -> None:
        self._graph = graph
        self._users: dict[str, list[int]] = defaultdict(list)
        for number, op in enumerate(graph.ops):
            for value in dict.fromkeys(op.reads):
                self._users[value].append(number)
        self._fused_ops: set[int] = set()

    def fuse_all(self) -> list[FusedConvolution]:
        """Return each convolution with its epilogue, in the graph's order."""
        operations = reversed([*enumerate(self._graph.ops)])
        return [self._fuse_convolution(number, op) for number, op in operations if op.workload][::-1]

    def _fuse_convolution(self, conv_index: int, conv: ModelOp) -> FusedConvolution:
        assert conv.workload is not None
        names, value, op_index = list(conv.workload.epilogue), conv.writes[0], conv_index
        fused_ops: list[FusedOp] = []
        while fused := self._match_activation(op_index, value, names) or self._match_single_op(op_index, value, names):
            name, op_indices = fused
            names += [name] if name and name not in names else []
            self._fused_ops.update(op_indices)
            fused_ops.append(FusedOp(name, tuple(op_indices)))
            op_index = op_indices[-1]
            value = self._graph.ops[op_index].writes[0]
        changes: dict[str, Any] = {"epilogue": tuple(names)}
        quantize_index = self._match_quantization(conv, value, fused_ops)
        if quantize_index is not None:
            quantized_format = self._graph.ops[quantize_index].quantized_format
            assert quantized_format is not None
            zero_point = (epilogue.ZERO_POINT,) if quantized_format.zero_point else ()
            changes = {"epilogue": (*names, epilogue.QUANTIZE, *zero_point), "out_dtype": quantized_format.dtype}
            self._fused_ops.add(quantize_index)
            fused_ops.append(FusedOp(epilogue.QUANTIZE, (quantize_index,)))
        layer = Layer(conv.name, replace(conv.workload, **changes), 1)  # type: ignore[type-var]
        return FusedConvolution(layer, conv_index, tuple(fused_ops))

    def _match_quantization(self, conv: ModelOp, value: str, fused_ops: Sequence[FusedOp]) -> int | None:
        """Return the index of the only reader of a value if it quantizes the result of a convolution in 8 bits.

        A residual that the convolution adds has to have 8 bits, too.
        """
        users, ops = self._users[value], self._graph.ops
        assert conv.workload is not None
        if len(users) != 1 or value in self._graph.outputs or not DTYPES[conv.workload.dtype].has_8_bits:
            return None
        computed = {
            *conv.writes,
            *(write for each in fused_ops for index in each.op_indices for write in ops[index].writes),
        }
        added = {read for each in fused_ops if each.name == "add" for read in ops[each.op_indices[0]].reads}
        is_quantized = ops[users[0]].kind == "quantize" and self._graph.dequantized.keys() >= added - computed
        return users[0] if is_quantized else None

    def _match_single_op(self, op_index: int, value: str, names: Sequence[str]) -> tuple[str, list[int]] | None:
        """Match the only reader of a value if it adds a residual or can be folded."""
        users = self._users[value]
        if len(users) != 1 or value in self._graph.outputs or users[0] <= op_index or users[0] in self._fused_ops:
            return None
        op = self._graph.ops[users[0]]
        name = self._match_folded_op(op, value, names)
        if name is None and self._adds_residual(op, value) and "add" not in names:
            name = "add"
        return None if name is None else (name, users)

    def _match_folded_op(self, op: ModelOp, value: str, names: Sequence[str]) -> str | None:
        """Return "bias" or "" (weights only) if an operation with one number per channel can be folded, else None."""
        other_reads = [read for read in op.reads if read != value]
        is_linear = LINEAR_OPS.issuperset(names)
        if op.kind == "norm":
            return "bias" if is_linear and op.reads[0] == value and value not in op.reads[1:] else None
        if op.reads.count(value) != 1 or not all(self._is_per_channel(other, value) for other in other_reads):
            return None
        if op.kind == "add" or (op.kind == "sub" and op.reads[0] == value):
            return "bias" if is_linear or "bias" not in names else None
        is_scaling = op.kind == "mul" or (op.kind == "div" and op.reads[0] == value)
        return "" if is_scaling and is_linear else None

    def _is_per_channel(self, other: str, value: str) -> bool:
        """Return whether a tensor is constant and has at most one number per channel of another tensor."""
        shape, value_shape = self._graph.shapes.get(other), self._graph.shapes.get(value)
        if other not in self._graph.constants or shape is None or value_shape is None or len(shape) > len(value_shape):
            return False
        padded = (1,) * (len(value_shape) - len(shape)) + shape
        return all(size == 1 or axis == 1 for axis, size in enumerate(padded)) and padded[1] in (1, value_shape[1])

    def _adds_residual(self, op: ModelOp, value: str) -> bool:
        if op.kind != "add" or len(op.reads) != 2 or op.reads.count(value) != 1:
            return False
        first, second = (self._graph.shapes.get(read) for read in op.reads)
        return first is not None and first == second

    def _match_activation(self, op_index: int, value: str, names: Sequence[str]) -> tuple[str, list[int]] | None:
        """Match the longest run of next operations that is an activation.

        The operations read only the value and constants, and only the last one's result has other readers.
        """
        match: tuple[str, list[int]] | None = None
        samples, op_indices = {value: SAMPLES}, [op_index]
        while (next_index := self._find_next_pointwise(samples, op_indices)) is not None:
            op = self._graph.ops[next_index]
            assert op.compute is not None
            with np.errstate(all="ignore"):
                samples[op.writes[0]] = op.compute(*(samples[read] for read in op.reads))
            op_indices.append(next_index)
            if self._find_live_values(samples, op_indices) == {op.writes[0]}:
                name = match_activation(samples[op.writes[0]])
                match = (name, op_indices[1:]) if name is not None and name not in names else match
        return match

    def _find_next_pointwise(self, samples: dict[str, np.ndarray], op_indices: list[int]) -> int | None:
        """Return the index of the next pointwise operation that reads only known values; None if there is none."""
        if len(op_indices) > MAX_ACTIVATION_OPS:
            return None
        users = {user for value in samples for user in self._users[value] if user > op_indices[-1]} - self._fused_ops
        ops = self._graph.ops
        return min((n for n in users if ops[n].compute and samples.keys() >= {*ops[n].reads}), default=None)

    def _find_live_values(self, samples: dict[str, np.ndarray], op_indices: list[int]) -> set[str]:
        """Return the values that other operations or the model's caller read, or that have no reader at all."""
        users = {value: self._users[value] for value in samples}
        return {
            value
            for value, numbers in users.items()
            if value in self._graph.outputs or not numbers or not {*op_indices}.issuperset(numbers)
        }
