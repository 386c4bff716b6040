"""TVM's importers for more models: PyTorch's in 16 bits and with three-dimensional transposed convolutions, and ONNX's
with shapes and paddings that are computed from constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import relax
from tvm.ir import IRModule

from tvmconv.relax.graph import SPATIAL_AXES

if TYPE_CHECKING:
    import onnx
    import torch


def from_exported_program(program: torch.export.ExportedProgram, **options: Any) -> IRModule:
    """Import a model of `torch.export` into Relax.

    TVM's importer computes convolutions and matrix products in float32, and fails where a sum with a bias in float16 or
    bfloat16 follows, or at a transposed convolution in three dimensions. Instance normalizations have its own epsilon,
    a SELU lacks its scale, and a resizing to the nearest pixel by no integer takes other pixels than PyTorch. Here
    results have the dtype of the operands, and numbers are those of the model; the importer does everything else.

    Args:
        program: Exported model.
        **options: Options of `tvm.relax.frontend.torch.from_exported_program`. Its `custom_convert_map` adds to the
            operators that are converted here.

    Examples:
        >>> import torch, tvmconv.relax
        >>> conv, x = torch.nn.Conv2d(4, 8, 3).half().eval(), torch.randn(1, 4, 9, 9).half()
        >>> mod = tvmconv.relax.from_exported_program(torch.export.export(conv, (x,)))
        >>> optimized = tvmconv.relax.optimize(mod, "sm_90")  # doctest: +SKIP
    """
    from tvm.relax.frontend.torch import from_exported_program as import_program

    converters = {**CONVERTERS, **(options.pop("custom_convert_map", None) or {})}
    return import_program(program, custom_convert_map=converters, **options)


def from_onnx(model: onnx.ModelProto, **options: Any) -> IRModule:
    """Import a model of ONNX into Relax, after operations on constants are computed.

    TVM's importer refuses paddings, slices and shapes that are computed from constants, as PyTorch's exporter writes
    them. Automatic paddings, as in models of TensorFlow, and sizes of the outputs of transposed convolutions become
    paddings of the convolutions, where the importer pads in a function of its own, and ignores such a size.

    Args:
        model: Model with its weights.
        **options: Options of `tvm.relax.frontend.onnx.from_onnx`.

    Examples:
        >>> import onnx, tvmconv.relax
        >>> mod = tvmconv.relax.from_onnx(onnx.load("model.onnx"))  # doctest: +SKIP
    """
    from tvm.relax.frontend.onnx import from_onnx as import_model

    from tvmconv.models.onnx_folding import fold_constants

    return import_model(fold_constants(model), **options)


def _convert_convolution(node: Any, importer: Any) -> relax.Var:
    """Convert `aten.convolution`."""
    x, weight, bias, stride, padding, dilation, is_transposed, output_padding, groups = importer.retrieve_args(node)
    ndim = len(importer.shape_of(x)) - 2
    axes, dtype = SPATIAL_AXES[ndim], str(x.ty.dtype)
    options = {"data_layout": f"NC{axes}", "kernel_layout": f"{'IO' if is_transposed else 'OI'}{axes}"}
    numbers: dict[str, Any] = {"strides": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if is_transposed:
        numbers["output_padding"] = output_padding
    make = getattr(relax.op.nn, f"conv{ndim}d{'_transpose' if is_transposed else ''}")
    result = importer.block_builder.emit(make(x, weight, **numbers, **options, out_dtype=dtype))
    if bias is None:
        return result
    return importer.block_builder.emit(relax.op.add(result, relax.op.reshape(bias, (1, -1, *(1,) * ndim))))


def _convert_product(node: Any, importer: Any) -> relax.Var:
    """Convert `aten.mm`, `aten.bmm` and `aten.matmul`."""
    x, y = importer.retrieve_args(node)
    return importer.block_builder.emit(relax.op.matmul(x, y, out_dtype=str(x.ty.dtype)))


def _convert_addmm(node: Any, importer: Any) -> relax.Var:
    """Convert `aten.addmm`, a sum of a bias and a product."""
    bias, x, y = importer.retrieve_args(node)
    emit, dtype = importer.block_builder.emit, str(x.ty.dtype)
    alpha, beta = (node.kwargs.get(name, 1) for name in ("alpha", "beta"))
    product = emit(relax.op.matmul(x, y, out_dtype=dtype))
    if alpha != 1:
        product = emit(relax.op.multiply(product, relax.const(alpha, dtype)))
    if beta != 1:
        bias = emit(relax.op.multiply(bias, relax.const(beta, dtype)))
    return emit(relax.op.add(product, bias))


def _convert_instance_norm(node: Any, importer: Any) -> relax.Var:
    """Convert `aten.instance_norm`, whose epsilon TVM's importer takes from another argument."""
    x, weight, bias, mean, variance, use_input_statistics, _momentum, epsilon = importer.retrieve_args(node)[:8]
    sizes, emit = importer.shape_of(x), importer.block_builder.emit
    weight, bias = _fill_channels(x, weight, 1), _fill_channels(x, bias, 0)
    if use_input_statistics:
        axes = list(range(2, len(sizes)))
        return emit(relax.op.nn.instance_norm(x, weight, bias, channel_axis=1, axes=axes, epsilon=epsilon))
    norm = relax.op.nn.batch_norm(x, weight, bias, mean, variance, axis=1, epsilon=epsilon, training=False)
    return emit(emit(norm)[0])


def _convert_group_norm(node: Any, importer: Any) -> relax.Var:
    """Convert `aten.group_norm`, which Relax has in float32 and float16 alone."""
    x, groups, *parameters = importer.retrieve_args(node)
    weight, bias, epsilon = (*parameters, *(None, None, 1e-5)[len(parameters) :])[:3]
    return _emit_group_norm(importer, x, weight, bias, groups, epsilon)


def _convert_native_group_norm(node: Any, importer: Any) -> relax.Var:
    """Convert `aten.native_group_norm`."""
    x, weight, bias, _batch, _channels, _space, groups, epsilon = importer.retrieve_args(node)
    return _emit_group_norm(importer, x, weight, bias, groups, epsilon)


def _emit_group_norm(importer: Any, x: Any, weight: Any, bias: Any, groups: int, epsilon: float) -> relax.Var:
    emit, dtype = importer.block_builder.emit, str(x.ty.dtype)
    operands = [x, _fill_channels(x, weight, 1), _fill_channels(x, bias, 0)]
    if dtype == "bfloat16":
        operands = [emit(relax.op.astype(operand, "float32")) for operand in operands]
    axes = list(range(2, len(importer.shape_of(x))))
    result = emit(relax.op.nn.group_norm(*operands, groups, channel_axis=1, axes=axes, epsilon=epsilon))
    return emit(relax.op.astype(result, dtype)) if dtype == "bfloat16" else result


def _fill_channels(x: Any, parameter: Any, number: int) -> Any:
    """Return a parameter of a normalization, or a constant with a number for each channel where there is none."""
    if parameter is not None:
        return parameter
    return relax.const(np.full(int(x.ty.shape[1]), number), str(x.ty.dtype))


def _convert_elu(node: Any, importer: Any) -> relax.Var:
    """Convert `aten.elu`, whose scales TVM's importer ignores. `torch.export` writes a SELU as an ELU with a scale."""
    names = "alpha", "scale", "input_scale"
    numbers = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    alpha, scale, input_scale = (numbers.get(name, 1.0) for name in names)
    x, emit = importer.retrieve_args(node)[0], importer.block_builder.emit
    dtype = str(x.ty.dtype)
    zero, one = relax.const(0.0, dtype), relax.const(1.0, dtype)
    negative = emit(relax.op.minimum(x, zero))
    if input_scale != 1:
        negative = emit(relax.op.multiply(negative, relax.const(input_scale, dtype)))
    negative = emit(relax.op.subtract(emit(relax.op.exp(negative)), one))
    negative = emit(relax.op.multiply(negative, relax.const(scale * alpha, dtype)))
    positive = emit(relax.op.nn.relu(x))
    if scale != 1:
        positive = emit(relax.op.multiply(positive, relax.const(scale, dtype)))
    return emit(relax.op.add(positive, negative))


def _convert_nearest(node: Any, importer: Any) -> relax.Var:
    """Convert `aten.upsample_nearest2d`, which rounds coordinates down; TVM's importer takes the centers of pixels."""
    x, sizes, factors = (*importer.retrieve_args(node), None)[:3]
    if sizes is None:
        sizes = [int(int(size) * factor) for size, factor in zip([*x.ty.shape][2:], factors, strict=True)]
    options = {"coordinate_transformation_mode": "asymmetric", "rounding_method": "floor"}
    resized = relax.op.image.resize2d(x, tuple(sizes), layout="NCHW", method="nearest_neighbor", **options)
    return importer.block_builder.emit(resized)


CONVERTERS: dict[str, Callable[[Any, Any], relax.Var]] = {
    "convolution.default": _convert_convolution,
    "addmm.default": _convert_addmm,
    "elu.default": _convert_elu,
    "upsample_nearest2d.vec": _convert_nearest,
    "instance_norm.default": _convert_instance_norm,
    "group_norm.default": _convert_group_norm,
    "native_group_norm.default": _convert_native_group_norm,
    **dict.fromkeys(("mm.default", "bmm.default", "matmul.default"), _convert_product),
}
