"""Conversions between types of TIR, as Python functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmconv.analysis.emulation.compiled import Code
from tvmconv.analysis.emulation.machine import Mask
from tvmconv.analysis.emulation.translation.arithmetic import Value, as_uint64, integers
from tvmconv.workloads.dtypes import numpy_dtype


def converted(value: Code, to: Any, source: Any) -> Code:
    """A value of one type of TIR as one of another, as C converts it."""
    text = str(to).partition("x")[0]
    if to.is_float:
        kind = numpy_dtype(text)
        return lambda mask: np.asarray(value(mask)).astype(kind)[()]
    if to.is_bool:
        return lambda mask: value(mask) != 0
    bits = min(int(to.bits), 63)

    def cast(mask: Mask) -> Value:
        found = value(mask)
        if text == "uint64" and not source.is_float:
            return as_uint64(found)
        if source.is_float:
            found = np.trunc(np.asarray(found, np.float64)).astype(np.int64)[()]
        elif isinstance(found, np.ndarray):
            found = found.astype(np.int64, copy=False)
        else:
            found = int(found)
        if text.startswith("uint"):
            return found & ((1 << bits) - 1)
        if bits < 63 and not (source.is_integer and source.bits < to.bits):
            half = 1 << (bits - 1)
            return ((found + half) & ((1 << bits) - 1)) - half
        return found

    return cast


def reinterpreted(value: Code, to: str, source: str) -> Code:
    """The bits of a value of one type as one of another; vectors element by element."""
    kind, before = numpy_dtype(to.partition("x")[0]), numpy_dtype(source.partition("x")[0])

    def reinterpret(mask: Mask) -> Value:
        found = np.asarray(value(mask))
        shape = found.shape
        found = np.ascontiguousarray(found.astype(before)).reshape(-1).view(kind).reshape(shape)
        return found.astype(integers(kind))[()] if kind.kind in "iu" else found[()]

    return reinterpret
