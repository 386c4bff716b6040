"""Expressions of lowered TIR: their operands, their variables, and the evaluation of index arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tvmconv.errors import AnalysisError

Values = Any  # array of integers or booleans that broadcasts over (iterations, lanes), or a scalar

_BINARY: dict[str, Callable[[Values, Values], Values]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Div": lambda a, b: np.trunc(a / b).astype(np.int64),  # C's integer division rounds toward zero
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
IF_THEN_ELSE = "prim.if_then_else"


def evaluate_expression(expression: Any, values: Mapping[Any, Values]) -> Values:
    """Return the value of an integer or boolean expression."""
    kind = type(expression).__name__
    if kind == "IntImm":
        return int(expression.value)
    if kind == "Var":
        return values[expression]
    if kind in _BINARY:
        return _BINARY[kind](evaluate_expression(expression.a, values), evaluate_expression(expression.b, values))
    if kind == "Not":
        return np.logical_not(evaluate_expression(expression.a, values))
    if kind == "Cast":
        return evaluate_expression(expression.value, values)
    if kind == "Select" or (kind == "Call" and expression.op.name == IF_THEN_ELSE):
        return np.where(*(evaluate_expression(child, values) for child in list_children(expression)))
    raise AnalysisError(f"index arithmetic cannot have a node of kind {kind}: {expression}")


def list_children(expression: Any) -> Sequence[Any]:
    """Return the operands of an expression; a selection's condition comes first."""
    kind = type(expression).__name__
    if kind in _BINARY:
        return (expression.a, expression.b)
    match kind:
        case "Select":
            return (expression.condition, expression.true_value, expression.false_value)
        case "Call":
            return tuple(expression.args)
        case "TensorLoad":
            return tuple(expression.indices)
        case "Ramp":
            return (expression.base, expression.stride)
        case "Cast" | "Broadcast":
            return (expression.value,)
        case "Shuffle":
            return (*expression.vectors, *expression.indices)
        case "Not":
            return (expression.a,)
        case "IntImm" | "FloatImm" | "StringImm" | "Var":
            return ()
    raise AnalysisError(f"expressions with a node of kind {kind} are not supported: {expression}")


def find_variables(expression: Any) -> list[Any]:
    """Return the variables in an expression."""
    import tvm_ffi
    from tvm import tirx

    variables: list[Any] = []
    tvm_ffi.structural_walk(expression, (tirx.Var, variables.append), order="post")
    return variables
