"""ONNX models as files: their inputs, and the shapes that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, NodeProto, TensorProto, TensorShapeProto, ValueInfoProto

from tvmconv.errors import ModelError
from tvmconv.files import read_bytes
from tvmconv.models.input_spec import InputSpec, assign_names
from tvmconv.workloads.text import quote

MAX_MESSAGE_BYTES = (1 << 31) - 1  # limit of protobuf
MAX_SHAPE_ELEMENTS = 4096  # largest tensor from which shapes are computed
UNNAMED_DIMENSION = "?"  # a dynamic dimension without a name
DATA_FIELDS = ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")


def read_model(file: Path, inputs: Sequence[InputSpec] = ()) -> ModelProto:
    """Read a model without its weights and infer the shapes of its tensors.

    Args:
        file: Path of an ONNX model.
        inputs: Shapes of its inputs with dynamic dimensions.

    Raises:
        ModelError: The file is not an ONNX model, or has no such inputs.
        OSError: The file cannot be read.
    """
    model = ModelProto()
    try:
        model.ParseFromString(read_bytes(file, MAX_MESSAGE_BYTES))
    except DecodeError as error:
        raise ModelError(f"{file} is not an ONNX model, or is truncated: {error}") from error
    if not model.graph.node:
        raise ModelError(f"{file} is not an ONNX model: it has no graph")
    if not all(isinstance(text, str) for node in model.graph.node for text in _iterate_names(node)):
        raise ModelError(f"{file} is not an ONNX model: its names are not UTF-8")
    try:
        _set_inputs(model, inputs)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error
    for tensor in model.graph.initializer:
        _drop_weights(tensor)
    return _infer_shapes(file, model)


def get_sizes(value: ValueInfoProto) -> tuple[int | str, ...] | None:
    """Return a tensor's shape, with names in place of dynamic dimensions; None if it is unknown."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    return tuple(
        dimension.dim_value if dimension.dim_value > 0 else dimension.dim_param or UNNAMED_DIMENSION
        for dimension in value.type.tensor_type.shape.dim
    )


def refuse_dynamic(file: Path, model: ModelProto) -> None:
    """Raise ModelError if an input has a dynamic dimension or no shape."""
    for value in _iterate_inputs(model):
        shape = get_sizes(value)
        if shape is None:
            raise ModelError(f"{file}: input {quote(value.name)} has no shape: --input {value.name}=SIZES sets it")
        for axis, size in enumerate(shape):
            if isinstance(size, str):
                raise ModelError(
                    f"{file}: input {quote(value.name)} is {'×'.join(map(str, shape))}, whose dimension {axis}, "
                    f"{quote(size)}, is dynamic: --input {value.name}=SIZES sets it"
                )


def _iterate_names(node: NodeProto) -> Iterator[str | bytes]:
    """Yield the names in a node, as bytes if they are not UTF-8."""
    yield from (node.name, node.op_type, node.domain, *node.input, *node.output)


def _iterate_inputs(model: ModelProto) -> Iterator[ValueInfoProto]:
    """Yield the inputs of a model without its weights, which old files list among the inputs."""
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name not in weights and value.type.HasField("tensor_type"):
            yield value


def _set_inputs(model: ModelProto, inputs: Sequence[InputSpec]) -> None:
    """Set the sizes of dynamic dimensions wherever their names occur; raise ModelError if they contradict the file."""
    values = {value.name: value for value in _iterate_inputs(model)}
    symbols: dict[str, int] = {}
    for name, spec in assign_names(inputs, [*values]).items():
        if spec.dtype is not None:
            raise ModelError(f"input {quote(name)} has a dtype in the file: expected --input {name}={spec.text}")
        _set_input(values[name], spec, symbols)
    value_infos = model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output, *value_infos):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in symbols:
                size.dim_value = symbols[size.dim_param]
    del model.graph.value_info[:]  # shapes that depend on other names are inferred again
    model.graph.value_info.extend(value_info for value_info in value_infos if not _is_dynamic(value_info))
    for value in model.graph.output:
        if _is_dynamic(value):
            value.type.tensor_type.ClearField("shape")


def _set_input(value: ValueInfoProto, spec: InputSpec, symbols: dict[str, int]) -> None:
    """Set the sizes of an input and record the sizes of its named dimensions."""
    shape = get_sizes(value)
    if shape is None:
        dims = [TensorShapeProto.Dimension(dim_value=size) for size in spec.shape]
        value.type.tensor_type.shape.dim.extend(dims)
        return
    text = "x".join(map(str, shape))
    is_matching = len(shape) == len(spec.shape)
    for size, new in zip(shape, spec.shape, strict=False):
        expected_size = symbols.setdefault(size, new) if isinstance(size, str) and size != UNNAMED_DIMENSION else size
        is_matching = is_matching and expected_size in (new, UNNAMED_DIMENSION)
    if not is_matching:
        raise ModelError(f"input {quote(value.name)} is {text} in the file, which {spec.text} does not match")
    for dimension, new in zip(value.type.tensor_type.shape.dim, spec.shape, strict=True):
        dimension.dim_value = new


def _is_dynamic(value: ValueInfoProto) -> bool:
    return any(isinstance(size, str) for size in get_sizes(value) or ())


def _drop_weights(tensor: TensorProto) -> None:
    """Clear the data of a tensor from which no shape is computed, so that it is not copied."""
    elements = 1
    for size in tensor.dims:
        elements *= size
    if elements > MAX_SHAPE_ELEMENTS:
        for data in DATA_FIELDS:
            tensor.ClearField(data)


def _infer_shapes(file: Path, model: ModelProto) -> ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:  # onnx raises several types for invalid graphs
        raise ModelError(f"{file}: its shapes cannot be inferred: {type(error).__name__}: {error}") from error
