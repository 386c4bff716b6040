"""Evaluating lowered TIR expressions over many threads and iterations at once, with NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tvmconv.errors import AnalysisError

Values = Any  # an array of integers or truth values that broadcasts over (iterations, lanes), or a scalar

_BINARY: dict[str, Callable[[Values, Values], Values]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Div": lambda a, b: np.trunc(a / b).astype(np.int64),  # of integers in C: toward zero
    "Mod": np.fmod,
    "Min": np.minimum,
    "Max": np.maximum,
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
}


def evaluate(expression: Any, values: Mapping[Any, Values]) -> Values:
    """The value of an integer or boolean expression.

    Args:
        expression: TIR without memory accesses.
        values: an array for each variable; all broadcast against one another.

    Raises:
        AnalysisError: the expression has a node that index arithmetic does not have.
    """
    kind = type(expression).__name__
    if kind == "IntImm":
        return int(expression.value)
    if kind == "Var":
        return values[expression]
    if kind in _BINARY:
        return _BINARY[kind](evaluate(expression.a, values), evaluate(expression.b, values))
    if kind == "Not":
        return np.logical_not(evaluate(expression.a, values))
    if kind == "Cast":
        return evaluate(expression.value, values)
    if kind == "Select":
        parts = (expression.condition, expression.true_value, expression.false_value)
        return np.where(*(evaluate(part, values) for part in parts))
    if kind == "Call" and expression.op.name == "prim.if_then_else":
        return np.where(*(evaluate(argument, values) for argument in expression.args))
    raise AnalysisError(f"{kind} in index arithmetic: {expression}")
