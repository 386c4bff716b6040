"""Asynchronous copies from global to shared memory that threads make: cp.async.

Source: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.compiled import Compiler, Pointer, Run
from tvmconv.analysis.emulation.errors import ExecutionError
from tvmconv.analysis.emulation.instructions.operands import Call, address_of
from tvmconv.analysis.emulation.machine import Machine, Mask
from tvmconv.analysis.emulation.memory.arrays import Array
from tvmconv.analysis.emulation.memory.shared import Address, Shared
from tvmconv.analysis.emulation.threads import Lanes


def start_copy(
    machine: Machine, to: Address, source: Address, nbytes: int, lengths: NDArray[np.int64], lanes: Lanes
) -> None:
    """Start asynchronous copies: so many bytes of each lane, the rest of `nbytes` zeros."""
    if not isinstance(to.memory, Shared) or not isinstance(source.memory, Array):
        raise ExecutionError("an asynchronous copy from other than global to shared memory")
    array = source.memory
    if ((lengths < 0) | (lengths > nbytes)).any():
        raise ExecutionError(f"an asynchronous copy of {nbytes} bytes that reads another number of them")
    units = to.memory.at(to.at, lanes, nbytes)
    if machine.checked:
        data = _copied(array, source.at, nbytes, lengths)
        to.memory.copy(units, lanes, data.view(f"u{to.memory.unit}"))
    reading = lengths > 0
    itemsize = array.dtype.itemsize
    machine.tell("shared", "store", to.name, lanes, to.at, nbytes, itemsize, np.where(reading, source.at, -1))
    machine.tell("global", "load", source.name, lanes[reading], source.at[reading], nbytes, itemsize)


def _copied(array: Array, at: NDArray[np.int64], nbytes: int, lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """What copies of so many bytes write, of which they read but the first `lengths`."""
    data = np.zeros((len(at), nbytes), np.uint8)
    whole = lengths == nbytes
    if whole.any():
        data[whole] = array.read(at[whole], nbytes)
    for i in np.flatnonzero(~whole & (lengths > 0)):
        first, length = int(at[i]), int(lengths[i])
        if first < 0 or first + length > array.nbytes:
            raise ExecutionError(f"out of bounds: {length} bytes at byte {first} of {array.name}")
        data[i, :length] = array.raw[first : first + length]
    return data


def _async_copy(call: Call, compiler: Compiler) -> Run:
    operands = call.operands
    if "L2::cache_hint" in call.modifiers:
        operands = operands[:-1]
    to, source = compiler.code(operands[0]), compiler.code(operands[1])
    nbytes = int(operands[2])
    given = compiler.code(operands[3]) if len(operands) > 3 else None
    ignores = call.name.endswith("ignore_src")
    machine = compiler.machine
    plain = Call(call.name, (), None, ("shared",))

    def copy(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        lengths = np.full(len(lanes), nbytes)
        if given is not None:
            lengths = machine.rows(machine.decided(given, mask), lanes).astype(np.int64)
            lengths = np.where(lengths != 0, 0, nbytes) if ignores else lengths
        pointer = machine.decided(source, mask)
        if not isinstance(pointer, Pointer) or not isinstance(pointer.memory, Array):
            raise ExecutionError(f"{call} from what is not an array")
        start_copy(
            machine,
            address_of(plain, machine.decided(to, mask), machine, lanes),
            Address(pointer.memory, machine.rows(pointer.offset, lanes).astype(np.int64), pointer.name),
            nbytes,
            lengths,
            lanes,
        )

    return copy


def _commit(call: Call, compiler: Compiler) -> Run:
    machine = compiler.machine
    return lambda mask: machine.shared.commit(machine.lanes(mask))


def _wait(call: Call, compiler: Compiler) -> Run:
    machine, pending = compiler.machine, int(call.operands[0])
    return lambda mask: machine.shared.wait(machine.lanes(mask), pending)


def _wait_all(call: Call, compiler: Compiler) -> Run:
    machine = compiler.machine

    def wait(mask: Mask) -> None:
        machine.shared.commit(machine.lanes(mask))
        machine.shared.wait(machine.lanes(mask), 0)

    return wait


INSTRUCTIONS: dict[str, Callable[[Call, Compiler], Run]] = {
    "cp_async_commit_group": _commit,
    "cp_async_wait_group": _wait,
    "cp_async_wait_all": _wait_all,
    **{f"cp_async_{cop}{tail}": _async_copy for cop in ("ca", "cg") for tail in ("", "_src_size", "_ignore_src")},
}
