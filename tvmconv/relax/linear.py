"""Linear layers as 1×1 convolutions, which have kernels for few rows; TVM's rules give these to few threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, IRModule

from tvmconv.relax.graph import list_sizes

CONV_OP, RESHAPE_OP = "relax.nn.conv2d", "relax.reshape"


@tvm.transform.module_pass(opt_level=0, name="tvmconv.convert_linear_layers")
def convert_linear_layers(mod: IRModule, _context: Any) -> IRModule:
    """Return a module with 1×1 convolutions instead of products of a matrix and a constant matrix.

    A constant vector that is added becomes the bias of the convolution.
    """
    rewriter = _LinearRewriter(mod)
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
    return rewriter.builder_.get()


@relax.expr_functor.mutator
class _LinearRewriter(relax.PyExprMutator):
    def visit_call_(self, call: Call) -> relax.Expr:
        call = super().visit_call_(call)
        match getattr(call.op, "name", ""):
            case "relax.matmul" if _is_linear(call):
                return self._make_convolution(*call.args)
            case "relax.add":
                results = [self._add_bias(call, *args) for args in (call.args, reversed(call.args))]
                return next((result for result in results if result is not None), call)
        return call

    def _make_convolution(self, x: relax.Expr, weight: GenericConst) -> relax.Expr:
        rows, channels = list_sizes(x) or ()
        filters = np.ascontiguousarray(weight.value.numpy().T)[:, :, None, None]
        dtype = str(x.ty.dtype)
        image = self.builder_.emit(relax.op.reshape(x, (rows, channels, 1, 1)))
        result = relax.op.nn.conv2d(image, relax.const(filters, dtype), out_dtype=dtype)
        return relax.op.reshape(self.builder_.emit(result), (rows, filters.shape[0]))

    def _add_bias(self, call: Call, vector: relax.Expr, product: relax.Expr) -> relax.Expr | None:
        """Return the sum of a vector and a reshaped convolution as a reshaped sum; None for other operands."""
        reshape, sizes = self._find_call(product, RESHAPE_OP), list_sizes(call)
        if not isinstance(vector, GenericConst) or reshape is None or sizes is None:
            return None
        convolution, elements = reshape.args[0], vector.value.numpy()
        is_reshaped = list_sizes(convolution) == (*sizes, 1, 1) and elements.size == sizes[-1]
        if self._find_call(convolution, CONV_OP) is None or not is_reshaped:
            return None
        bias = relax.const(elements.reshape(1, -1, 1, 1), str(vector.ty.dtype))
        return relax.op.reshape(self.builder_.emit(relax.op.add(convolution, bias)), sizes)

    def _find_call(self, expr: relax.Expr, name: str) -> Call | None:
        """Return the call of an operation that a variable is bound to."""
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        return value if getattr(getattr(value, "op", None), "name", "") == name else None


def _is_linear(call: Call) -> bool:
    """Return whether a product is that of a matrix and a constant matrix of the same dtype as the result."""
    x, weight = call.args
    sizes = list_sizes(x), list_sizes(weight)
    is_matrix = all(each is not None and len(each) == 2 for each in sizes)
    return is_matrix and isinstance(weight, GenericConst) and str(x.ty.dtype) == str(call.ty.dtype)
