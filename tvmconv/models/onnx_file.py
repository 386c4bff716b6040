"""ONNX models as they lie in files: what their inputs are, and the shapes that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, NodeProto, TensorProto, TensorShapeProto, ValueInfoProto

from tvmconv.errors import ModelError
from tvmconv.files import read_bytes
from tvmconv.models.inputs import Input, by_name
from tvmconv.workloads.text import quote

MAX_BYTES = (1 << 31) - 1  # of a message of protobuf
MOST_ELEMENTS = 4096  # of a tensor that shapes may be computed from
UNNAMED = "?"  # a dynamic dimension without a name
DATA = ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")


def read(file: Path, inputs: Sequence[Input] = ()) -> ModelProto:
    """A model with the shapes of its tensors, as far as they can be told, and without its weights.

    Args:
        file: of an ONNX model.
        inputs: shapes of its inputs that have dynamic dimensions.

    Raises:
        ModelError: it is no ONNX model, or has no such inputs.
        OSError: the file cannot be read.
    """
    model = ModelProto()
    try:
        model.ParseFromString(read_bytes(file, MAX_BYTES))
    except DecodeError as error:
        raise ModelError(f"{file} is no ONNX model, or is cut off: {error}") from error
    if not model.graph.node:
        raise ModelError(f"{file} is no ONNX model: it has no graph")
    if not all(isinstance(text, str) for node in model.graph.node for text in _texts(node)):
        raise ModelError(f"{file} is no ONNX model: its names are no text")
    try:
        _set_inputs(model, inputs)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error
    for tensor in model.graph.initializer:
        _forget_weights(tensor)
    return _inferred(file, model)


def sizes(value: ValueInfoProto) -> tuple[int | str, ...] | None:
    """A tensor's shape, with the names of those dimensions that are dynamic; None if unknown."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    return tuple(
        each.dim_value if each.dim_value > 0 else each.dim_param or UNNAMED for each in value.type.tensor_type.shape.dim
    )


def refuse_dynamic(file: Path, model: ModelProto) -> None:
    """Raise ModelError if an input has a dynamic dimension, or no shape at all."""
    for value in _inputs(model):
        shape = sizes(value)
        if shape is None:
            raise ModelError(f"{file}: input {quote(value.name)} has no shape: --input {value.name}=SIZES sets it")
        for axis, size in enumerate(shape):
            if isinstance(size, str):
                raise ModelError(
                    f"{file}: input {quote(value.name)} is {'×'.join(map(str, shape))}, whose dimension {axis}, "
                    f"{quote(size)}, is dynamic: --input {value.name}=SIZES sets it"
                )


def _texts(node: NodeProto) -> Iterator[str | bytes]:
    """The names in a node: bytes where they are not UTF-8."""
    yield from (node.name, node.op_type, node.domain, *node.input, *node.output)


def _inputs(model: ModelProto) -> Iterator[ValueInfoProto]:
    """The tensors that a model is given; files of old have their weights among the inputs."""
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name not in weights and value.type.HasField("tensor_type"):
            yield value


def _set_inputs(model: ModelProto, inputs: Sequence[Input]) -> None:
    """Give dynamic dimensions of inputs their sizes, wherever their names stand; raises ModelError."""
    values = {value.name: value for value in _inputs(model)}
    symbols: dict[str, int] = {}
    for name, given in by_name(inputs, [*values]).items():
        if given.dtype is not None:
            raise ModelError(f"input {quote(name)} has a dtype in the file: expected --input {name}={given.text}")
        _set_input(values[name], given, symbols)
    known = model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output, *known):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in symbols:
                size.dim_value = symbols[size.dim_param]
    del model.graph.value_info[:]  # what depends on other names is inferred
    model.graph.value_info.extend(each for each in known if not _is_dynamic(each))
    for value in model.graph.output:
        if _is_dynamic(value):
            value.type.tensor_type.ClearField("shape")


def _set_input(value: ValueInfoProto, given: Input, symbols: dict[str, int]) -> None:
    """Set the sizes of an input, and learn what its dimensions' names stand for."""
    shape = sizes(value)
    if shape is None:
        dims = [TensorShapeProto.Dimension(dim_value=size) for size in given.shape]
        value.type.tensor_type.shape.dim.extend(dims)
        return
    text = "x".join(map(str, shape))
    fits = len(shape) == len(given.shape)
    for size, new in zip(shape, given.shape, strict=False):
        known = symbols.setdefault(size, new) if isinstance(size, str) and size != UNNAMED else size
        fits = fits and known in (new, UNNAMED)
    if not fits:
        raise ModelError(f"input {quote(value.name)} is {text} in the file, which {given.text} does not fit")
    for dimension, new in zip(value.type.tensor_type.shape.dim, given.shape, strict=True):
        dimension.dim_value = new


def _is_dynamic(value: ValueInfoProto) -> bool:
    return any(isinstance(size, str) for size in sizes(value) or ())


def _forget_weights(tensor: TensorProto) -> None:
    """Drop what no shape depends on, so that nothing copies it."""
    elements = 1
    for size in tensor.dims:
        elements *= size
    if elements > MOST_ELEMENTS:
        for data in DATA:
            tensor.ClearField(data)


def _inferred(file: Path, model: ModelProto) -> ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:  # of several kinds, for graphs that make no sense
        raise ModelError(f"{file}: its shapes cannot be inferred: {type(error).__name__}: {error}") from error
