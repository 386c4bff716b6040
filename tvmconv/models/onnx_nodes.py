"""Nodes of ONNX graphs: their attributes, their padding, and the graphs inside them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, numpy_helper

from tvmconv.errors import WorkloadError
from tvmconv.models.model_graph import Shape

MAX_SHAPE_ELEMENTS = 4096  # largest tensor from which shapes are computed
STANDARD_DOMAINS = ("", "ai.onnx")


def is_conv(node: NodeProto) -> bool:
    """Return whether a node is a convolution or a transposed one."""
    return node.op_type in ("Conv", "ConvTranspose") and node.domain in STANDARD_DOMAINS


def get_name(node: NodeProto) -> str:
    """Return the name of a node, or else that of its first output."""
    return node.name or next(iter(node.output), "") or node.op_type


def is_folded_normalization(node: NodeProto) -> bool:
    """Return whether a node is a batch normalization with constant statistics."""
    return node.op_type == "BatchNormalization" and not get_attribute(node, "training_mode", 0)


def get_attribute(node: NodeProto, name: str, default: Any) -> Any:
    """Return the value of an attribute of a node."""
    for attribute in node.attribute:
        if attribute.name == name:
            return onnx.helper.get_attribute_value(attribute)
    return default


def get_integers(node: NodeProto, name: str) -> Shape:
    """Return the integers of an attribute of a node; none if it lacks them."""
    value = get_attribute(node, name, ())
    return tuple(value) if isinstance(value, (list, tuple)) else ()


def compute_padding(node: NodeProto, space: Shape, kernel: Shape, stride: Shape, dilation: Shape) -> Shape:
    """Return the zeros before all axes and then after all axes; raise WorkloadError for an unknown auto_pad."""
    auto_pad = get_attribute(node, "auto_pad", b"NOTSET")
    if auto_pad in (b"NOTSET", b""):
        return get_integers(node, "pads") or (0,) * len(kernel)
    if auto_pad == b"VALID":
        return (0,) * len(kernel)
    if auto_pad not in (b"SAME_UPPER", b"SAME_LOWER"):
        raise WorkloadError(f"auto_pad is {auto_pad!r}: expected NOTSET, VALID, SAME_UPPER or SAME_LOWER")
    totals = [_compute_same_padding(*axis) for axis in zip(space, kernel, stride, dilation, strict=False)]
    smaller, larger = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return (*smaller, *larger) if auto_pad == b"SAME_UPPER" else (*larger, *smaller)


def compute_transposed_padding(
    node: NodeProto, space: Shape, kernel: Shape, stride: Shape, dilation: Shape, output_padding: Shape
) -> Shape:
    """Return the padding of a ConvTranspose, which `auto_pad` or the size of the output may define.

    Source of the formula: https://onnx.ai/onnx/operators/onnx__ConvTranspose.html.
    """
    auto_pad = get_attribute(node, "auto_pad", b"NOTSET")
    sizes = get_integers(node, "output_shape")
    is_same = auto_pad in (b"SAME_UPPER", b"SAME_LOWER")
    if not sizes and not is_same:
        return compute_padding(node, space, kernel, stride, dilation)
    sizes = sizes[-len(space) :] or tuple(size * step for size, step in zip(space, stride, strict=True))
    axes = zip(space, kernel, stride, dilation, output_padding, sizes, strict=True)
    totals = [
        step * (size - 1) + more + (taps - 1) * spread + 1 - output_size
        for size, taps, step, spread, more, output_size in axes
    ]
    if min(totals) < 0:
        raise WorkloadError(f"its output, {sizes}, is larger than its input reaches: expected more output_padding")
    smaller, larger = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return (*smaller, *larger) if auto_pad == b"SAME_UPPER" else (*larger, *smaller)


def _compute_same_padding(size: int, taps: int, stride: int, dilation: int) -> int:
    """Return the zeros on both sides of an axis for which the output has ceil(size / stride) elements."""
    if stride < 1:
        raise WorkloadError(f"stride={stride}: expected at least 1")
    return max((math.ceil(size / stride) - 1) * stride + (taps - 1) * dilation + 1 - size, 0)


def get_dtype_name(kind: int) -> str:
    """Return NumPy's name of an element type, or else ONNX's."""
    name = TensorProto.DataType.Name(kind) if kind in TensorProto.DataType.values() else str(kind)
    return {"FLOAT": "float32", "DOUBLE": "float64"}.get(name, name.lower())


def read_equal_numbers(tensor: TensorProto) -> float | None:
    """Return the number of which a small tensor consists; None for other tensors and for external data."""
    size = math.prod(tensor.dims)
    if not 1 <= size <= MAX_SHAPE_ELEMENTS or tensor.data_location == TensorProto.EXTERNAL:
        return None
    try:
        numbers = numpy_helper.to_array(tensor).reshape(-1).astype(float)
    except (ValueError, TypeError):  # truncated, or a string
        return None
    return float(numbers[0]) if (numbers == numbers[0]).all() or size == 1 else None


def iterate_bodies(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs inside a node."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def count_convolutions(node: NodeProto, *, only_nested: bool = False) -> int:
    """Return the number of convolutions in a node, itself included unless `only_nested`."""
    num_nested = sum(count_convolutions(nested_node) for body in iterate_bodies(node) for nested_node in body.node)
    return num_nested + (not only_nested and is_conv(node))


def list_reads(node: NodeProto) -> tuple[str, ...]:
    """Return the tensors that a node and the graphs inside it read."""
    nested_reads = dict.fromkeys(
        name for body in iterate_bodies(node) for nested_node in body.node for name in list_reads(nested_node)
    )
    body_outputs = (output.name for body in iterate_bodies(node) for output in body.output)
    return tuple(name for name in (*node.input, *nested_reads, *body_outputs) if name)
