"""TVM's own intrinsics for GPU instructions, which are no `T.ptx[...]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.compiled import Compiler, Pointer, Run
from tvmconv.analysis.emulation.errors import ExecutionError
from tvmconv.analysis.emulation.instructions.copies import start_copy
from tvmconv.analysis.emulation.instructions.matrices import load_matrix
from tvmconv.analysis.emulation.instructions.mma import Shape, elements, multiplied, shape_of, tell
from tvmconv.analysis.emulation.instructions.operands import same, write_bits
from tvmconv.analysis.emulation.machine import Mask
from tvmconv.analysis.emulation.memory.registers import Registers
from tvmconv.analysis.emulation.memory.shared import Address
from tvmconv.analysis.emulation.threads import Lanes
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import numpy_dtype


def _async_copy(node: Any, compiler: Compiler) -> Run:
    """Of (destination, offset, source, offset, bytes, whether to load and not to store zeros).

    Where it does not load, TVM's code stores zeros at once; they are taken to land with the copies.
    """
    to, to_at, source, source_at, size, *when = node.args
    nbytes = int(size)
    codes = [compiler.code(each) for each in (to, to_at, source, source_at)]
    condition = compiler.code(when[0]) if when else None
    itemsize = node.ty.dtype.itemsize
    machine = compiler.machine

    def copy(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        target, first, pointer, second = (machine.decided(code, mask) for code in codes)
        lengths = np.full(len(lanes), nbytes)
        if condition is not None:
            lengths = np.where(machine.rows(machine.decided(condition, mask), lanes), nbytes, 0)
        start_copy(
            machine,
            Address(target.memory, machine.rows(target.offset + first * itemsize, lanes), target.name),
            Address(pointer.memory, machine.rows(pointer.offset + second * itemsize, lanes), pointer.name),
            nbytes,
            lengths,
            lanes,
        )

    return copy


def _registers(node: Any, compiler: Compiler) -> Registers:
    pointer = compiler.code(node)(None)
    if not isinstance(pointer, Pointer) or not isinstance(pointer.memory, Registers):
        raise AnalysisError(f"an operand that is no registers: {node}")
    return pointer.memory


def _fill(node: Any, compiler: Compiler) -> Run:
    """Of (how many, registers, offset): zeros."""
    count, registers = int(node.args[0]), _registers(node.args[1], compiler)
    offset, machine = compiler.code(node.args[2]), compiler.machine

    def fill(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        first = same(offset(mask), lanes)
        for i in range(count):
            zeros = np.zeros(len(lanes), f"u{registers.data.dtype.itemsize}")
            write_bits(registers, first + i, lanes, zeros, whole=mask is None)

    return fill


def _ldmatrix(node: Any, compiler: Compiler) -> Run:
    """Of (transposed, how many, type, registers, offset, address, offset in elements)."""
    transposed, number, kind = bool(node.args[0]), int(node.args[1]), str(node.args[2].value)
    registers = _registers(node.args[3], compiler)
    first, address, offset = (compiler.code(each) for each in node.args[4:7])
    itemsize, machine = node.ty.dtype.itemsize, compiler.machine
    if kind != ".b16":
        raise AnalysisError(f"ldmatrix of {kind}")
    each = 4 // registers.data.dtype.itemsize  # elements of a register of 32 bits

    def load(mask: Mask) -> None:
        lanes = machine.warps(mask)
        pointer, by = machine.decided(address, mask), machine.decided(offset, mask)
        start = same(first(mask), lanes)
        at = machine.rows(pointer.offset + by * itemsize, lanes)
        words = load_matrix(machine, pointer.name, at, lanes, number, transposed=transposed)
        columns = words.view(f"u{registers.data.dtype.itemsize}").reshape(len(lanes), number * each)
        for i in range(number * each):
            write_bits(registers, start + i, lanes, columns[:, i], whole=mask is None)

    return load


def _elements_of(shape: Shape, registers: Registers, first: int, count: int, lanes: Lanes) -> NDArray[np.float32]:
    """So many 32-bit registers, as they are multiplied."""
    each = 4 // registers.data.dtype.itemsize
    if not 0 <= first <= len(registers.data) - count * each:
        raise ExecutionError(f"out of bounds: element {first} of {registers.name}, which has {len(registers.data)}")
    data = registers.data[first : first + count * each, lanes]
    if each == 2:
        return data.view(numpy_dtype(shape.dtype)).astype(np.float32)
    return elements(shape, data.view(np.uint32))


def _mma(node: Any, compiler: Compiler) -> Run:
    """Of (shape, layouts, types of A, B and C, and registers and offset of A, B and C, which is D as well)."""
    size, rows, columns, *kinds = (str(each.value) for each in node.args[:6])
    names = {"fp16": "f16", "bf16": "bf16", "tf32": "tf32"}
    what = f"mma {size} of {', '.join(kinds)}"
    if (rows, columns, kinds[2]) != ("row", "col", "fp32"):
        raise AnalysisError(f"{what}, which cannot be executed")
    shape = shape_of(size, {names.get(kind, kind) for kind in kinds[:2]}, what)
    a, b, c = (_registers(node.args[i], compiler) for i in (6, 8, 10))
    offsets = [compiler.code(node.args[i]) for i in (7, 9, 11)]
    machine = compiler.machine

    def multiply(mask: Mask) -> None:
        lanes = machine.warps(mask)
        at, bt, ct = (same(code(mask), lanes) for code in offsets)
        tell(machine, shape, lanes)
        if not machine.checked:
            for i in range(4):
                write_bits(c, ct + i, lanes, np.zeros(len(lanes), np.uint32), whole=mask is None)
            return
        found = multiplied(
            shape,
            _elements_of(shape, a, at, shape.a, lanes),
            _elements_of(shape, b, bt, shape.b, lanes),
            c.data[ct : ct + 4, lanes],
        )
        for i in range(4):
            bits = np.ascontiguousarray(found[i]).view(np.uint32)
            write_bits(c, ct + i, lanes, bits, whole=mask is None)

    return multiply


INTRINSICS: dict[str, Callable[[Any, Compiler], Run]] = {
    "tirx.s_tir.cp_async_raw": _async_copy,
    "tirx.mma_fill_legacy": _fill,
    "tirx.ptx_legacy.ldmatrix": _ldmatrix,
    "tirx.ptx_legacy.mma": _mma,
}
