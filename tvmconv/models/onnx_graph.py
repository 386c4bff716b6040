"""ONNX files as graphs. A file is read as data: nothing of it is executed, and weights that lie elsewhere stay there.

Source: ONNX's operators, https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, numpy_helper

from tvmconv.errors import Error, ModelError, WorkloadError
from tvmconv.models import onnx_file
from tvmconv.models.graph import Graph, Operand, Shape, convolution
from tvmconv.models.graph import Op as GraphOp
from tvmconv.models.inputs import Input
from tvmconv.workloads import Conv

DOMAINS = ("", "ai.onnx")  # of the standard's operators

# Operators on each element, by their names in the graph; attributes and further inputs of these mean nothing here.
UNARY = {
    "Identity": "same",
    "Dropout": "same",  # not in training
    "Neg": "neg",
    "Exp": "exp",
    "Erf": "erf",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Relu": "relu",
    "HardSwish": "hardswish",
    "Mish": "mish",
    "Softplus": "softplus",
}
BINARY = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Min": "min", "Max": "max"}


def read(file: Path, inputs: Sequence[Input] = ()) -> Graph:
    """The operations of a file's model.

    Args:
        file: of an ONNX model.
        inputs: shapes for those of its inputs that have dynamic dimensions.

    Raises:
        ModelError: it is no ONNX model, or a dimension that a convolution depends on is unknown.
        OSError: the file cannot be read.
    """
    try:
        return _translated(file, onnx_file.read(file, inputs))
    except (Error, OSError):
        raise
    except Exception as error:  # an attribute of another kind than its operator has, an unknown element type, …
        raise ModelError(f"{file} is no ONNX model that makes sense: {type(error).__name__}: {error}") from error


def _translated(file: Path, model: onnx.ModelProto) -> Graph:
    translation = _Translation(model.graph)
    if any(shape is None for shape in translation.inputs_of_convolutions()):
        onnx_file.refuse_dynamic(file, model)
    translation.run()
    translation.leave_out_functions(model)
    return translation.graph


class _Translation:
    """From ONNX's nodes to operations."""

    def __init__(self, source: GraphProto) -> None:
        self._source = source
        self._types: dict[str, int] = {}
        self._numbers: dict[str, float] = {}
        self.graph = Graph(outputs={output.name for output in source.output})
        for value in (*source.input, *source.value_info, *source.output):
            self._learn(value.name, value.type.tensor_type.elem_type, onnx_file.sizes(value))
        for tensor in source.initializer:
            self._learn_constant(tensor.name, tensor)
        for sparse in source.sparse_initializer:
            self.graph.constants.add(sparse.values.name)
            self._learn(sparse.values.name, sparse.values.data_type, tuple(sparse.dims))

    def _learn(self, name: str, kind: int, shape: Sequence[int | str] | None) -> None:
        self._types[name] = kind
        if shape is not None and all(isinstance(size, int) for size in shape):
            self.graph.shapes[name] = tuple(size for size in shape if isinstance(size, int))

    def _learn_constant(self, name: str, tensor: TensorProto) -> None:
        self.graph.constants.add(name)
        self._learn(name, tensor.data_type, tuple(tensor.dims))
        if (number := _number(tensor)) is not None:
            self._numbers[name] = number

    def inputs_of_convolutions(self) -> Iterator[Shape | None]:
        """The shapes of what convolutions read, where there are any."""
        for node in self._source.node:
            if _is_conv(node):
                yield from (self.graph.shapes.get(name) for name in node.input[:2])

    def run(self) -> None:
        """Translate all nodes, in their order, which is one that they can be executed in."""
        for node in self._source.node:
            self._translate(node)

    def leave_out_functions(self, model: onnx.ModelProto) -> None:
        """Say which of the model's own functions hold convolutions: they are not looked into."""
        for function in model.functions:
            self._leave_out_inner(f"function {function.name}", sum(map(_convolutions, function.node)))

    def _translate(self, node: NodeProto) -> None:
        standard = node.domain in DOMAINS
        if _is_conv(node):
            self.graph.add_conv(_name(node), _reads(node), tuple(node.output), partial(self._workload, node))
        elif standard and node.op_type == "Constant":
            self._constant(node)
        elif not (standard and node.output and self._pointwise(node)):
            if "Conv" in node.op_type:
                self.graph.leave_out(_name(node), f"{node.op_type} is no workload of tvmconv")
            self._leave_out_inner(f"the bodies of {node.op_type} {_name(node)}", _convolutions(node, inner=True))
            kind = "norm" if standard and _normalises(node) else ""
            self.graph.add(GraphOp(kind, _reads(node), tuple(node.output)))

    def _leave_out_inner(self, where: str, count: int) -> None:
        if count:
            self.graph.leave_out(where, f"{count} convolution{'s' * (count > 1)} inside, where none are looked for")

    def _workload(self, node: NodeProto) -> Conv:
        """The workload of a `Conv`; raises WorkloadError."""
        if len(node.input) < 2:
            raise WorkloadError("it has no input and weight")
        shapes = [self.graph.shapes.get(name) for name in node.input[:2]]
        if shapes[0] is None or shapes[1] is None:
            raise WorkloadError(f"the shape of its {'weight' if shapes[0] else 'input'} is unknown")
        x, weight = shapes[0], shapes[1]
        kernel = weight[2:]
        stride = _integers(node, "strides") or (1,) * len(kernel)
        dilation = _integers(node, "dilations") or (1,) * len(kernel)
        return convolution(
            x,
            weight,
            stride=stride,
            padding=_padding(node, x[2:], kernel, stride, dilation),
            dilation=dilation,
            groups=_attribute(node, "group", 1),
            dtype=_dtype(self._types.get(node.input[0], 0)),
            bias=len(node.input) > 2 and node.input[2] != "",
        )

    def _constant(self, node: NodeProto) -> None:
        """A node that is a constant."""
        (name,) = node.output[:1] or [""]
        self.graph.constants.add(name)
        tensor = _attribute(node, "value", None)
        number = _attribute(node, "value_float", _attribute(node, "value_int", None))
        if isinstance(tensor, TensorProto):
            self._learn_constant(name, tensor)
        elif number is not None:
            self._numbers[name] = float(number)
            self.graph.shapes[name] = ()

    def _pointwise(self, node: NodeProto) -> bool:
        """Translate a node that computes each element by itself; whether it is one."""
        how: dict[str, Any] = {}
        kind, operands = UNARY.get(node.op_type), list(node.input[:1])
        if node.op_type in BINARY and len(node.input) == 2:
            kind, operands = BINARY[node.op_type], list(node.input)
        elif node.op_type == "Swish" and _attribute(node, "alpha", 1.0) == 1:
            kind = "silu"
        elif node.op_type == "Gelu":
            kind, how = "gelu", {"by_tanh": _attribute(node, "approximate", b"none") == b"tanh"}
        elif node.op_type == "LeakyRelu":
            kind, how = "leaky_relu", {"slope": _attribute(node, "alpha", 0.01)}
        elif node.op_type == "Elu":
            kind, how = "elu", {"alpha": _attribute(node, "alpha", 1.0)}
        elif node.op_type == "HardSigmoid":
            kind = "hardsigmoid"
            how = {"slope": _attribute(node, "alpha", 0.2), "shift": _attribute(node, "beta", 0.5)}
        elif node.op_type == "Clip":
            limits = self._limits(node)
            kind, how = ("clip", limits) if limits is not None else (None, {})
        elif node.op_type == "Cast":
            kind = "same" if _attribute(node, "to", 0) == self._types.get(node.input[0]) else None
        if kind is None or not operands or "" in operands:
            return False
        self.graph.add_pointwise(kind, [self._operand(name) for name in operands], tuple(node.output), **how)
        return True

    def _operand(self, name: str) -> Operand:
        return self._numbers.get(name, name)

    def _limits(self, node: NodeProto) -> dict[str, float] | None:
        """The limits of a `Clip`: attributes of old ones, inputs of new ones; None if they are not known."""
        limits = {}
        for limit, attribute, place in (("low", "min", 1), ("high", "max", 2)):
            if len(node.input) > place and node.input[place]:
                if node.input[place] not in self._numbers:
                    return None
                limits[limit] = self._numbers[node.input[place]]
            elif (number := _attribute(node, attribute, None)) is not None:
                limits[limit] = float(number)
        return limits


def _is_conv(node: NodeProto) -> bool:
    return node.op_type == "Conv" and node.domain in DOMAINS


def _name(node: NodeProto) -> str:
    return node.name or next(iter(node.output), "") or node.op_type


def _normalises(node: NodeProto) -> bool:
    """Whether a node multiplies each channel by a factor and adds a number, both known before it runs."""
    return node.op_type == "BatchNormalization" and not _attribute(node, "training_mode", 0)


def _attribute(node: NodeProto, name: str, default: Any) -> Any:
    """The value of an attribute."""
    for attribute in node.attribute:
        if attribute.name == name:
            return onnx.helper.get_attribute_value(attribute)
    return default


def _integers(node: NodeProto, name: str) -> Shape:
    value = _attribute(node, name, ())
    return tuple(value) if isinstance(value, (list, tuple)) else ()


def _padding(node: NodeProto, space: Shape, kernel: Shape, stride: Shape, dilation: Shape) -> Shape:
    """Zeros before all axes, and then behind all; raises WorkloadError."""
    how = _attribute(node, "auto_pad", b"NOTSET")
    if how in (b"NOTSET", b""):
        return _integers(node, "pads") or (0,) * len(kernel)
    if how == b"VALID":
        return (0,) * len(kernel)
    if how not in (b"SAME_UPPER", b"SAME_LOWER"):
        raise WorkloadError(f"auto_pad is {how!r}")
    both = [_same(*axis) for axis in zip(space, kernel, stride, dilation, strict=False)]
    less, more = [total // 2 for total in both], [total - total // 2 for total in both]
    return (*less, *more) if how == b"SAME_UPPER" else (*more, *less)


def _same(size: int, taps: int, step: int, dilation: int) -> int:
    """Zeros on both sides of an axis with which the output has an element for each `step` of the input."""
    if step < 1:
        raise WorkloadError(f"a stride of {step}: expected at least 1")
    return max((math.ceil(size / step) - 1) * step + (taps - 1) * dilation + 1 - size, 0)


def _dtype(kind: int) -> str:
    """An element type as NumPy calls it, or as ONNX does."""
    name = TensorProto.DataType.Name(kind) if kind in TensorProto.DataType.values() else str(kind)
    return {"FLOAT": "float32", "DOUBLE": "float64"}.get(name, name.lower())


def _number(tensor: TensorProto) -> float | None:
    """The number in a tensor of one element; None if there is none, or it lies in another file."""
    if math.prod(tensor.dims) != 1 or tensor.data_location == TensorProto.EXTERNAL:
        return None
    try:
        return float(numpy_helper.to_array(tensor).reshape(()))
    except (ValueError, TypeError):  # cut off, or of strings
        return None


def _bodies(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs that a node has inside."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def _convolutions(node: NodeProto, *, inner: bool = False) -> int:
    """How many convolutions a node is and has inside, or has inside alone."""
    inside = sum(_convolutions(each) for body in _bodies(node) for each in body.node)
    return inside + (not inner and _is_conv(node))


def _reads(node: NodeProto) -> tuple[str, ...]:
    """What a node reads, also from inside of it."""
    inside = dict.fromkeys(name for body in _bodies(node) for each in body.node for name in _reads(each))
    given = (output.name for body in _bodies(node) for output in body.output)
    return tuple(name for name in (*node.input, *inside, *given) if name)
