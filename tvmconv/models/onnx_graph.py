"""ONNX files as graphs; a file is read as data, so that no part of it is executed and external weights are not read.

Source: ONNX's operators, https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TensorShapeProto,
    ValueInfoProto,
)

from tvmconv.errors import Error, ModelError, WorkloadError
from tvmconv.files import read_bytes
from tvmconv.models.input_spec import InputSpec, assign_names
from tvmconv.models.model_graph import (
    ModelGraph,
    ModelOp,
    QuantizedFormat,
    Shape,
    make_convolution,
    make_quantized_convolution,
)
from tvmconv.models.onnx_nodes import (
    MAX_SHAPE_ELEMENTS,
    STANDARD_DOMAINS,
    compute_padding,
    compute_transposed_padding,
    count_convolutions,
    get_attribute,
    get_dtype_name,
    get_integers,
    get_name,
    is_conv,
    is_folded_normalization,
    list_reads,
    read_equal_numbers,
)
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.dtypes import FLOAT8_DTYPES
from tvmconv.workloads.text import quote

MAX_MESSAGE_BYTES = (1 << 31) - 1  # limit of protobuf
UNNAMED_DIMENSION = "?"  # a dynamic dimension without a name
DATA_FIELDS = ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")

# Operators whose constant inputs of floating-point numbers are parameters, which training changes.
TRAINED_OPS = (
    *("Conv", "ConvTranspose", "Gemm", "MatMul", "Gather", "GRU", "LSTM", "RNN", "PRelu"),
    *("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization"),
)
FLOAT_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)

# Element types of 8 bits, with the number to subtract for a signed integer.
EIGHT_BIT_TYPES = {
    TensorProto.INT8: ("int8", 0),
    TensorProto.UINT8: ("int8", 128),
    TensorProto.FLOAT8E4M3FN: ("float8_e4m3fn", 0),
    TensorProto.FLOAT8E5M2: ("float8_e5m2", 0),
}

# Pointwise operators with their kinds in the graph; their attributes and further inputs are irrelevant here.
UNARY_OPS = {
    "Identity": "same",
    "Dropout": "same",  # in inference
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
BINARY_OPS = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Min": "min", "Max": "max"}
PARAMETRIC_OPS: dict[
    str, tuple[str, dict[str, tuple[str, float]]]
] = {  # with the attribute of each option, and default
    "LeakyRelu": ("leaky_relu", {"slope": ("alpha", 0.01)}),
    "Elu": ("elu", {"alpha": ("alpha", 1.0)}),
    "HardSigmoid": ("hardsigmoid", {"slope": ("alpha", 0.2), "shift": ("beta", 0.5)}),
}


def read_graph(file: Path, inputs: Sequence[InputSpec] = ()) -> ModelGraph:
    """Read the operations of an ONNX file's model, given the shapes of its inputs with dynamic dimensions.

    Raises ModelError if the file is not an ONNX model, or a dimension on which a convolution depends is unknown.
    """
    try:
        model = _infer_shapes(file, read_model(file, inputs))
        translator = _GraphTranslator(model.graph)
        if any(shape is None for shape in translator.iterate_conv_input_shapes()):
            _refuse_dynamic(file, model)
        return translator.translate(model)
    except (Error, OSError):
        raise
    except Exception as error:  # an attribute of a wrong type, an unknown element type, …
        raise ModelError(f"{file} is not a valid ONNX model: {type(error).__name__}: {error}") from error


def read_model(file: Path, inputs: Sequence[InputSpec] = ()) -> ModelProto:
    """Read a model and set the shapes of its inputs; raise ModelError if the file is not an ONNX model.

    Weights in files of their own are not read.
    """
    model = ModelProto()
    try:
        model.ParseFromString(read_bytes(file, MAX_MESSAGE_BYTES))
    except DecodeError as error:
        raise ModelError(f"{file} is not an ONNX model, or is truncated: {error}") from error
    if not model.graph.node:
        raise ModelError(f"{file} is not an ONNX model: it has no graph")
    for node in model.graph.node:  # protobuf returns bytes for names that are not UTF-8
        if not all(isinstance(n, str) for n in (node.name, node.op_type, node.domain, *node.input, *node.output)):
            raise ModelError(f"{file} is not an ONNX model: its names are not UTF-8")
    try:
        _set_inputs(model, inputs)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error
    return model


def _infer_shapes(file: Path, model: ModelProto) -> ModelProto:
    """Remove the weights of a model and infer the shapes of its tensors."""
    for tensor in model.graph.initializer:  # data from which no shape is computed would only be copied
        if math.prod(tensor.dims) > MAX_SHAPE_ELEMENTS:
            for data in DATA_FIELDS:
                tensor.ClearField(data)
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:  # onnx raises several types for invalid graphs
        raise ModelError(f"{file}: its shapes cannot be inferred: {type(error).__name__}: {error}") from error


def _get_sizes(value: ValueInfoProto) -> tuple[int | str, ...] | None:
    """Return a tensor's shape, with names in place of dynamic dimensions; None if it is unknown."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    return tuple(
        dimension.dim_value if dimension.dim_value > 0 else dimension.dim_param or UNNAMED_DIMENSION
        for dimension in value.type.tensor_type.shape.dim
    )


def _refuse_dynamic(file: Path, model: ModelProto) -> None:
    """Raise ModelError if an input has a dynamic dimension or no shape."""
    for value in _iterate_inputs(model):
        shape = _get_sizes(value)
        if shape is None:
            raise ModelError(f"{file}: input {quote(value.name)} has no shape: --input {value.name}=SIZES sets it")
        for axis, size in enumerate(shape):
            if isinstance(size, str):
                raise ModelError(
                    f"{file}: input {quote(value.name)} is {'×'.join(map(str, shape))}, whose dimension {axis}, "
                    f"{quote(size)}, is dynamic: --input {value.name}=SIZES sets it"
                )


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
    shape = _get_sizes(value)
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
    return any(isinstance(size, str) for size in _get_sizes(value) or ())


class _GraphTranslator:
    """The translation of ONNX's nodes to operations."""

    def __init__(self, source: GraphProto) -> None:
        self._source = source
        self._types: dict[str, int] = {}
        self._numbers: dict[str, float] = {}
        self._equal_numbers: dict[str, float] = {}  # of small constants of several equal numbers, too
        self.graph = ModelGraph(outputs={output.name for output in source.output})
        for value in (*source.input, *source.value_info, *source.output):
            self._record_tensor(value.name, value.type.tensor_type.elem_type, _get_sizes(value))
        for tensor in source.initializer:
            self._record_constant(tensor.name, tensor)
        for sparse in source.sparse_initializer:
            self.graph.constants.add(sparse.values.name)
            self._record_tensor(sparse.values.name, sparse.values.data_type, tuple(sparse.dims))

    def _record_tensor(self, name: str, kind: int, shape: Sequence[int | str] | None) -> None:
        self._types[name] = kind
        if shape is not None and all(isinstance(size, int) for size in shape):
            self.graph.shapes[name] = tuple(size for size in shape if isinstance(size, int))

    def _record_constant(self, name: str, tensor: TensorProto) -> None:
        self.graph.constants.add(name)
        self._record_tensor(name, tensor.data_type, tuple(tensor.dims))
        number = read_equal_numbers(tensor)
        if number is not None:
            self._equal_numbers[name] = number
            if math.prod(tensor.dims) == 1:
                self._numbers[name] = number

    def iterate_conv_input_shapes(self) -> Iterator[Shape | None]:
        """Yield the known shapes of inputs and weights of convolutions, and None for unknown ones."""
        for node in self._source.node:
            if is_conv(node):
                yield from (self.graph.shapes.get(name) for name in node.input[:2])

    def translate(self, model: ModelProto) -> ModelGraph:
        """Translate all nodes in their order, which is a valid order of execution, but not the model's functions."""
        for node in self._source.node:
            self._translate(node)
        for function in model.functions:
            self._skip_nested(f"function {function.name}", sum(map(count_convolutions, function.node)))
        return self.graph

    def _translate(self, node: NodeProto) -> None:
        is_standard = node.domain in STANDARD_DOMAINS
        if is_standard and node.op_type in TRAINED_OPS:
            constants = self.graph.constants.intersection(node.input)
            self.graph.parameters.update(name for name in constants if self._types.get(name) in FLOAT_TYPES)
        if is_conv(node):
            self.graph.add_conv(
                get_name(node), list_reads(node), tuple(node.output), partial(self._make_workload, node)
            )
        elif is_standard and node.op_type == "QLinearConv":
            writes = tuple(node.output)
            self.graph.add_conv(get_name(node), list_reads(node), writes, partial(self._make_qlinear_workload, node))
        elif is_standard and node.op_type == "Constant":
            self._translate_constant(node)
        elif is_standard and node.op_type in ("QuantizeLinear", "DequantizeLinear") and node.output:
            self._translate_quantization(node)
        elif not (is_standard and node.output and self._translate_pointwise(node)):
            if "Conv" in node.op_type:
                self.graph.skip_layer(get_name(node), f"tvmconv has no workload for {node.op_type}")
            self._skip_nested(
                f"the bodies of {node.op_type} {get_name(node)}", count_convolutions(node, only_nested=True)
            )
            kind = "norm" if is_standard and is_folded_normalization(node) else ""
            self.graph.add(ModelOp(kind, list_reads(node), tuple(node.output)))

    def _skip_nested(self, location: str, count: int) -> None:
        if count:
            self.graph.skip_layer(location, f"{count} convolution{'s' * (count > 1)} inside, which are not translated")

    def _make_workload(self, node: NodeProto) -> ConvOperator:
        if len(node.input) < 2:
            raise WorkloadError("it has no input and weight")
        formats = [self.graph.dequantized.get(name) for name in node.input[:2]]
        has_bias = len(node.input) > 2 and node.input[2] != ""
        dtype = get_dtype_name(self._types.get(node.input[0], 0))
        if formats[0] and formats[1] and self._is_computed_in_8_bits(node, formats[0], formats[1]):
            how = self._collect_options(node, *node.input[:2])
            return make_quantized_convolution(formats=[formats[0], formats[1]], out_dtype=dtype, bias=has_bias, **how)
        return make_convolution(dtype=dtype, bias=has_bias, **self._collect_options(node, *node.input[:2]))

    def _is_computed_in_8_bits(self, node: NodeProto, x: QuantizedFormat, weight: QuantizedFormat) -> bool:
        """Return whether kernels of 8-bit operands compute a convolution of dequantized tensors."""
        is_constant = node.input[1] in self.graph.constants
        has_products = x.dtype == weight.dtype or {x.dtype, weight.dtype} <= {*FLOAT8_DTYPES}
        return is_constant and node.op_type == "Conv" and has_products and not weight.zero_point

    def _make_qlinear_workload(self, node: NodeProto) -> ConvOperator:
        x, _, x_zero, weight, _, weight_zero, _, y_zero = node.input[:8]
        formats = [self._find_format(x, x_zero), self._find_format(weight, weight_zero)]
        result_format = self._find_format(y_zero, y_zero)
        if formats[0] is None or formats[1] is None or result_format is None or formats[1].zero_point:
            raise WorkloadError("its zero points are unknown, or that of its weight is not 0")
        how = self._collect_options(node, x, weight)
        workload: Any = make_quantized_convolution(
            formats=[formats[0], formats[1]],
            out_dtype="float32",
            bias=len(node.input) > 8 and node.input[8] != "",
            **how,
        )
        operations = ("quantize", *["zero_point"] * bool(result_format.zero_point))
        quantized: ConvOperator = replace(
            workload, epilogue=(*workload.epilogue, *operations), out_dtype=result_format.dtype
        )
        return quantized

    def _collect_options(self, node: NodeProto, x_name: str, weight_name: str) -> dict[str, Any]:
        """Return the arguments of `make_convolution` that describe sizes."""
        x, weight = self.graph.shapes.get(x_name), self.graph.shapes.get(weight_name)
        if x is None or weight is None:
            raise WorkloadError(f"the shape of its {'weight' if x else 'input'} is unknown")
        kernel = weight[2:]
        stride = get_integers(node, "strides") or (1,) * len(kernel)
        dilation = get_integers(node, "dilations") or (1,) * len(kernel)
        is_transposed = node.op_type == "ConvTranspose"
        output_padding = get_integers(node, "output_padding") or (0,) * len(kernel)
        if is_transposed:
            padding = compute_transposed_padding(node, x[2:], kernel, stride, dilation, output_padding)
        else:
            padding = compute_padding(node, x[2:], kernel, stride, dilation)
        return {
            **{"x": x, "weight": weight, "stride": stride, "padding": padding, "dilation": dilation},
            **{"groups": get_attribute(node, "group", 1), "output_padding": output_padding if is_transposed else None},
        }

    def _find_format(self, name: str, zero_point_name: str) -> QuantizedFormat | None:
        """Return the format of a tensor in 8 bits; None for others, and for an unknown zero point."""
        if self._types.get(name) not in EIGHT_BIT_TYPES:
            return None
        dtype, offset = EIGHT_BIT_TYPES[self._types[name]]
        zero_point = self._equal_numbers.get(zero_point_name) if zero_point_name else 0.0
        return None if zero_point is None else QuantizedFormat(dtype, int(zero_point) - offset)

    def _translate_quantization(self, node: NodeProto) -> None:
        """Translate a conversion to or from 8 bits. Only weights have several scales."""
        is_quantization = node.op_type == "QuantizeLinear"
        (read, scale, zero_point), write = [*node.input, ""][:3], node.output[0]
        quantized_format = self._find_format(write if is_quantization else read, zero_point)
        has_one_scale = self.graph.shapes.get(scale) in ((), (1,))
        if quantized_format is None or not (has_one_scale or read in self.graph.constants):
            self.graph.add(ModelOp("", list_reads(node), tuple(node.output)))
            return
        kind = "quantize" if is_quantization else ""
        if not is_quantization:
            self.graph.dequantized[write] = quantized_format
        self.graph.add(ModelOp(kind, (read,), (write,), quantized_format=quantized_format))

    def _translate_constant(self, node: NodeProto) -> None:
        (name,) = node.output[:1] or [""]
        self.graph.constants.add(name)
        tensor = get_attribute(node, "value", None)
        number = get_attribute(node, "value_float", get_attribute(node, "value_int", None))
        if isinstance(tensor, TensorProto):
            self._record_constant(name, tensor)
        elif number is not None:
            self._numbers[name] = float(number)
            self.graph.shapes[name] = ()

    def _translate_pointwise(self, node: NodeProto) -> bool:
        """Translate a pointwise node; return whether the node is one."""
        options: dict[str, Any] = {}
        kind, operands = UNARY_OPS.get(node.op_type), list(node.input[:1])
        if node.op_type in BINARY_OPS and len(node.input) == 2:
            kind, operands = BINARY_OPS[node.op_type], list(node.input)
        elif node.op_type in PARAMETRIC_OPS:
            kind, parameters = PARAMETRIC_OPS[node.op_type]
            options = {option: get_attribute(node, *parameter) for option, parameter in parameters.items()}
        elif node.op_type == "Swish" and get_attribute(node, "alpha", 1.0) == 1:
            kind = "silu"
        elif node.op_type == "Gelu":
            kind, options = "gelu", {"by_tanh": get_attribute(node, "approximate", b"none") == b"tanh"}
        elif node.op_type == "Clip":
            limits = self._find_clip_limits(node)
            kind, options = ("clip", limits) if limits is not None else (None, {})
        elif node.op_type == "Cast":
            kind = "same" if get_attribute(node, "to", 0) == self._types.get(node.input[0]) else None
        if kind is None or not operands or "" in operands:
            return False
        values = [self._numbers.get(name, name) for name in operands]
        self.graph.add_pointwise(kind, values, tuple(node.output), **options)
        return True

    def _find_clip_limits(self, node: NodeProto) -> dict[str, float] | None:
        """Return the limits of a `Clip`, attributes in old opsets and inputs in new ones; None if they are unknown."""
        limits = {}
        for limit, attribute, index in (("low", "min", 1), ("high", "max", 2)):
            if len(node.input) > index and node.input[index]:
                if node.input[index] not in self._numbers:
                    return None
                limits[limit] = self._numbers[node.input[index]]
            elif (number := get_attribute(node, attribute, None)) is not None:
                limits[limit] = float(number)
        return limits
