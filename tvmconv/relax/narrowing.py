"""The removal of casts around activations of 16-bit tensors.

PyTorch's exporter writes these activations in float32, between a cast and one back. A kernel computes its epilogue in
float32 anyway.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, IRModule, Op

from tvmconv.relax.graph import BINARY_OPS, UNARY_OPS, list_sizes
from tvmconv.relax.importers import rewrite_functions
from tvmconv.workloads.dtypes import get_numpy_dtype

CAST_OP = "relax.astype"
NARROW_DTYPES = ("float16", "bfloat16")
# Operations whose results are not much larger than their operands.
NARROWED_OPS = ({*UNARY_OPS, *BINARY_OPS} - {"relax.exp"}) | {"relax.clip", "relax.nn.leakyrelu"}


@tvm.transform.module_pass(opt_level=0, name="tvmconv.narrow_activations")
def narrow_activations(mod: IRModule, _context: Any) -> IRModule:
    """Return a module whose pointwise operations in float32 between casts of 16-bit tensors are done in 16 bits."""
    return rewrite_functions(mod, _Narrower(mod))


@relax.expr_functor.mutator
class _Narrower(relax.PyExprMutator):
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self._narrowed: dict[tuple[relax.Expr, str], relax.Expr | None] = {}

    def visit_call_(self, call: Call) -> relax.Expr:
        call = super().visit_call_(call)
        if getattr(call.op, "name", "") != CAST_OP or str(call.attrs.dtype) not in NARROW_DTYPES:
            return call
        narrowed = self._narrow(call.args[0], str(call.attrs.dtype))
        return call if narrowed is None else narrowed

    def _narrow(self, expr: relax.Expr, dtype: str) -> relax.Expr | None:
        """Return a value in 16 bits; None if it does not come from tensors of this dtype and numbers alone."""
        if (expr, dtype) not in self._narrowed:
            self._narrowed[expr, dtype] = self._compute(expr, dtype)
        return self._narrowed[expr, dtype]

    def _compute(self, expr: relax.Expr, dtype: str) -> relax.Expr | None:
        if isinstance(expr, GenericConst):
            is_number = list_sizes(expr) == ()
            return relax.const(expr.value.numpy().astype(get_numpy_dtype(dtype)), dtype) if is_number else None
        value: Any = self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        if not isinstance(value, Call) or not isinstance(value.op, Op):
            return None
        if value.op.name == CAST_OP:
            return value.args[0] if str(value.args[0].ty.dtype) == dtype else None
        if value.op.name not in NARROWED_OPS:
            return None
        operands = {arg: self._narrow(arg, dtype) for arg in value.args if isinstance(arg.ty, relax.TensorType)}
        if any(operand is None for operand in operands.values()):
            return None
        return self.builder_.emit(Call(value.op, [operands.get(arg, arg) for arg in value.args], value.attrs))
