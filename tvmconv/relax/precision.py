"""The conversion of a Relax module to float16, such that epilogues stay next to their convolutions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, IRModule

from tvmconv.relax.graph import CONV_OPS, NORM_OP, is_foldable_norm, list_sizes, read_number
from tvmconv.relax.importers import rewrite_functions, simplify_imported

if TYPE_CHECKING:
    from numpy.typing import NDArray


def to_float16(mod: IRModule) -> IRModule:
    """Return a Relax module that computes in float16, with inputs and outputs of the same dtypes as before.

    TVM's `ToMixedPrecision` alone leaves batch normalizations in float32 between float16 convolutions, and fails on
    `clip`. Here batch normalizations become part of the weights, or factors and summands.

    Args:
        mod: Module that computes in float32, with its weights as constants. It is not modified.

    Examples:
        >>> import tvmconv.relax
        >>> mod = tvmconv.relax.optimize(tvmconv.relax.to_float16(mod), "sm_90")  # doctest: +SKIP
    """
    passes = [
        relax.transform.CanonicalizeBindings(),
        simplify_imported,
        simplify_ops,
        relax.transform.DeadCodeElimination(),
        relax.transform.ToMixedPrecision("float16"),
        simplify_imported,
    ]
    return tvm.ir.transform.Sequential(passes)(mod)


@tvm.transform.module_pass(opt_level=0, name="tvmconv.simplify_ops")
def simplify_ops(mod: IRModule, _context: Any) -> IRModule:
    """Return a module without batch normalizations in inference mode, and with maximum and minimum instead of clip.

    A normalization becomes part of the weight before it and a sum, or else a product and a sum. `ToMixedPrecision`
    converts these, but neither normalizations nor the limits of a clip.
    """
    return rewrite_functions(mod, _OpSimplifier(mod))


@relax.expr_functor.mutator
class _OpSimplifier(relax.PyExprMutator):
    def visit_call_(self, call: Call) -> relax.Expr:
        call = super().visit_call_(call)
        name = getattr(call.op, "name", "")
        if name == "relax.clip":
            return self._make_clip(call)
        if name == NORM_OP and is_foldable_norm(call):
            return self._make_product(call)
        return call

    def _make_clip(self, call: Call) -> relax.Expr:
        value, dtype = call.args[0], str(call.args[0].ty.dtype)
        for limit, op in zip(map(read_number, call.args[1:]), (relax.op.maximum, relax.op.minimum), strict=True):
            if math.isfinite(limit):
                value = self.builder_.emit(op(value, relax.const(limit, dtype)))
        return value

    def _make_product(self, call: Call) -> relax.Expr:
        x, *constants = call.args
        gamma, beta, mean, variance = (constant.value.numpy().astype(np.float64) for constant in constants)
        factor = (gamma if call.attrs.scale else 1.0) / np.sqrt(variance + float(call.attrs.epsilon))
        summand = (beta if call.attrs.center else 0.0) - mean * factor
        shape = (-1, *(1,) * (len(list_sizes(x) or ()) - 2))
        dtype = str(x.ty.dtype)
        scaled = self._scale_convolution(x, factor)
        if scaled is None:
            scaled = relax.op.multiply(x, relax.const(factor.reshape(shape).astype(dtype), dtype))
        total = relax.op.add(self.builder_.emit(scaled), relax.const(summand.reshape(shape).astype(dtype), dtype))
        return relax.Tuple([self.builder_.emit(total), *constants[2:]])

    def _scale_convolution(self, x: relax.Expr, factor: NDArray[np.float64]) -> relax.Expr | None:
        """Return the convolution that computes a value, with scaled outputs; None for another value."""
        call = self.lookup_binding(x) if isinstance(x, relax.Var) else None
        _, is_transposed = CONV_OPS.get(getattr(getattr(call, "op", None), "name", ""), (0, True))
        if call is None or is_transposed or not isinstance(call.args[1], GenericConst):
            return None
        if not str(call.attrs.kernel_layout).startswith("OI"):
            return None
        weight = call.args[1].value.numpy()
        scaled = weight * factor.reshape(-1, *(1,) * (weight.ndim - 1))
        return Call(call.op, [call.args[0], relax.const(scaled.astype(weight.dtype), str(weight.dtype))], call.attrs)
