"""Translation of expressions of TIR to Python functions: arithmetic, selections, vectors and calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tvmconv.emulator.instructions import dispatch
from tvmconv.emulator.lane_code import ExpressionCode, Pointer
from tvmconv.emulator.memory.arrays import Argument
from tvmconv.emulator.state import EmulatorState, Mask
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
    translate_cast,
    translate_reinterpret,
)
from tvmconv.emulator.translation.layout import SharedMemoryLayout
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import get_numpy_dtype


class ExpressionTranslator(AccessTranslator):
    """Translator of expressions.

    Args:
        state: State that the functions run on.
        layout: Layout of shared memory.
        arrays: Argument of each of the function's parameters.
    """

    def __init__(self, state: EmulatorState, layout: SharedMemoryLayout, arrays: Mapping[Any, Argument]) -> None:
        super().__init__(state, layout, arrays)
        self._variables: dict[Any, tuple[ExpressionCode, bool]] = {}  # code, and whether its value never changes
        self._variable_values: list[Value] = []

    def translate_expression(self, node: Any) -> ExpressionCode:
        """Return a function that evaluates an expression for the lanes of a mask; it evaluates a constant only once."""
        code, is_static = self._translate_node(node)
        return self._cache_static(code) if is_static else code

    @staticmethod
    def _cache_static(code: ExpressionCode) -> ExpressionCode:
        cached: list[Value] = []

        def evaluate_once(mask: Mask) -> Value:
            if not cached:
                cached.append(code(None))
            return cached[0]

        return evaluate_once

    def _translate_node(self, node: Any) -> tuple[ExpressionCode, bool]:
        """Return the function that evaluates an expression, and whether its value never changes."""
        kind = type(node).__name__
        if kind == "IntImm":
            constant_value = bool(node.value) if node.ty.dtype.is_bool else int(node.value)
            constant_value = as_uint64(constant_value) if str(node.ty.dtype) == "uint64" else constant_value
            return (lambda mask: constant_value), True
        if kind == "FloatImm":
            constant = get_numpy_dtype(str(node.ty.dtype)).type(node.value)
            return (lambda mask: constant), True
        if kind == "Var":
            if node not in self._variables:
                raise AnalysisError(f"the variable {node} is not bound")
            return self._variables[node]
        if kind in ARITHMETIC:
            return self._translate_arithmetic(kind, node, node.a, node.b)
        if kind in COMPARISONS:
            compare = COMPARISONS[kind]
            (a, b), is_static = self._translate_pair(node.a, node.b)
            return (lambda mask: compare(a(mask), b(mask))), is_static
        match kind:
            case "And" | "Or":
                return self._translate_logical(kind, node)
            case "Not":
                a, is_static = self._translate_node(node.a)

                def negation(mask: Mask) -> Value:
                    value = a(mask)
                    return ~value if isinstance(value, np.ndarray) else not value

                return negation, is_static
            case "Cast":
                value, is_static = self._translate_node(node.value)
                return translate_cast(value, node.ty.dtype, node.value.ty.dtype), is_static
            case "Select":
                return self._translate_select(node.condition, node.true_value, node.false_value)
            case "TensorLoad":
                return self._translate_load(node), False
            case "Ramp":
                (base, stride), is_static = self._translate_pair(node.base, node.stride)
                lane_numbers = np.arange(int(node.lanes))

                def ramp(mask: Mask) -> Value:
                    start = base(mask)
                    start = start[:, None] if isinstance(start, np.ndarray) else start
                    elements = start + stride(mask) * lane_numbers
                    return elements if elements.ndim == 2 else elements[None, :]

                return ramp, is_static
            case "Broadcast":
                value, is_static = self._translate_node(node.value)

                def broadcast(mask: Mask) -> Value:
                    element = value(mask)
                    return element[:, None] if isinstance(element, np.ndarray) and element.ndim == 1 else element

                return broadcast, is_static
            case "Shuffle":
                return self._translate_shuffle(node)
            case "Call":
                return self._translate_call(node)
        raise AnalysisError(f"expressions with a node of kind {kind} are not supported: {node}")

    def _translate_pair(self, a: Any, b: Any) -> tuple[tuple[ExpressionCode, ExpressionCode], bool]:
        (first, is_first_static), (second, is_second_static) = self._translate_node(a), self._translate_node(b)
        if is_first_static and is_second_static:
            return (first, second), True
        return (
            self._cache_static(first) if is_first_static else first,
            self._cache_static(second) if is_second_static else second,
        ), False

    def _translate_arithmetic(self, kind: str, node: Any, first: Any, second: Any) -> tuple[ExpressionCode, bool]:
        (a, b), is_static = self._translate_pair(first, second)
        dtype = node.ty.dtype
        float_function, integer_function = ARITHMETIC[kind]
        if dtype.is_float:
            code: ExpressionCode = lambda mask: float_function(a(mask), b(mask))  # noqa: E731
            observer, state = self.state.observer, self.state
            if observer is not None and kind in COUNTED_OPS:
                name, lanes, itemsize = COUNTED_OPS[kind], dtype.lanes, dtype.itemsize // dtype.lanes
                compute, notified_observer = code, observer

                def compute_and_notify(mask: Mask) -> Value:
                    notified_observer.on_operation(name, state.find_lanes(mask), lanes, itemsize)
                    return compute(mask)

                return compute_and_notify, False
            return code, is_static
        if kind in ("Min", "Max"):

            def extremum(mask: Mask) -> Value:
                lhs, rhs = a(mask), b(mask)
                if isinstance(lhs, int) and isinstance(rhs, int):
                    return min(lhs, rhs) if kind == "Min" else max(lhs, rhs)
                return integer_function(lhs, rhs)

            return extremum, is_static
        type_name = str(dtype).partition("x")[0]
        if type_name == "uint64":
            return (lambda mask: as_uint64(integer_function(as_uint64(a(mask)), as_uint64(b(mask))))), is_static
        if type_name.startswith("uint") and kind in WRAPPING:
            max_value = (1 << int(dtype.bits)) - 1
            return (lambda mask: integer_function(a(mask), b(mask)) & max_value), is_static
        return (lambda mask: integer_function(a(mask), b(mask))), is_static

    def _translate_logical(self, kind: str, node: Any) -> tuple[ExpressionCode, bool]:
        (a, b), is_static = self._translate_pair(node.a, node.b)

        def combine(mask: Mask) -> Value:
            """Evaluate the second operand only in lanes in which the first does not decide, as in C."""
            first = a(mask)
            decisive_value = kind == "Or"
            if is_uniform(first):
                return first if bool(first) == decisive_value else b(mask)
            if first.ndim == 1:
                needs_second = ~first if decisive_value else first
                second = b(needs_second if mask is None else needs_second & mask)
            else:
                second = b(mask)
            return first | second if decisive_value else first & second

        return combine, is_static

    def _translate_select(self, condition: Any, true_node: Any, false_node: Any) -> tuple[ExpressionCode, bool]:
        condition_code, is_condition_static = self._translate_node(condition)
        (true_code, false_code), is_static = self._translate_pair(true_node, false_node)
        condition_code = self._cache_static(condition_code) if is_condition_static and not is_static else condition_code

        state = self.state
        accesses_memory = reads_memory(true_node, self._locations) or reads_memory(false_node, self._locations)

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

        return select, is_static and is_condition_static

    def _translate_shuffle(self, node: Any) -> tuple[ExpressionCode, bool]:
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

        return shuffle, False

    def _translate_call(self, node: Any) -> tuple[ExpressionCode, bool]:
        name = str(node.op.name)
        if name == "prim.if_then_else":
            return self._translate_select(*node.args)
        if name in ("tirx.likely", "tirx.ret"):
            return self._translate_node(node.args[0])
        if name in CALLED_ARITHMETIC:
            return self._translate_arithmetic(CALLED_ARITHMETIC[name], node, *node.args)
        if name == "tirx.reinterpret":
            return self._translate_reinterpret(node)
        if name == "tirx.address_of":
            argument = self._arrays.get(node.args[0]) if type(node.args[0]).__name__ == "Var" else None
            if argument is not None:
                return (lambda mask: Pointer(argument, 0, argument.name)), False
            return self._translate_address(node.args[0]), False
        if name == "tirx.buffer_data":
            location = self._find_location(node)
            return (lambda mask: Pointer(location.memory, location.byte_offset, location.name)), False
        if name in ("tirx.call_pure_extern", "tirx.call_extern"):
            function_name, arguments = str(node.args[0].value), node.args[1:]
        else:
            function_name, arguments = name, node.args
        function = find_function(function_name)
        if function is not None and node.ty.dtype.is_float:
            codes = [self.translate_expression(argument) for argument in arguments]
            numpy_type = get_numpy_dtype(str(node.ty.dtype).partition("x")[0])
            callee = function

            def call(mask: Mask) -> Value:
                operands = [np.asarray(code(mask)) for code in codes]
                return np.asarray(callee(*(operand.astype(np.float32) for operand in operands))).astype(numpy_type)[()]

            return call, False
        intrinsic_code = dispatch.translate_expression(node, self)
        if intrinsic_code is not None:
            return intrinsic_code, False
        raise AnalysisError(f"the emulator does not support calls of {function_name}")

    def _translate_reinterpret(self, node: Any) -> tuple[ExpressionCode, bool]:
        value_code, is_static = self._translate_node(node.args[-1])
        if str(node.ty).startswith("T.handle"):  # reinterpreting a pointer does not change it
            return value_code, is_static
        return translate_reinterpret(value_code, str(node.ty.dtype), str(node.args[-1].ty.dtype)), is_static
