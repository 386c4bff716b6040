"""The folding of constants and paddings in ONNX models. TVM's importer needs paddings, slices and shapes as constants,
and PyTorch's exporter writes many of them as operations on constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, shape_inference

from tvmconv.errors import WorkloadError
from tvmconv.models.model_graph import Shape
from tvmconv.models.onnx_nodes import (
    STANDARD_DOMAINS,
    compute_padding,
    compute_transposed_padding,
    get_attribute,
    get_integers,
)

MAX_ROUNDS = 8  # rounds of shape inference, each of which may make further shapes known
MAX_NEW_ELEMENTS = 1 << 16  # elements of a result that is larger than the constants from which it is computed
PADDING_OPS = ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool")
RANDOM_OPS = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli")


def fold_constants(model: ModelProto) -> ModelProto:
    """Return a model without operations on constants and on known shapes, without paddings by zeros before
    convolutions, and with numbers as `pads`. What the package onnx cannot compute stays.

    Args:
        model: Model with its weights. It is not modified.
    """
    for _ in range(MAX_ROUNDS):
        model = shape_inference.infer_shapes(model, data_prop=True)
        if not _fold_nodes(model):
            break
    _set_pads(model)
    return _fold_pads(model)


def _fold_nodes(model: ModelProto) -> bool:
    """Replace nodes of a model by initializers, and return whether there were any."""
    graph = model.graph
    shapes = dict(_iterate_shapes([*graph.input, *graph.value_info, *graph.output]))
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    results, kept = {info.name for info in graph.output}, []
    for node in graph.node:
        arrays = None if results.intersection(node.output) else _compute_node(model, node, constants, shapes)
        if arrays is None:
            kept.append(node)
            continue
        constants.update(zip(node.output, arrays, strict=True))
        if node.op_type != "Constant":
            graph.initializer.extend(map(numpy_helper.from_array, arrays, node.output))
        else:
            kept.append(node)
    is_changed = len(kept) < len(graph.node)
    del graph.node[:]
    graph.node.extend(kept)
    return is_changed


def _set_pads(model: ModelProto) -> None:
    """Replace `auto_pad` and `output_shape` of convolutions and poolings by numbers, where the sizes of the pixels are
    known. TVM's importer pads in an operation of its own, which no kernel contains, and counts its zeros in means.
    """
    graph = model.graph
    sizes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for info in (*graph.input, *graph.value_info):
        if info.type.tensor_type.HasField("shape"):
            sizes[info.name] = tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim)  # 0 for a dynamic one
    for node in graph.node:
        if node.op_type not in PADDING_OPS or node.domain not in STANDARD_DOMAINS:
            continue
        space = sizes.get(node.input[0], ())[2:]
        kernel = get_integers(node, "kernel_shape") or sizes.get(node.input[1], ())[2:]
        is_automatic = get_attribute(node, "auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER")
        if (is_automatic or get_integers(node, "output_shape")) and all(space) and len(space) == len(kernel):
            _set_numbers(node, space, kernel)


def _set_numbers(node: NodeProto, space: Shape, kernel: Shape) -> None:
    """Set `pads` of a node for the sizes of its input and its kernel."""
    ones = (1,) * len(space)
    window = space, kernel, get_integers(node, "strides") or ones, get_integers(node, "dilations") or ones
    try:
        if node.op_type == "ConvTranspose":
            output_padding = get_integers(node, "output_padding") or (0,) * len(space)
            pads = compute_transposed_padding(node, *window, output_padding)
        else:
            pads = compute_padding(node, *window)
    except WorkloadError:  # TVM's importer says what it thinks of it
        return
    kept = [attribute for attribute in node.attribute if attribute.name not in ("auto_pad", "output_shape", "pads")]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("pads", pads)])


def _fold_pads(model: ModelProto) -> ModelProto:
    """Return a model with the zeros that `Pad` adds around the input of a convolution as the convolution's `pads`."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    pads = {node.output[0]: node for node in model.graph.node if node.op_type == "Pad"}
    for node in model.graph.node:
        pad = pads.get(node.input[0]) if node.op_type == "Conv" else None
        numbers = [] if pad is None else _list_zeros_around_pixels(pad, constants)
        if pad is None or not numbers or any(attribute.name == "auto_pad" for attribute in node.attribute):
            continue
        attribute = next((attribute for attribute in node.attribute if attribute.name == "pads"), None)
        if attribute is None:
            node.attribute.append(helper.make_attribute("pads", numbers))
        else:
            attribute.ints[:] = [own + added for own, added in zip(attribute.ints, numbers, strict=True)]
        node.input[0] = pad.input[0]
    return model


def _list_zeros_around_pixels(pad: NodeProto, constants: Mapping[str, TensorProto]) -> list[int]:
    """Return the numbers of zeros before and after each axis of pixels; none if a `Pad` node does something else."""
    mode = next((attribute.s for attribute in pad.attribute if attribute.name == "mode"), b"constant")
    names = [*pad.input[1:], "", "", ""][:3]
    is_known = names[0] in constants and (not names[1] or names[1] in constants) and not names[2]
    if mode != b"constant" or not is_known:
        return []
    numbers = [int(number) for number in numpy_helper.to_array(constants[names[0]])]
    middle = len(numbers) // 2
    value = numpy_helper.to_array(constants[names[1]]) if names[1] else np.zeros(())
    if np.any(value) or min(numbers) < 0 or any((*numbers[:2], *numbers[middle : middle + 2])):
        return []
    return [*numbers[2:middle], *numbers[middle + 2 :]]


def _iterate_shapes(infos: list[ValueInfoProto]) -> Iterator[tuple[str, list[int]]]:
    """Yield the names and sizes of tensors without dynamic dimensions."""
    for info in infos:
        if info.type.tensor_type.HasField("shape"):
            dims = info.type.tensor_type.shape.dim
            if all(dim.HasField("dim_value") for dim in dims):
                yield info.name, [dim.dim_value for dim in dims]


def _compute_node(
    model: ModelProto, node: NodeProto, constants: dict[str, NDArray], shapes: dict[str, list[int]]
) -> list[NDArray] | None:
    """Return the results of a node; None if they depend on inputs of the model."""
    if node.domain not in STANDARD_DOMAINS or node.op_type in RANDOM_OPS:
        return None
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if any(attribute.HasField("g") or attribute.graphs for attribute in attributes.values()):
        return None
    if node.op_type == "Shape" and node.input[0] in shapes:
        start, end = (helper.get_attribute_value(attributes[n]) if n in attributes else None for n in ("start", "end"))
        return [np.array(shapes[node.input[0]][start:end], np.int64)]
    names = [name for name in node.input if name]
    if not all(name in constants for name in names) or (not names and node.op_type != "Constant"):
        return None
    arrays = _evaluate(model, node, {name: constants[name] for name in names})
    num_elements = sum(constants[name].size for name in names)
    is_small = sum(array.size for array in arrays or ()) <= max(num_elements, MAX_NEW_ELEMENTS)
    return arrays if is_small or node.op_type == "Constant" else None


def _evaluate(model: ModelProto, node: NodeProto, feeds: dict[str, NDArray]) -> list[NDArray] | None:
    """Return the results of a node for constants; None if the package onnx does not compute them."""
    from onnx.reference import ReferenceEvaluator

    inputs, outputs = ([ValueInfoProto(name=name) for name in names] for names in (feeds, node.output))
    graph = helper.make_graph([node], "node", inputs, outputs)
    single = onnx.ModelProto(ir_version=model.ir_version, graph=graph, opset_import=model.opset_import)
    try:
        arrays = ReferenceEvaluator(single).run(None, feeds)
    except Exception:  # an operator that the reference lacks, or constants that it refuses
        return None
    return [np.asarray(array) for array in arrays] if all(array is not None for array in arrays) else None
