"""Linear layers as 1×1 convolutions, which have kernels for few rows; TVM's rules give these to few threads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, IRModule

from tvmconv.relax.graph import list_sizes
from tvmconv.relax.layout_ops import POINTWISE_OPS

RESHAPE_OP = "relax.reshape"


@tvm.transform.module_pass(opt_level=0, name="tvmconv.convert_linear_layers")
def convert_linear_layers(mod: IRModule, _context: Any) -> IRModule:
    """Return a module with 1×1 convolutions instead of products of a tensor and a constant matrix.

    The rows of a tensor become images of one pixel. Pointwise operations that follow, such as the sum with a bias,
    apply to these images.
    """
    rewriter = _LinearRewriter(mod)
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
    return rewriter.builder_.get()


@relax.expr_functor.mutator
class _LinearRewriter(relax.PyExprMutator):
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self._images: set[relax.Expr] = set()  # results of convolutions, and of operations on them

    def visit_call_(self, call: Call) -> relax.Expr:
        call = super().visit_call_(call)
        name = getattr(call.op, "name", "")
        if name == "relax.matmul" and _is_linear(call):
            return self._make_convolution(*call.args)
        return self._move_before_reshape(call) if name in POINTWISE_OPS else call

    def _make_convolution(self, x: relax.Expr, weight: GenericConst) -> relax.Expr:
        *leading, channels = list_sizes(x) or ()
        filters = np.ascontiguousarray(weight.value.numpy().T)[:, :, None, None]
        dtype = str(x.ty.dtype)
        image = self.builder_.emit(relax.op.reshape(self._skip_reshapes(x), (math.prod(leading), channels, 1, 1)))
        result = relax.op.nn.conv2d(image, relax.const(filters, dtype), out_dtype=dtype)
        return self._reshape_image(result, (*leading, filters.shape[0]))

    def _reshape_image(self, image: relax.Expr, sizes: tuple[int, ...]) -> relax.Expr:
        variable = self.builder_.emit(image)
        self._images.add(variable)
        return relax.op.reshape(variable, sizes)

    def _move_before_reshape(self, call: Call) -> relax.Expr:
        """Return a pointwise operation on reshaped images of one pixel as a reshaped operation on the images, so that
        the epilogue of a convolution contains it; the same call if an operand is something else.
        """
        sizes = list_sizes(call)
        if sizes is None or len(sizes) < 2:
            return call
        operands = {arg: self._find_image(arg, sizes) for arg in call.args if isinstance(arg.ty, relax.TensorType)}
        images = [image for image in operands.values() if image is not None]
        if len(images) < len(operands) or not self._images.intersection(images):
            return call
        moved = Call(call.op, [operands.get(arg, arg) for arg in call.args], call.attrs, call.ty_args)
        return self._reshape_image(moved, sizes)

    def _find_image(self, expr: relax.Expr, sizes: tuple[int, ...]) -> relax.Expr | None:
        """Return the image that was reshaped to a tensor, a constant as it is added to images, or another tensor as
        images; None for a tensor with other sizes.
        """
        if isinstance(expr, GenericConst):
            elements, dtype = expr.value.numpy(), str(expr.ty.dtype)
            if elements.ndim == 0:
                return expr
            is_vector = elements.size == elements.shape[-1] == sizes[-1]
            return relax.const(elements.reshape(1, -1, 1, 1), dtype) if is_vector else None
        if list_sizes(expr) != sizes:
            return None
        image_sizes = (math.prod(sizes[:-1]), sizes[-1], 1, 1)
        source = self._skip_reshapes(expr)
        if list_sizes(source) == image_sizes:
            return source
        return self.builder_.emit(relax.op.reshape(source, image_sizes))

    def _skip_reshapes(self, expr: relax.Expr) -> relax.Expr:
        """Return the tensor that was reshaped, once or several times, to the given one."""
        while isinstance(expr, relax.Var):
            value: Any = self.lookup_binding(expr)
            if getattr(getattr(value, "op", None), "name", "") != RESHAPE_OP:
                break
            expr = value.args[0]
        return expr


def _is_linear(call: Call) -> bool:
    """Return whether a product is that of a tensor and a constant matrix of the same dtype as the result."""
    x, weight = call.args
    sizes, weight_sizes = list_sizes(x), list_sizes(weight)
    if sizes is None or weight_sizes is None or len(sizes) < 2 or len(weight_sizes) != 2:
        return False
    return isinstance(weight, GenericConst) and str(x.ty.dtype) == str(call.ty.dtype)
