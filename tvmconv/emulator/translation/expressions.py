"""Translation of expressions of TIR to Python functions: arithmetic, selections, vectors and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tvmconv.emulator.instructions import dispatch
from tvmconv.emulator.state import ExpressionCode, Mask, Pointer
from tvmconv.emulator.translation.accesses import AccessTranslator, reads_memory
from tvmconv.emulator.translation.arithmetic import (
    ARITHMETIC,
    CALLED_ARITHMETIC,
    COMPARISONS,
    COUNTED_OPS,
    WRAPPING,
    Value,
    as_uint64,
    find_function,
    is_uniform,
    make_cast,
    reinterpret,
)
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import get_numpy_dtype


class StaticCode:
    """Expression whose value never changes, and which is evaluated once."""

    def __init__(self, code: ExpressionCode) -> None:
        self._code = code
        self._values: list[Value] = []

    def __call__(self, mask: Mask) -> Value:
        """Return the value."""
        if not self._values:
            self._values.append(self._code(None))
        return self._values[0]


class ExpressionTranslator(AccessTranslator):
    """Translator of expressions; `_variables` has the code of each bound variable."""

    def translate_expression(self, node: Any) -> ExpressionCode:
        """Return a function that evaluates an expression for the lanes of a mask."""
        kind = type(node).__name__
        if kind == "IntImm":
            constant = bool(node.value) if node.ty.dtype.is_bool else int(node.value)
            constant = as_uint64(constant) if str(node.ty.dtype) == "uint64" else constant
            return StaticCode(lambda mask: constant)
        if kind == "FloatImm":
            number = get_numpy_dtype(str(node.ty.dtype)).type(node.value)
            return StaticCode(lambda mask: number)
        if kind == "Var":
            if node not in self._variables:
                raise AnalysisError(f"the variable {node} is not bound")
            return self._variables[node]
        if kind in ARITHMETIC:
            return self._translate_arithmetic(kind, node, node.a, node.b)
        if kind in COMPARISONS:
            return self._apply(COMPARISONS[kind], node.a, node.b)
        match kind:
            case "And" | "Or":
                return self._translate_logical(kind, node)
            case "Not":
                return self._apply(lambda value: ~value if isinstance(value, np.ndarray) else not value, node.a)
            case "Cast":
                return self._apply(make_cast(node.ty.dtype, node.value.ty.dtype), node.value)
            case "Select":
                return self._translate_select(node.condition, node.true_value, node.false_value)
            case "TensorLoad":
                return self._translate_load(node)
            case "Ramp":
                lane_numbers = np.arange(int(node.lanes))

                def ramp(start: Value, stride: Value) -> Value:
                    start = start[:, None] if isinstance(start, np.ndarray) else start
                    elements = start + stride * lane_numbers
                    return elements if elements.ndim == 2 else elements[None, :]

                return self._apply(ramp, node.base, node.stride)
            case "Broadcast":
                return self._apply(
                    lambda value: value[:, None] if isinstance(value, np.ndarray) and value.ndim == 1 else value,
                    node.value,
                )
            case "Shuffle":
                return self._translate_shuffle(node)
            case "Call":
                return self._translate_call(node)
        raise AnalysisError(f"expressions with a node of kind {kind} are not supported: {node}")

    def _apply(self, function: Callable[..., Value], *nodes: Any) -> ExpressionCode:
        """Return the code of a function of expressions, which is static if they are."""
        operands = [self.translate_expression(node) for node in nodes]
        if len(operands) == 1:
            (a,) = operands
            code: ExpressionCode = lambda mask: function(a(mask))  # noqa: E731
        else:
            a, b = operands
            code = lambda mask: function(a(mask), b(mask))  # noqa: E731
        return StaticCode(code) if all(isinstance(operand, StaticCode) for operand in operands) else code

    def _translate_arithmetic(self, kind: str, node: Any, first: Any, second: Any) -> ExpressionCode:
        dtype = node.ty.dtype
        float_function, integer_function = ARITHMETIC[kind]
        if dtype.is_float:
            code = self._apply(float_function, first, second)
            observer, state = self.state.observer, self.state
            if observer is None or kind not in COUNTED_OPS:
                return code
            name, lanes, itemsize = COUNTED_OPS[kind], dtype.lanes, dtype.itemsize // dtype.lanes

            def compute_and_notify(mask: Mask) -> Value:
                observer.on_operation(name, state.find_lanes(mask), lanes, itemsize)
                return code(mask)

            return compute_and_notify
        type_name = str(dtype).partition("x")[0]
        if kind in ("Min", "Max"):
            python_function = min if kind == "Min" else max

            def extremum(a: Value, b: Value) -> Value:
                is_python = isinstance(a, int) and isinstance(b, int)
                return python_function(a, b) if is_python else integer_function(a, b)

            return self._apply(extremum, first, second)
        if type_name == "uint64":
            return self._apply(lambda a, b: as_uint64(integer_function(as_uint64(a), as_uint64(b))), first, second)
        if type_name.startswith("uint") and kind in WRAPPING:
            max_value = (1 << int(dtype.bits)) - 1
            return self._apply(lambda a, b: integer_function(a, b) & max_value, first, second)
        return self._apply(integer_function, first, second)

    def _translate_logical(self, kind: str, node: Any) -> ExpressionCode:
        a, b = self.translate_expression(node.a), self.translate_expression(node.b)
        decisive_value = kind == "Or"

        def combine(mask: Mask) -> Value:
            """Evaluate the second operand only in lanes in which the first does not decide, as in C."""
            first = a(mask)
            if is_uniform(first):
                return first if bool(first) == decisive_value else b(mask)
            if first.ndim == 1:
                needs_second = ~first if decisive_value else first
                second = b(needs_second if mask is None else needs_second & mask)
            else:
                second = b(mask)
            return first | second if decisive_value else first & second

        return StaticCode(combine) if isinstance(a, StaticCode) and isinstance(b, StaticCode) else combine

    def _translate_select(self, *nodes: Any) -> ExpressionCode:
        """Translate a selection by (condition, value if true, value if false)."""
        codes = condition_code, true_code, false_code = [self.translate_expression(node) for node in nodes]
        state = self.state
        accesses_memory = any(reads_memory(node, self._locations) for node in nodes[1:])

        def select(mask: Mask) -> Value:
            is_true = state.evaluate_data_independent(condition_code, mask) if accesses_memory else condition_code(mask)
            if is_uniform(is_true):
                return true_code(mask) if is_true else false_code(mask)
            if is_true.ndim == 2:
                return np.where(is_true, true_code(mask), false_code(mask))
            true_lanes = is_true if mask is None else is_true & mask
            false_lanes = ~is_true if mask is None else ~is_true & mask
            if not true_lanes.any():
                return false_code(mask)
            if not false_lanes.any():
                return true_code(mask)
            true_value, false_value = true_code(true_lanes), false_code(false_lanes)
            is_vector = any(isinstance(value, np.ndarray) and value.ndim == 2 for value in (true_value, false_value))
            return np.where(is_true[:, None] if is_vector else is_true, true_value, false_value)

        return StaticCode(select) if all(isinstance(code, StaticCode) for code in codes) else select

    def _translate_shuffle(self, node: Any) -> ExpressionCode:
        vectors = [self.translate_expression(vector) for vector in node.vectors]
        column_indices = [int(index) for index in node.indices]
        counts = [vector.ty.dtype.lanes for vector in node.vectors]

        def shuffle(mask: Mask) -> Value:
            columns = []
            for vector, count in zip(vectors, counts, strict=True):
                elements = np.asarray(vector(mask))
                if elements.ndim < 2:
                    elements = elements.reshape(-1, 1)
                columns += [np.broadcast_to(elements, (len(elements), count))[:, i] for i in range(count)]
            selected_columns = [columns[i] for i in column_indices]
            if len(selected_columns) == 1:
                return selected_columns[0]
            return np.stack(np.broadcast_arrays(*selected_columns), axis=1)

        return shuffle

    def _translate_call(self, node: Any) -> ExpressionCode:
        name, arguments = str(node.op.name), node.args
        if name == "prim.if_then_else":
            return self._translate_select(*arguments)
        if name in ("tirx.likely", "tirx.ret"):
            return self.translate_expression(arguments[0])
        if name in CALLED_ARITHMETIC:
            return self._translate_arithmetic(CALLED_ARITHMETIC[name], node, *arguments)
        if name == "tirx.reinterpret":
            source = arguments[-1]
            if str(node.ty).startswith("T.handle"):  # reinterpreting a pointer does not change it
                return self.translate_expression(source)
            target_type, source_type = str(node.ty.dtype), str(source.ty.dtype)
            return self._apply(lambda value: reinterpret(value, target_type, source_type), source)
        if name == "tirx.address_of":
            argument = self._arrays.get(arguments[0]) if type(arguments[0]).__name__ == "Var" else None
            if argument is not None:
                return lambda mask: Pointer(argument, 0, argument.name)
            return self._translate_address(arguments[0])
        if name == "tirx.buffer_data":
            location = self._find_location(node)
            return lambda mask: Pointer(location.memory, location.byte_offset, location.name)
        if name in ("tirx.call_pure_extern", "tirx.call_extern"):
            name, arguments = str(arguments[0].value), arguments[1:]
        function = find_function(name)
        if function is not None and node.ty.dtype.is_float:
            codes = [self.translate_expression(argument) for argument in arguments]
            numpy_type, callee = get_numpy_dtype(str(node.ty.dtype).partition("x")[0]), function

            def call(mask: Mask) -> Value:
                operands = [np.asarray(code(mask)) for code in codes]
                return np.asarray(callee(*(operand.astype(np.float32) for operand in operands))).astype(numpy_type)[()]

            return call
        intrinsic_code = dispatch.translate_expression(node, self)
        if intrinsic_code is None:
            raise AnalysisError(f"the emulator does not support calls of {name}")
        return intrinsic_code
