"""TVM's importers for more models: PyTorch's in 16 bits and with three-dimensional transposed convolutions, and ONNX's
with shapes and paddings that are computed from constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm import relax
from tvm.ir import IRModule

from tvmconv.relax.graph import SPATIAL_AXES

if TYPE_CHECKING:
    import onnx
    import torch


def from_exported_program(program: torch.export.ExportedProgram, **options: Any) -> IRModule:
    """Import a model of `torch.export` into Relax.

    TVM's importer computes convolutions and matrix products in float32, and fails where a sum with a bias in float16 or
    bfloat16 follows, or at a transposed convolution in three dimensions. Here results have the dtype of the operands,
    as in PyTorch, and the importer does everything else.

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
    them.

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


CONVERTERS: dict[str, Callable[[Any, Any], relax.Var]] = {
    "convolution.default": _convert_convolution,
    "addmm.default": _convert_addmm,
    **dict.fromkeys(("mm.default", "bmm.default", "matmul.default"), _convert_product),
}
