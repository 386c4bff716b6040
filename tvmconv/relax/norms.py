"""The decomposition of batch normalizations in inference into products and sums, and float32 for others in bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, IRModule

from tvmconv.relax.graph import CONV_OPS, NORM_OP, is_foldable_norm, list_sizes
from tvmconv.relax.importers import rewrite_functions

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Normalizations that TVM does not compile in bfloat16.
FLOAT_NORM_OPS = {f"relax.nn.{name}_norm" for name in ("instance", "group", "layer")}


@tvm.transform.module_pass(opt_level=0, name="tvmconv.simplify_norms")
def simplify_norms(mod: IRModule, _context: Any) -> IRModule:
    """Return a module with a product and a sum instead of each batch normalization that follows no convolution. These
    are part of epilogues, and can be done channels last.
    """
    return rewrite_functions(mod, _NormSimplifier(mod))


@tvm.transform.module_pass(opt_level=0, name="tvmconv.widen_norms")
def widen_norms(mod: IRModule, _context: Any) -> IRModule:
    """Return a module whose normalizations of bfloat16 are done in float32, because TVM does not compile others."""
    return rewrite_functions(mod, _NormWidener(mod))


def compute_linear_norm(call: Call) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the factors and summands of the channels that a batch normalization in inference mode stands for."""
    gamma, beta, mean, variance = (constant.value.numpy().astype(np.float64) for constant in call.args[1:])
    factor = (gamma if call.attrs.scale else 1.0) / np.sqrt(variance + float(call.attrs.epsilon))
    return factor, (beta if call.attrs.center else 0.0) - mean * factor


def make_channel_constant(numbers: NDArray[Any], x: relax.Expr) -> relax.Expr:
    """Return a constant with one number per channel, which a channels-first tensor can be multiplied with."""
    dtype = str(x.ty.dtype)
    return relax.const(numbers.reshape(1, -1, *(1,) * (int(x.ty.ndim) - 2)).astype(dtype), dtype)


@relax.expr_functor.mutator
class _NormSimplifier(relax.PyExprMutator):
    def visit_call_(self, call: Call) -> relax.Expr:
        call = super().visit_call_(call)
        if getattr(call.op, "name", "") != NORM_OP or not is_foldable_norm(call) or list_sizes(call.args[0]) is None:
            return call
        x = call.args[0]
        value: Any = self.lookup_binding(x) if isinstance(x, relax.Var) else None
        if getattr(getattr(value, "op", None), "name", "") in CONV_OPS:
            return call
        factor, summand = compute_linear_norm(call)
        product = self.builder_.emit(relax.op.multiply(x, make_channel_constant(factor, x)))
        total = self.builder_.emit(relax.op.add(product, make_channel_constant(summand, x)))
        return relax.Tuple([total, *call.args[3:]])


@relax.expr_functor.mutator
class _NormWidener(relax.PyExprMutator):
    def visit_call_(self, call: Call) -> relax.Expr:
        call = super().visit_call_(call)
        if getattr(call.op, "name", "") not in FLOAT_NORM_OPS or str(call.ty.dtype) != "bfloat16":
            return call
        operands = [self.builder_.emit(relax.op.astype(arg, "float32")) for arg in call.args]
        return relax.op.astype(self.builder_.emit(Call(call.op, operands, call.attrs)), "bfloat16")
