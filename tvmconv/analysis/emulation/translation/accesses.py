"""Loads and stores of TIR as Python functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.compiled import Code, Pointer
from tvmconv.analysis.emulation.errors import ExecutionError
from tvmconv.analysis.emulation.machine import Machine, Mask
from tvmconv.analysis.emulation.memory.arrays import Argument
from tvmconv.analysis.emulation.memory.registers import Registers
from tvmconv.analysis.emulation.translation.arithmetic import Value, integers
from tvmconv.analysis.emulation.translation.layout import Layout
from tvmconv.analysis.emulation.translation.places import Place, Places
from tvmconv.analysis.emulation.watch import SITES
from tvmconv.errors import AnalysisError


class Accesses(Places, ABC):
    """Makes Python functions of loads and stores; what their indices and values are, others know.

    Args:
        machine: what they run on.
        layout: of shared memory.
        arrays: what the function's parameters are given.
    """

    def __init__(self, machine: Machine, layout: Layout, arrays: Mapping[Any, Argument]) -> None:
        super().__init__(machine, layout, arrays)
        self._statement = -1  # the index of the one that is read
        self._sites = 0

    @abstractmethod
    def code(self, node: Any) -> Code:
        """A function that evaluates an expression for the lanes of a mask."""

    def _site(self) -> int:
        self._sites += 1
        return self._statement * SITES + self._sites % SITES

    def _picked(self, at: Value, active: NDArray[np.intp], lanes: int) -> NDArray[np.int64]:
        """The indices of active lanes, of shape (active, elements of the vector)."""
        at = np.asarray(at, np.int64)
        if at.ndim == 0:
            return np.full((len(active), 1), at)
        if at.ndim == 1:
            return at[active][:, None]
        return np.broadcast_to(at, (len(active), lanes)) if len(at) == 1 else at[active]

    @staticmethod
    def _check_index(place: Place, at: NDArray[np.int64]) -> None:
        if at.size and (int(at.min()) < 0 or int(at.max()) >= place.size):
            worst = int(at.min()) if int(at.min()) < 0 else int(at.max())
            raise ExecutionError(f"out of bounds: element {worst} of {place.name}, which has {place.size}")

    @staticmethod
    def _whole(at: NDArray[np.int64], place: Place) -> tuple[NDArray[np.int64], int]:
        """Where accesses begin, in bytes, and how many elements each of them has in a row."""
        count = at.shape[1]
        if count > 1 and np.any(np.diff(at, axis=1) != 1):
            return at * place.dtype.itemsize + place.offset, 1
        return at[:, :1] * place.dtype.itemsize + place.offset, count

    def _load(self, node: Any) -> Code:
        place = self._places.get(node.source)
        if place is None:
            raise AnalysisError(f"memory of which it is not known what it is: {node.source}")
        index = self.code(node.indices[0])
        machine, dtype = self.machine, place.dtype
        lanes = node.ty.dtype.lanes
        integer = dtype.kind in "iub"
        if isinstance(place.memory, Registers):
            return self._load_registers(place, index, integer=integer)
        memory, site = place.memory, self._site()

        def load(mask: Mask) -> Value:
            active = machine.lanes(mask)
            at = self._picked(machine.decided(index, mask), active, lanes)
            self._check_index(place, at)
            machine.site = site
            rows = machine.load(memory, *self._whole(at, place), dtype, active, place.name)
            rows = rows.astype(integers(dtype)) if integer else rows
            rows = rows[:, 0] if lanes == 1 else rows
            if mask is None:
                return rows
            full = np.zeros((machine.threads.lanes, *rows.shape[1:]), rows.dtype)
            full[active] = rows
            return full

        return load

    def _load_registers(self, place: Place, index: Code, *, integer: bool) -> Code:
        registers, machine = place.memory, self.machine
        assert isinstance(registers, Registers)
        data, written, loaded = registers.data.view(place.dtype), registers.written, registers.loaded

        kind = integers(place.dtype)

        def check(known: NDArray[np.bool_], mask: Mask) -> None:
            real: NDArray[np.bool_] = machine.real if mask is None else mask
            if not known.all() and not known[real].all():
                raise ExecutionError(f"{place.name} is read before it is written")

        def load(mask: Mask) -> Value:
            at = index(mask)
            if registers.waiting:
                registers.read(at, mask)
            if registers.accumulators is not None:
                registers.accumulators.touch(at, mask)
            if isinstance(at, int):
                if not 0 <= at < place.size:
                    raise ExecutionError(f"out of bounds: element {at} of {place.name}, which has {place.size}")
                machine.loaded |= bool(loaded[at])
                if integer:
                    check(written[at], mask)
                    return data[at].astype(kind)
                return data[at]
            at = np.asarray(at)
            at = at[:, None] if at.ndim == 1 else at
            at = np.broadcast_to(at, (machine.threads.lanes, at.shape[1]))
            real = machine.real if mask is None else mask
            self._check_index(place, at[real])
            at = np.where(real[:, None], at, 0)
            machine.loaded |= bool(loaded[at].any())
            lane = machine.all_lanes[:, None]
            if integer:
                check(np.asarray(written[at, lane].all(axis=1)), mask)
            found = data[at, lane].astype(kind) if integer else data[at, lane]
            return found[:, 0] if found.shape[1] == 1 else found

        return load

    def _store(self, node: Any) -> Callable[[Mask], None]:
        place = self._places[node.buffer]
        code, index = self.code(node.value), self.code(node.indices[0])
        lanes = node.value.ty.dtype.lanes
        if getattr(node, "predicate", None) is not None:
            raise AnalysisError(f"a store with a predicate of its own: {node.buffer.name}")
        if isinstance(place.memory, Registers):
            return self._store_registers(place, code, index)
        machine, dtype, memory = self.machine, place.dtype, place.memory
        site = self._site()

        def store(mask: Mask) -> None:
            active = machine.lanes(mask)
            value, at = code(mask), self._picked(machine.decided(index, mask), active, lanes)
            machine.site = site
            self._check_index(place, at)
            value = np.asarray(value)
            if value.ndim == 0:
                rows = np.full((len(active), lanes), value.astype(dtype))
            else:
                value = value if value.ndim == 2 else value[:, None]
                value = value if mask is None or len(value) == 1 else value[active]
                rows = np.broadcast_to(value.astype(dtype, copy=False), (len(active), lanes))
            rows = np.ascontiguousarray(rows)
            machine.store(memory, *self._whole(at, place), rows, active, place.name, dtype.itemsize)

        return store

    def _store_registers(self, place: Place, code: Code, index: Code) -> Callable[[Mask], None]:
        registers = place.memory
        assert isinstance(registers, Registers)
        data, written, loaded = registers.data.view(place.dtype), registers.written, registers.loaded
        machine = self.machine

        def store(mask: Mask) -> None:
            machine.loaded = False
            value, at = code(mask), index(mask)
            depends = machine.loaded
            if registers.accumulators is not None:
                registers.accumulators.touch(at, mask)
            if isinstance(at, int):
                if not 0 <= at < place.size:
                    raise ExecutionError(f"out of bounds: element {at} of {place.name}, which has {place.size}")
                if isinstance(value, np.ndarray) and value.ndim == 2:
                    value = value[:, 0]
                if mask is None:
                    data[at] = value
                    written[at] = True
                    loaded[at] = depends
                else:
                    np.copyto(data[at], value, where=mask, casting="unsafe")
                    written[at] |= mask
                    loaded[at] |= depends
                return
            active = machine.lanes(mask)
            at = np.asarray(at)
            at = at[:, None] if at.ndim == 1 else at
            at = np.broadcast_to(at, (machine.threads.lanes, at.shape[1]))[active]
            self._check_index(place, at)
            value = np.asarray(value)
            if value.ndim:
                value = value if value.ndim == 2 else value[:, None]
                value = np.broadcast_to(value, (machine.threads.lanes, value.shape[1]))[active]
            data[at, active[:, None]] = value
            written[at, active[:, None]] = True
            loaded[at] |= depends

        return store

    def _address(self, load: Any) -> Code:
        place = self._places.get(load.source)
        if place is None:
            raise AnalysisError(f"the address of {load.source}, of which it is not known what it is")
        index, size = self.code(load.indices[0]), place.dtype.itemsize
        return lambda mask: Pointer(place.memory, place.offset + index(mask) * size, place.name)

    def registers(self, node: Any) -> tuple[Registers, Code]:
        """The registers that an operand such as `acc[3]` is, and the index in them."""
        if type(node).__name__ == "TensorLoad":
            place = self._places.get(node.source)
            if place is not None and isinstance(place.memory, Registers):
                return place.memory, self.code(node.indices[0])
        raise AnalysisError(f"an operand that is no register: {node}")
