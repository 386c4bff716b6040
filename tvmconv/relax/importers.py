"""The simplification of imported modules: patterns of TVM's importers become operations that epilogues consist of.

The importer of ONNX computes limits and biases from constants, and makes a function of TIR for each limit of a Clip.
Models of TensorFlow pad with zeros before convolutions. Circular paddings of PyTorch replace slices of a tensor.
TVM's `FoldConstant` would compile a program for every such constant; NumPy computes the common ones at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import NDArray
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, IRModule
from tvm.ir.expr import TensorLoad

from tvmconv.relax.graph import CONV_OPS, list_sizes, read_number
from tvmconv.workloads.dtypes import get_numpy_dtype

PAD_OP, SCATTER_OP, CLIP_OP = "relax.nn.pad", "relax.slice_scatter", "relax.clip"
MAKERS: dict[type, Callable[..., relax.Expr]] = {tirx.Max: relax.op.maximum, tirx.Min: relax.op.minimum}


@tvm.transform.module_pass(opt_level=0, name="tvmconv.simplify_imported")
def simplify_imported(mod: IRModule, _context: Any) -> IRModule:
    """Return a module with computed constants, with operations instead of functions of TIR for limits, and with zeros
    around the input of a convolution as its padding.
    """
    return rewrite_functions(mod, _Simplifier(mod))


def rewrite_functions(mod: IRModule, rewriter: relax.PyExprMutator) -> IRModule:
    """Return a module whose functions a mutator has rewritten."""
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
    return relax.transform.CanonicalizeBindings()(rewriter.builder_.get())


@relax.expr_functor.mutator
class _Simplifier(relax.PyExprMutator):
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self._mod = mod

    def visit_call_(self, call: Call) -> relax.Expr:
        call = super().visit_call_(call)
        name = str(getattr(call.op, "name", ""))
        if name == "relax.call_tir":
            limit = self._make_limit(call)
            return call if limit is None else limit
        if name in CONV_OPS:
            return self._add_padding(call)
        if name == SCATTER_OP:
            return self._join_slices(call)
        if name == CLIP_OP:
            return self._make_one_limit(call)
        compute = NUMPY_OPS.get(name)
        if compute is None or list_sizes(call) is None:
            return call
        constants = [self._find_constant(arg) for arg in call.args if isinstance(arg.ty, relax.TensorType)]
        if any(constant is None for constant in constants):
            return call
        dtype = str(call.ty.dtype)
        result = compute(call, *constants)
        return relax.const(np.array(result, get_numpy_dtype(dtype), order="C"), dtype)

    def _find_constant(self, expr: relax.Expr) -> NDArray[Any] | None:
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
        return value.value.numpy() if isinstance(value, GenericConst) else None

    def _add_padding(self, call: Call) -> relax.Expr:
        """Return a convolution that pads its input itself, if the input is a tensor with zeros around its pixels."""
        ndim, is_transposed = CONV_OPS[call.op.name]
        x, attrs = call.args[0], call.attrs
        pad: Any = self.lookup_binding(x) if isinstance(x, relax.Var) else None
        if is_transposed or not str(attrs.data_layout).startswith("NC"):
            return call
        if getattr(getattr(pad, "op", None), "name", "") != PAD_OP or str(pad.attrs.pad_mode) != "constant":
            return call
        numbers = [int(number) for number in pad.attrs.pad_width]
        if float(pad.attrs.pad_value) != 0 or any(numbers[:4]) or min(numbers) < 0:
            return call
        padding = [int(own) + other for own, other in zip(attrs.padding, numbers[4::2] + numbers[5::2], strict=True)]
        return getattr(relax.op.nn, f"conv{ndim}d")(
            *(pad.args[0], call.args[1]),
            *(attrs.strides, padding, attrs.dilation, int(attrs.groups)),
            *map(str, (attrs.data_layout, attrs.kernel_layout, attrs.out_layout, call.ty.dtype)),
        )

    def _join_slices(self, call: Call) -> relax.Expr:
        """Return a tensor in which consecutive elements of an axis are replaced as a concatenation, which can have any
        layout and dtype. PyTorch pads circularly by such replacements.
        """
        x, source, *numbers = call.args
        sizes, axis = list_sizes(x), int(call.attrs.axis)
        if sizes is None or not all(isinstance(number, tirx.IntImm) for number in numbers):
            return call
        start, stop, step = slice(*map(int, numbers)).indices(sizes[axis])
        if step != 1 or list_sizes(source) != (*sizes[:axis], stop - start, *sizes[axis + 1 :]):
            return call
        parts = [
            relax.op.strided_slice(x, [axis], [first], [last])
            for first, last in ((0, start), (stop, sizes[axis]))
            if first < last
        ]
        tensors = [self.builder_.emit(part) for part in parts]
        tensors.insert(int(start > 0), source)
        return relax.op.concat(tensors, axis) if parts else source

    def _make_one_limit(self, call: Call) -> relax.Expr:
        """Return a clip with one finite limit as a maximum or minimum. TVM generates no valid CUDA code for infinity in
        bfloat16.
        """
        x, *limits = call.args
        if not all(isinstance(limit, (tirx.IntImm, tirx.FloatImm)) for limit in limits):
            return call
        low, high = map(read_number, limits)
        if math.isfinite(low) == math.isfinite(high):
            return call
        make, limit = (relax.op.maximum, low) if math.isfinite(low) else (relax.op.minimum, high)
        return make(x, relax.const(limit, str(x.ty.dtype)))

    def _make_limit(self, call: Call) -> relax.Expr | None:
        """Return the maximum or minimum of a tensor and a number that a function of TIR computes; None for another."""
        stored = _find_stored_value(self._mod.functions.get(call.args[0]))
        tensors, make = list(call.args[1]), MAKERS.get(type(stored))
        if stored is None or make is None or len(call.args) > 2:
            return None
        if len(tensors) == 1 and isinstance(stored.b, tirx.FloatImm):
            return make(tensors[0], relax.const(float(stored.b.value), str(tensors[0].ty.dtype)))
        is_number = len(tensors) == 2 and list_sizes(tensors[1]) == ()
        return make(*tensors) if is_number and isinstance(stored.b, TensorLoad) else None


def _find_stored_value(function: Any) -> Any:
    """Return the maximum or minimum that a function of TIR stores, if its first operand is the first parameter's
    element with the same indices; None for another function.
    """
    if not isinstance(function, tirx.PrimFunc):
        return None
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(function.body, (tirx.BufferStore, stores.append))
    value: Any = stores[0].value if len(stores) == 1 else None
    if type(value) not in MAKERS:
        return None
    is_load = isinstance(value.a, TensorLoad) and value.a.source.same_as(function.params[0])
    return value if is_load and tvm_ffi.structural_equal(value.a.indices, stores[0].indices) else None


def _reshape(call: Call, x: NDArray[Any]) -> NDArray[Any]:
    return x.reshape(list_sizes(call) or ())


def _permute(call: Call, x: NDArray[Any]) -> NDArray[Any]:
    axes = call.attrs.axes
    return x.transpose(None if axes is None else [int(axis) for axis in axes])


NUMPY_OPS: dict[str, Callable[..., NDArray[Any]]] = {
    "relax.astype": lambda _, x: x,
    "relax.reshape": _reshape,
    "relax.expand_dims": _reshape,
    "relax.squeeze": _reshape,
    "relax.permute_dims": _permute,
    "relax.isnan": lambda _, x: np.isnan(x),
    "relax.where": lambda _, condition, x, y: np.asarray(np.where(condition, x, y)),
}
