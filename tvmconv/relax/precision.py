"""The conversion of a Relax module to float16, such that epilogues stay next to their convolutions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, IRModule

from tvmconv.relax.graph import CONV_OPS, NORM_OP, count_readers, is_foldable_norm, read_number
from tvmconv.relax.importers import rewrite_functions, simplify_imported
from tvmconv.relax.norms import compute_linear_norm, make_channel_constant

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
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self._num_readers = count_readers(mod)

    def visit_call_(self, call: Call) -> relax.Expr:
        has_readers = bool(call.args) and self._num_readers[call.args[0]] > 1
        call = super().visit_call_(call)
        name = getattr(call.op, "name", "")
        if name == "relax.clip":
            return self._make_clip(call)
        if name == NORM_OP and is_foldable_norm(call):
            return self._make_product(call, has_readers=has_readers)
        return call

    def _make_clip(self, call: Call) -> relax.Expr:
        value, dtype = call.args[0], str(call.args[0].ty.dtype)
        for limit, op in zip(map(read_number, call.args[1:]), (relax.op.maximum, relax.op.minimum), strict=True):
            if math.isfinite(limit):
                value = self.builder_.emit(op(value, relax.const(limit, dtype)))
        return value

    def _make_product(self, call: Call, *, has_readers: bool) -> relax.Expr:
        """Return a normalization as a sum, after a scaled convolution if nothing else reads the convolution."""
        x = call.args[0]
        factor, summand = compute_linear_norm(call)
        scaled = None if has_readers else self._scale_convolution(x, factor)
        if scaled is None:
            scaled = relax.op.multiply(x, make_channel_constant(factor, x))
        total = relax.op.add(self.builder_.emit(scaled), make_channel_constant(summand, x))
        return relax.Tuple([self.builder_.emit(total), *call.args[3:]])

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
