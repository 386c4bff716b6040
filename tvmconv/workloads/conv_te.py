"""Tensor-expression declarations of convolutions, kept apart so that parsing a workload does not import TVM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tvm import te, tirx

from tvmconv.workloads import epilogue, quantization
from tvmconv.workloads.dtypes import ACCUMULATOR, DTYPES, get_tir_dtype
from tvmconv.workloads.layout import to_storage_order

if TYPE_CHECKING:
    from tvmconv.workloads.conv_geometry import ConvGeometry

IndexExprs = Sequence[tirx.Expr]
SumDeclaration = Callable[[te.Tensor, te.Tensor], te.Tensor]

# Names of the axes in generated code, by number of spatial axes.
OUTPUT_AXES = {1: ("q",), 2: ("p", "q"), 3: ("z", "p", "q")}
INPUT_AXES = {1: ("j",), 2: ("i", "j"), 3: ("h", "i", "j")}
TAP_AXES = {1: ("rw",), 2: ("rh", "rw"), 3: ("rd", "rh", "rw")}


def declare(w: ConvGeometry, convolve: SumDeclaration | None = None) -> tuple[te.Tensor, ...]:
    """Declare one tensor for each of `argument_names`; `Conv.declare` describes the stages. `convolve` is a function
    from X and K to another declaration of the sums, with the indices of `sum`.
    """
    arguments = zip(w.argument_names, w.argument_shapes, w.argument_dtypes, strict=True)
    *tensors, (_, shape, dtype) = arguments
    inputs = {
        name: te.placeholder(to_extents(w, shape), get_tir_dtype(dtype), name=name) for name, shape, dtype in tensors
    }
    cache = inputs.get(w.CACHE)
    total = convolve(inputs["X"], inputs["K"]) if convolve else _declare_sum(w, inputs["X"], inputs["K"], cache)
    filters, argument_dtypes = w.O // w.groups, dict(zip(w.argument_names, w.argument_dtypes, strict=True))

    def compute_output(*indices: tirx.Var) -> tirx.Expr:
        n, o, *position = _move_channels_second(w, indices)

        def read_argument(name: str) -> tirx.Expr:
            tensor = inputs[name]
            channel = 0 if tuple(tensor.shape) == (1,) else o
            element = tensor(*indices if len(tensor.shape) > 1 else (channel,))
            return quantization.widen_expression(element, argument_dtypes[name])

        value = total(n, o // filters, o % filters, *position)
        if dtype == total.dtype:  # float32, or int32 without an epilogue
            return epilogue.apply_to_expression(w.epilogue, value, read_argument)
        value = epilogue.apply_to_expression(w.epilogue, value.astype(ACCUMULATOR), read_argument)
        return quantization.convert_expression(value, dtype)

    Y = te.compute(
        to_extents(w, shape),
        compute_output,
        name="Y",
        varargs_names=list(to_storage_order(w.output_layout, ("n", "o", *OUTPUT_AXES[w.spatial_ndim]))),
    )
    return (*inputs.values(), Y)


def to_extents(w: ConvGeometry, shape: Sequence[int]) -> Sequence[int | tirx.IntImm]:
    """Return a shape for TVM, whose indices have the dtype of the extents: int64 if there are large tensors."""
    return [tirx.IntImm("int64", size) for size in shape] if w.has_large_tensors else shape


def _move_channels_second(w: ConvGeometry, indices: IndexExprs) -> IndexExprs:
    """Return an index of Y in memory order as (n, o, position)."""
    axes = [*range(len(indices))]
    order = to_storage_order(w.output_layout, axes)
    return [indices[order.index(axis)] for axis in axes]


def declare_padded(w: ConvGeometry, X: te.Tensor, cache: te.Tensor | None = None) -> te.Tensor:
    """Declare the input by group with its zeros; only sides that have padding are tested. The tensor ends with the last
    window. If a stride skips the rows behind it, TVM's tiles would otherwise read them too. The input is X, after the
    frames of `cache` if there are, upsampled.
    """
    channels = w.C // w.groups
    padded_size = [(n - 1) * s + window for n, s, window in zip(w.output_size, w.stride, w.window, strict=True)]
    pad_high = [n - pad_low - size for n, pad_low, size in zip(padded_size, w.pad_low, w.input_size, strict=True)]

    def read_stored(first_indices: IndexExprs, frame: tirx.Expr, *others: tirx.Expr) -> tirx.Expr:
        if cache is None:
            return X(*to_storage_order(w.input_layout, (*first_indices, frame, *others)))
        cached = cache(*to_storage_order(w.input_layout, (*first_indices, frame, *others)))
        new = X(*to_storage_order(w.input_layout, (*first_indices, frame - w.cached_frames, *others)))
        return te.if_then_else(frame < w.cached_frames, cached, new)

    def read_input(n: tirx.Var, g: tirx.Var, c: tirx.Var, *position: tirx.Var) -> tirx.Expr:
        sides = zip(position, w.pad_low, pad_high, w.input_size, strict=True)
        tests = [test for i, low, high, size in sides for test in _make_bounds_tests(i, low, high, size)]
        unpadded_position = [i - low for i, low in zip(position, w.pad_low, strict=True)]
        stored_position = [
            i // factor if factor > 1 else i for i, factor in zip(unpadded_position, w.upsampling, strict=True)
        ]
        value = read_stored((n, g * channels + c), *stored_position)
        return te.if_then_else(te.all(*tests), value, tirx.const(0, get_tir_dtype(w.storage))) if tests else value

    return te.compute(
        to_extents(w, (w.N, w.groups, channels, *padded_size)),
        lambda *indices: read_input(*indices),
        name="padded",
        varargs_names=["n", "g", "c", *INPUT_AXES[w.spatial_ndim]],
    )


def _make_bounds_tests(i: tirx.Var, pad_low: int, pad_high: int, size: int) -> list[tirx.Expr]:
    """Return the conditions under which a position along an axis of the padded input lies in the input."""
    return [i >= pad_low] * (pad_low > 0) + [i < pad_low + size] * (pad_high > 0)


def declare_weight(w: ConvGeometry, K: te.Tensor) -> te.Tensor:
    """Declare K by group."""
    filters = w.O // w.groups
    return te.compute(
        to_extents(w, (w.groups, filters, *w.weight_shape[1:])),
        lambda g, o, *taps: K(*to_storage_order(w.input_layout, (g * filters + o, *taps))),
        name="weight",
        varargs_names=["rc", *TAP_AXES[w.spatial_ndim]],
    )


def _declare_sum(w: ConvGeometry, X: te.Tensor, K: te.Tensor, cache: te.Tensor | None) -> te.Tensor:
    return declare_products(w, declare_padded(w, X, cache), declare_weight(w, K))


def declare_products(w: ConvGeometry, images: te.Tensor, filters: te.Tensor) -> te.Tensor:
    """Declare `sum` from `padded` and `weight`: products over input channels and taps; both are widened first."""
    accumulator = DTYPES[w.dtype].accumulator
    names = ("rc", *TAP_AXES[w.spatial_ndim])
    extents = to_extents(w, w.weight_shape[1:])
    rc, *taps = (te.reduce_axis((0, size), name) for size, name in zip(extents, names, strict=True))

    def convolve(n: tirx.Var, g: tirx.Var, o: tirx.Var, *position: tirx.Var) -> tirx.Expr:
        input_position = (i * s + r * d for i, s, r, d in zip(position, w.stride, taps, w.dilation, strict=True))
        x, k = images(n, g, rc, *input_position), filters(g, o, rc, *taps)
        if accumulator == ACCUMULATOR:
            pairs = zip((x, k), w.operand_dtypes, strict=True)
            x, k = (quantization.widen_operand(operand, dtype) for operand, dtype in pairs)
        return te.sum(x.astype(accumulator) * k.astype(accumulator), axis=[rc, *taps])

    shape = (w.N, w.groups, w.O // w.groups, *w.output_size)
    axes = ["n", "g", "o", *OUTPUT_AXES[w.spatial_ndim]]
    return te.compute(to_extents(w, shape), lambda *indices: convolve(*indices), name="sum", varargs_names=axes)
