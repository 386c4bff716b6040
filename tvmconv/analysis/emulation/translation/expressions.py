"""Expressions of TIR as Python functions: arithmetic, selections, vectors, calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tvmconv.analysis.emulation.compiled import Code, Pointer
from tvmconv.analysis.emulation.instructions import dispatch
from tvmconv.analysis.emulation.machine import Machine, Mask
from tvmconv.analysis.emulation.memory.arrays import Argument
from tvmconv.analysis.emulation.translation.accesses import Accesses
from tvmconv.analysis.emulation.translation.arithmetic import (
    ARITHMETIC,
    CALLED_ARITHMETIC,
    COMPARISONS,
    COUNTED,
    WRAPPING,
    Value,
    as_uint64,
    function_of,
    uniform,
)
from tvmconv.analysis.emulation.translation.conversions import converted, reinterpreted
from tvmconv.analysis.emulation.translation.layout import Layout
from tvmconv.analysis.emulation.translation.places import reads_memory
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import numpy_dtype


class Expressions(Accesses):
    """Makes Python functions of expressions, once, that are called as often as they are evaluated.

    Args:
        machine: what they run on.
        layout: of shared memory.
        arrays: what the function's parameters are given.
    """

    def __init__(self, machine: Machine, layout: Layout, arrays: Mapping[Any, Argument]) -> None:
        super().__init__(machine, layout, arrays)
        self._names: dict[Any, tuple[Code, bool]] = {}  # variables: how to get one, whether it never changes
        self._values: list[Value] = []

    def code(self, node: Any) -> Code:
        """A function that evaluates an expression for the lanes of a mask; what never changes, once."""
        code, static = self._expression(node)
        return self._once(code) if static else code

    @staticmethod
    def _once(code: Code) -> Code:
        found: list[Value] = []

        def once(mask: Mask) -> Value:
            if not found:
                found.append(code(None))
            return found[0]

        return once

    def _expression(self, node: Any) -> tuple[Code, bool]:
        """How to evaluate an expression, and whether it is the same whenever it is."""
        kind = type(node).__name__
        if kind == "IntImm":
            number = bool(node.value) if node.ty.dtype.is_bool else int(node.value)
            number = as_uint64(number) if str(node.ty.dtype) == "uint64" else number
            return (lambda mask: number), True
        if kind == "FloatImm":
            real = numpy_dtype(str(node.ty.dtype)).type(node.value)
            return (lambda mask: real), True
        if kind == "Var":
            if node not in self._names:
                raise AnalysisError(f"a variable of which it is not known what it is: {node}")
            return self._names[node]
        if kind in ARITHMETIC:
            return self._arithmetic(kind, node, node.a, node.b)
        if kind in COMPARISONS:
            compare = COMPARISONS[kind]
            (a, b), static = self._both(node.a, node.b)
            return (lambda mask: compare(a(mask), b(mask))), static
        match kind:
            case "And" | "Or":
                return self._logical(kind, node)
            case "Not":
                a, static = self._expression(node.a)

                def negation(mask: Mask) -> Value:
                    value = a(mask)
                    return ~value if isinstance(value, np.ndarray) else not value

                return negation, static
            case "Cast":
                return self._cast(node)
            case "Select":
                return self._select(node.condition, node.true_value, node.false_value)
            case "TensorLoad":
                return self._load(node), False
            case "Ramp":
                (base, stride), static = self._both(node.base, node.stride)
                steps = np.arange(int(node.lanes))

                def ramp(mask: Mask) -> Value:
                    first = base(mask)
                    first = first[:, None] if isinstance(first, np.ndarray) else first
                    found = first + stride(mask) * steps
                    return found if found.ndim == 2 else found[None, :]

                return ramp, static
            case "Broadcast":
                value, static = self._expression(node.value)

                def broadcast(mask: Mask) -> Value:
                    found = value(mask)
                    return found[:, None] if isinstance(found, np.ndarray) and found.ndim == 1 else found

                return broadcast, static
            case "Shuffle":
                return self._shuffle(node)
            case "Call":
                return self._call(node)
        raise AnalysisError(f"{kind} in {node}")

    def _both(self, a: Any, b: Any) -> tuple[tuple[Code, Code], bool]:
        (first, one), (second, two) = self._expression(a), self._expression(b)
        if one and two:
            return (first, second), True
        return (self._once(first) if one else first, self._once(second) if two else second), False

    def _arithmetic(self, kind: str, node: Any, first: Any, second: Any) -> tuple[Code, bool]:
        (a, b), static = self._both(first, second)
        dtype = node.ty.dtype
        real, whole = ARITHMETIC[kind]
        if dtype.is_float:
            code: Code = lambda mask: real(a(mask), b(mask))  # noqa: E731
            watch, machine = self.machine.watch, self.machine
            if watch is not None and kind in COUNTED:
                name, lanes, itemsize = COUNTED[kind], dtype.lanes, dtype.itemsize // dtype.lanes
                plain, told = code, watch

                def counted(mask: Mask) -> Value:
                    told.operation(name, machine.lanes(mask), lanes, itemsize)
                    return plain(mask)

                return counted, False
            return code, static
        if kind in ("Min", "Max"):

            def extremum(mask: Mask) -> Value:
                one, two = a(mask), b(mask)
                if isinstance(one, int) and isinstance(two, int):
                    return min(one, two) if kind == "Min" else max(one, two)
                return whole(one, two)

            return extremum, static
        text = str(dtype).partition("x")[0]
        if text == "uint64":
            return (lambda mask: as_uint64(whole(as_uint64(a(mask)), as_uint64(b(mask))))), static
        if text.startswith("uint") and kind in WRAPPING:
            most = (1 << int(dtype.bits)) - 1
            return (lambda mask: whole(a(mask), b(mask)) & most), static
        return (lambda mask: whole(a(mask), b(mask))), static

    def _logical(self, kind: str, node: Any) -> tuple[Code, bool]:
        (a, b), static = self._both(node.a, node.b)

        def both(mask: Mask) -> Value:
            """In C the second is not evaluated where the first decides."""
            first = a(mask)
            decided = kind == "Or"
            if uniform(first):
                return first if bool(first) == decided else b(mask)
            if first.ndim == 1:
                open_ = ~first if decided else first
                second = b(open_ if mask is None else open_ & mask)
            else:
                second = b(mask)
            return first | second if decided else first & second

        return both, static

    def _select(self, condition: Any, then: Any, otherwise: Any) -> tuple[Code, bool]:
        holds, certain = self._expression(condition)
        (yes, no), static = self._both(then, otherwise)
        holds = self._once(holds) if certain and not static else holds

        machine = self.machine
        accesses = reads_memory(then, self._places) or reads_memory(otherwise, self._places)

        def select(mask: Mask) -> Value:
            which = machine.decided(holds, mask) if accesses else holds(mask)
            if uniform(which):
                return yes(mask) if which else no(mask)
            if which.ndim == 2:
                return np.where(which, yes(mask), no(mask))
            inside = which if mask is None else which & mask
            outside = ~which if mask is None else ~which & mask
            if not inside.any():
                return no(mask)
            if not outside.any():
                return yes(mask)
            one, other = yes(inside), no(outside)
            vector = any(isinstance(each, np.ndarray) and each.ndim == 2 for each in (one, other))
            return np.where(which[:, None] if vector else which, one, other)

        return select, static and certain

    def _cast(self, node: Any) -> tuple[Code, bool]:
        value, static = self._expression(node.value)
        return converted(value, node.ty.dtype, node.value.ty.dtype), static

    def _shuffle(self, node: Any) -> tuple[Code, bool]:
        vectors = [self.code(vector) for vector in node.vectors]
        chosen = [int(index) for index in node.indices]
        counts = [vector.ty.dtype.lanes for vector in node.vectors]

        def shuffle(mask: Mask) -> Value:
            columns = []
            for vector, count in zip(vectors, counts, strict=True):
                found = np.asarray(vector(mask))
                found = found.reshape(1, 1) if found.ndim == 0 else found[:, None] if found.ndim == 1 else found
                columns += [np.broadcast_to(found, (len(found), count))[:, i] for i in range(count)]
            picked = [columns[i] for i in chosen]
            if len(picked) == 1:
                return picked[0]
            return np.stack(np.broadcast_arrays(*picked), axis=1)

        return shuffle, False

    def _call(self, node: Any) -> tuple[Code, bool]:
        name = str(node.op.name)
        if name == "prim.if_then_else":
            return self._select(*node.args)
        if name in ("tirx.likely", "tirx.ret"):
            return self._expression(node.args[0])
        if name in CALLED_ARITHMETIC:
            return self._arithmetic(CALLED_ARITHMETIC[name], node, *node.args)
        if name == "tirx.reinterpret":
            return self._reinterpret(node)
        if name == "tirx.address_of":
            argument = self._arrays.get(node.args[0]) if type(node.args[0]).__name__ == "Var" else None
            if argument is not None:
                return (lambda mask: Pointer(argument, 0, argument.name)), False
            return self._address(node.args[0]), False
        if name == "tirx.buffer_data":
            place = self._memory(node)
            return (lambda mask: Pointer(place.memory, place.offset, place.name)), False
        if name in ("tirx.call_pure_extern", "tirx.call_extern"):
            called, arguments = str(node.args[0].value), node.args[1:]
        else:
            called, arguments = name, node.args
        function = function_of(called)
        if function is not None and node.ty.dtype.is_float:
            codes = [self.code(argument) for argument in arguments]
            kind = numpy_dtype(str(node.ty.dtype).partition("x")[0])
            chosen = function

            def call(mask: Mask) -> Value:
                given = [np.asarray(code(mask)) for code in codes]
                return np.asarray(chosen(*(each.astype(np.float32) for each in given))).astype(kind)[()]

            return call, False
        found = dispatch.expression(node, self)
        if found is not None:
            return found, False
        raise AnalysisError(f"a call that cannot be executed: {called}")

    def _reinterpret(self, node: Any) -> tuple[Code, bool]:
        value, static = self._expression(node.args[-1])
        if str(node.ty).startswith("T.handle"):  # of a pointer, which stays what it is
            return value, static
        return reinterpreted(value, str(node.ty.dtype), str(node.args[-1].ty.dtype)), static
