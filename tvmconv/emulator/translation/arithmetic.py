"""Operators, functions and conversions of TIR in NumPy, for numbers and for arrays with one element per lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tvmconv.workloads.dtypes import get_numpy_dtype

Value = Any  # a number, an array of shape (lanes,) or (lanes, vector elements), or a Pointer


def is_uniform(value: Value) -> bool:
    """Return whether all lanes have the same value."""
    return not isinstance(value, np.ndarray) or value.ndim == 0


def as_uint64(value: Value) -> Value:
    """Convert integers to 64-bit unsigned ones, whose range int64 does not cover."""
    return value.astype(np.uint64) if isinstance(value, np.ndarray | np.generic) else int(value) & 0xFFFF_FFFF_FFFF_FFFF


def select_integer_type(dtype: np.dtype[Any]) -> type[np.int64] | type[np.uint64]:
    """Return the type in which integers of `dtype` are computed."""
    return np.uint64 if dtype == np.uint64 else np.int64


def trunc_div(a: Value, b: Value) -> Value:
    """Divide integers as in C, rounding toward zero."""
    if isinstance(a, int) and isinstance(b, int):
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient
    quotient = np.floor_divide(a, b)
    return quotient + ((quotient * b != a) & (np.less(a, 0) != np.less(b, 0)))


def trunc_mod(a: Value, b: Value) -> Value:
    """Return the remainder of an integer division as in C."""
    return a - b * trunc_div(a, b)


ARITHMETIC: dict[str, tuple[Callable[[Value, Value], Value], Callable[[Value, Value], Value]]] = {
    "Add": (lambda a, b: a + b, lambda a, b: a + b),
    "Sub": (lambda a, b: a - b, lambda a, b: a - b),
    "Mul": (lambda a, b: a * b, lambda a, b: a * b),
    "Div": (lambda a, b: a / b, trunc_div),
    "Mod": (np.fmod, trunc_mod),
    "FloorDiv": (np.floor_divide, lambda a, b: a // b),
    "FloorMod": (np.mod, lambda a, b: a % b),
    "Min": (np.minimum, np.minimum),
    "Max": (np.maximum, np.maximum),
    "LShift": (np.left_shift, lambda a, b: a << b),
    "RShift": (np.right_shift, lambda a, b: a >> b),
    "BitwiseAnd": (np.bitwise_and, lambda a, b: a & b),
    "BitwiseOr": (np.bitwise_or, lambda a, b: a | b),
    "BitwiseXor": (np.bitwise_xor, lambda a, b: a ^ b),
}
WRAPPING = ("Add", "Sub", "Mul", "LShift")  # operators whose result may exceed the range of an unsigned integer
COMPARISONS: dict[str, Callable[[Value, Value], Value]] = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}
CALLED_ARITHMETIC = {  # operators that TIR also writes as calls
    "tirx.shift_left": "LShift",
    "tirx.shift_right": "RShift",
    "tirx.bitwise_and": "BitwiseAnd",
    "tirx.bitwise_or": "BitwiseOr",
    "tirx.bitwise_xor": "BitwiseXor",
}
COUNTED_OPS = {"Mul": "Mul", "Add": "Add", "Sub": "Add", "Min": "Min", "Max": "Min"}


def _compute_erf(values: Value) -> Value:
    from scipy.special import erf

    return erf(values)


_MATH: dict[str, Callable[..., Value]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "exp10": lambda x: np.power(np.float32(10), x),
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": _compute_erf,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sin": np.sin,
    "cos": np.cos,
    "fabs": np.abs,
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "nearbyint": np.rint,
    "trunc": np.trunc,
    "pow": np.power,
    "fmax": np.maximum,
    "fmin": np.minimum,
    "max": np.maximum,
    "min": np.minimum,
    "fma": lambda a, b, c: a * b + c,
}


def find_function(name: str) -> Callable[..., Value] | None:
    """Return the function of a name such as `expf`, `__expf`, `hexp` or `tirx.exp`, or None."""
    base_name = name.removeprefix("tirx.").removeprefix("__").removesuffix("f")
    for candidate in (name.removeprefix("tirx."), base_name, base_name.removeprefix("h")):
        if candidate in _MATH:
            return _MATH[candidate]
    return None


def make_cast(target_type: Any, source_type: Any) -> Callable[[Value], Value]:
    """Return a function that converts a value between TIR types as C does."""
    type_name = str(target_type).partition("x")[0]
    if target_type.is_float:
        numpy_type = get_numpy_dtype(type_name)
        return lambda value: np.asarray(value).astype(numpy_type)[()]
    if target_type.is_bool:
        return lambda value: value != 0
    bits = min(int(target_type.bits), 63)

    def cast(value: Value) -> Value:
        if type_name == "uint64" and not source_type.is_float:
            return as_uint64(value)
        if source_type.is_float:
            value = np.trunc(np.asarray(value, np.float64)).astype(np.int64)[()]
        elif isinstance(value, np.ndarray):
            value = value.astype(np.int64, copy=False)
        else:
            value = int(value)
        if type_name.startswith("uint"):
            return value & ((1 << bits) - 1)
        if bits < 63 and not (source_type.is_integer and source_type.bits < target_type.bits):
            half = 1 << (bits - 1)
            return ((value + half) & ((1 << bits) - 1)) - half
        return value

    return cast


def reinterpret(value: Value, target_type: str, source_type: str) -> Value:
    """Reinterpret the bits of a value as another type, element by element."""
    target_dtype, source_dtype = (get_numpy_dtype(name.partition("x")[0]) for name in (target_type, source_type))
    values = np.asarray(value)
    bits = np.ascontiguousarray(values.astype(source_dtype)).reshape(-1).view(target_dtype).reshape(values.shape)
    return bits.astype(select_integer_type(target_dtype))[()] if target_dtype.kind in "iu" else bits[()]
