"""Operators of one or two spatial axes as operators of three, with axes of size 1 before their own.

The kernels of `stem` are written for planes, rows and columns. A signal is one row, and an image is one plane. The
arrays of an operator and of its view have the same order of elements in memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar, cast

from tvmconv.workloads import operators
from tvmconv.workloads.conv_gradient import DerivedConv
from tvmconv.workloads.conv_operator import ConvOperator

from ...gradient_conversion import view_channels_last

Operator = TypeVar("Operator", bound=ConvOperator)
Gradient = TypeVar("Gradient", bound=DerivedConv)
NUM_AXES = 3


@functools.lru_cache(maxsize=256)
def view_as_volume(w: Operator) -> Operator:
    """Return the same operator with three spatial axes: depth, height and width."""
    missing = NUM_AXES - w.spatial_ndim
    if not missing:
        return w
    view = operators()[w.operator.replace(f"{w.spatial_ndim}d", f"{NUM_AXES}d", 1)]
    assert issubclass(view, ConvOperator)

    def prepend(sizes: tuple[int, ...], unit: int) -> tuple[int, ...]:
        return (*[unit] * missing, *sizes)

    fields: dict[str, Any] = {field.name: getattr(w, field.name) for field in dataclasses.fields(cast("Any", w))}
    fields |= zip(view.SPACE, prepend(w.x_size, 1), strict=True)
    fields |= zip(view.KERNEL, prepend(w.kernel, 1), strict=True)
    fields |= {"stride": prepend(w.stride, 1), "dilation": prepend(w.dilation, 1)}
    fields["padding"] = (*prepend(w.pad_low, 0), *prepend(w.pad_high, 0))
    for name, unit in (("output_padding", 0), ("upsample", 1)):
        if name in fields:
            fields[name] = prepend(fields[name], unit)
    return view(**fields)  # type: ignore[return-value]


def view_gradient(w: Gradient) -> Gradient:
    """Return the same gradient with three spatial axes, channels last."""
    return view_as_volume(view_channels_last(w))
