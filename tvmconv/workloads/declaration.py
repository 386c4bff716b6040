"""The tensor-expression declaration of convolutions, apart from them so that parsing a workload does not import TVM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tvm import te, tirx

from tvmconv.workloads import epilogue
from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.layout import stored

if TYPE_CHECKING:
    from tvmconv.workloads.geometry import Geometry

Index = Sequence[tirx.Expr]
Sum = Callable[[te.Tensor, te.Tensor], te.Tensor]

# What axes are called in generated code, by rank: those of the output, of the input and of the reduction.
OUTPUT = {1: ("q",), 2: ("p", "q"), 3: ("z", "p", "q")}
INPUT = {1: ("j",), 2: ("i", "j"), 3: ("h", "i", "j")}
TAPS = {1: ("rw",), 2: ("rh", "rw"), 3: ("rd", "rh", "rw")}


def declare(w: Geometry, convolve: Sum | None = None) -> tuple[te.Tensor, ...]:
    """Declare the arguments; `Conv.declare` tells the stages.

    Args:
        w: the workload.
        convolve: from X and K to another way to the sums, which has the indices of `sum`.
    """
    arguments = zip(w.argument_names, w.argument_shapes, w.argument_dtypes, strict=True)
    *tensors, (_, shape, dtype) = arguments
    inputs = {name: te.placeholder(shape, dtype, name=name) for name, shape, dtype in tensors}
    total = (convolve or functools.partial(_sum, w))(inputs["X"], inputs["K"])
    filters = w.O // w.groups

    def output(*at: tirx.Var) -> tirx.Expr:
        n, o, *place = _channels_second(w, at)

        def read(name: str) -> tirx.Expr:
            tensor = inputs[name]
            return tensor(*at if len(tensor.shape) > 1 else (o,)).astype(ACCUMULATOR)

        return epilogue.compute(w.epilogue, total(n, o // filters, o % filters, *place), read).astype(dtype)

    Y = te.compute(shape, output, name="Y", varargs_names=list(stored(w.layout, ("n", "o", *OUTPUT[w.rank]))))
    return (*inputs.values(), Y)


def _channels_second(w: Geometry, at: Index) -> Index:
    """An index of Y as it lies in memory, as (n, o, place)."""
    axes = [*range(len(at))]
    order = stored(w.layout, axes)
    return [at[order.index(axis)] for axis in axes]


def padded(w: Geometry, X: te.Tensor) -> te.Tensor:
    """X by group, with its zeros, which are tested for on those sides only that have any.

    It ends with the last window: where a step leaves rows over, TVM takes tiles that reach beyond to read them all.
    """
    channels = w.C // w.groups
    space = [(n - 1) * s + seen for n, s, seen in zip(w.out, w.stride, w.window, strict=True)]
    behind = [n - before - size for n, before, size in zip(space, w.before, w.space, strict=True)]

    def read(n: tirx.Var, g: tirx.Var, c: tirx.Var, *at: tirx.Var) -> tirx.Expr:
        sides = zip(at, w.before, behind, w.space, strict=True)
        tests = [test for i, before, behind, size in sides for test in _inside(i, before, behind, size)]
        place = (i - before for i, before in zip(at, w.before, strict=True))
        value = X(*stored(w.layout, (n, g * channels + c, *place)))
        return te.if_then_else(te.all(*tests), value, tirx.const(0, w.storage)) if tests else value

    names = ["n", "g", "c", *INPUT[w.rank]]
    return te.compute((w.N, w.groups, channels, *space), lambda *at: read(*at), name="padded", varargs_names=names)


def _inside(i: tirx.Var, before: int, behind: int, size: int) -> list[tirx.Expr]:
    """What has to hold for a place along an axis of the padded input to lie in the input."""
    return [i >= before] * (before > 0) + [i < before + size] * (behind > 0)


def weight(w: Geometry, K: te.Tensor) -> te.Tensor:
    """K by group."""
    filters = w.O // w.groups
    return te.compute(
        (w.groups, filters, *w.weight_shape[1:]),
        lambda g, o, *taps: K(*stored(w.layout, (g * filters + o, *taps))),
        name="weight",
        varargs_names=["rc", *TAPS[w.rank]],
    )


def _sum(w: Geometry, X: te.Tensor, K: te.Tensor) -> te.Tensor:
    """The sum of products over input channels and taps, each of which is widened first."""
    images, filters = padded(w, X), weight(w, K)
    names = ("rc", *TAPS[w.rank])
    rc, *taps = (te.reduce_axis((0, size), name) for size, name in zip(w.weight_shape[1:], names, strict=True))

    def convolve(n: tirx.Var, g: tirx.Var, o: tirx.Var, *at: tirx.Var) -> tirx.Expr:
        place = (i * s + r * d for i, s, r, d in zip(at, w.stride, taps, w.dilation, strict=True))
        x, k = images(n, g, rc, *place), filters(g, o, rc, *taps)
        return te.sum(x.astype(ACCUMULATOR) * k.astype(ACCUMULATOR), axis=[rc, *taps])

    shape = (w.N, w.groups, w.O // w.groups, *w.out)
    axes = ["n", "g", "o", *OUTPUT[w.rank]]
    return te.compute(shape, lambda *at: convolve(*at), name="sum", varargs_names=axes)
