"""Translation of type conversions of TIR to Python functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmconv.emulator.lane_code import ExpressionCode
from tvmconv.emulator.state import Mask
from tvmconv.emulator.translation.arithmetic import Value, as_uint64, select_integer_type
from tvmconv.workloads.dtypes import get_numpy_dtype


def translate_cast(value_code: ExpressionCode, target_type: Any, source_type: Any) -> ExpressionCode:
    """Return a function that converts a value between TIR types as C does."""
    type_name = str(target_type).partition("x")[0]
    if target_type.is_float:
        numpy_type = get_numpy_dtype(type_name)
        return lambda mask: np.asarray(value_code(mask)).astype(numpy_type)[()]
    if target_type.is_bool:
        return lambda mask: value_code(mask) != 0
    bits = min(int(target_type.bits), 63)

    def cast(mask: Mask) -> Value:
        result = value_code(mask)
        if type_name == "uint64" and not source_type.is_float:
            return as_uint64(result)
        if source_type.is_float:
            result = np.trunc(np.asarray(result, np.float64)).astype(np.int64)[()]
        elif isinstance(result, np.ndarray):
            result = result.astype(np.int64, copy=False)
        else:
            result = int(result)
        if type_name.startswith("uint"):
            return result & ((1 << bits) - 1)
        if bits < 63 and not (source_type.is_integer and source_type.bits < target_type.bits):
            half = 1 << (bits - 1)
            return ((result + half) & ((1 << bits) - 1)) - half
        return result

    return cast


def translate_reinterpret(value_code: ExpressionCode, target_type: str, source_type: str) -> ExpressionCode:
    """Return a function that reinterprets the bits of a value as another type, element by element."""
    target_dtype, source_dtype = (get_numpy_dtype(name.partition("x")[0]) for name in (target_type, source_type))

    def reinterpret(mask: Mask) -> Value:
        result = np.asarray(value_code(mask))
        shape = result.shape
        result = np.ascontiguousarray(result.astype(source_dtype)).reshape(-1).view(target_dtype).reshape(shape)
        return result.astype(select_integer_type(target_dtype))[()] if target_dtype.kind in "iu" else result[()]

    return reinterpret
