"""Multiplication by warpgroups, executed: wgmma.

The result is there at once, in registers that may not be touched before it is waited for. Source: PTX ISA,
"Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", with its "Matrix Descriptor Format" and
"Register Fragments and Shared Memory Matrix Layouts".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.addresses import CHUNK
from tvmconv.analysis.emulation.compiled import Code, Compiler, Run
from tvmconv.analysis.emulation.errors import ExecutionError, RaceError
from tvmconv.analysis.emulation.instructions.boxes import swizzled
from tvmconv.analysis.emulation.instructions.operands import Call, same
from tvmconv.analysis.emulation.machine import Machine, Mask
from tvmconv.analysis.emulation.memory.registers import Registers
from tvmconv.analysis.emulation.watch import Accessed
from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARP, WARPGROUP
from tvmconv.workloads.dtypes import numpy_dtype

M, K_BYTES = 64, 32
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "tf32": "float32", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}
_FIELD = 0x3FFF  # of a descriptor: addresses and distances by 16 bytes


def _rows(descriptor: NDArray[np.uint64], count: int, what: str) -> tuple[NDArray[np.int64], int]:
    """Where the 2 chunks of 16 bytes of each row of an operand lie.

    Args:
        descriptor: of the operand, K-major, one for each warpgroup.
        count: rows of it.
        what: the instruction, in messages.

    Returns:
        Addresses in shared memory, shape (warpgroups, rows, 2), and the bytes of the swizzle.
    """

    def field(shift: int, bits: int = _FIELD) -> NDArray[np.int64]:
        return ((descriptor >> np.uint64(shift)) & np.uint64(bits)).astype(np.int64)

    start, leading, stride = (field(shift)[:, None, None] * CHUNK for shift in (0, 16, 32))
    kinds = np.unique(field(62, 3))
    if len(kinds) > 1 or field(49, 7).any():
        raise AnalysisError(f"{what} on operands of several swizzles, or with a base offset")
    swizzle = _SWIZZLES[int(kinds[0])]
    row, chunk = np.arange(count)[:, None], np.arange(K_BYTES // CHUNK)
    if swizzle == 0:  # by core matrices of 8 rows of 16 bytes
        return start + row // 8 * stride + row % 8 * CHUNK + chunk * leading, swizzle
    return swizzled(start + row // 8 * stride + row % 8 * swizzle + chunk * CHUNK, swizzle), swizzle


def _values(found: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """The elements of rows, as they are multiplied, of shape (warpgroups, rows, k)."""
    flat = np.ascontiguousarray(found).reshape(*found.shape[:2], -1)
    if kind == "tf32":  # of float32 the tensor cores read 10 bits of mantissa, and no more
        return (flat.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return flat.view(numpy_dtype(_DTYPES[kind])).astype(np.float32)


@dataclass(frozen=True)
class _Registers:
    """The accumulators of an instruction.

    Attributes:
        registers: the buffer.
        indices: of its elements.
    """

    registers: Registers
    indices: list[Code]
    _known: dict[tuple[int, ...], NDArray[np.intp]] = field(default_factory=dict)

    def rows(self, lanes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Which elements of the buffer."""
        key = tuple([same(index(None), lanes) for index in self.indices])
        if key not in self._known:
            found = np.array(key)
            if found.min() < 0 or found.max() >= len(self.registers.data):
                raise ExecutionError(f"out of bounds: accumulators in {self.registers.name}")
            self._known[key] = found
        return self._known[key]


def _spread(sums: NDArray[np.float32]) -> NDArray[np.float32]:
    """D, of shape (warpgroups, 64, n), as registers have it, (n / 2, lanes).

    Register i of thread t of a warpgroup has row 16 (t / 32) + t % 32 / 4 + 8 (i / 2 % 2) and column 8 (i / 4) +
    2 (t % 4) + i % 2.
    """
    groups, _, n = sums.shape
    by = sums.reshape(groups, 4, 2, 8, n // 8, 4, 2)  # group, warp, half, row; column of 8, pair, one of it
    return by.transpose(4, 2, 6, 0, 1, 3, 5).reshape(n // 2, groups * WARPGROUP)


def _gathered(registers: NDArray[np.float32]) -> NDArray[np.float32]:
    """What `_spread` spreads."""
    n = len(registers) * 2
    by = registers.reshape(n // 8, 2, 2, -1, 4, 8, 4)
    return by.transpose(3, 4, 1, 5, 0, 6, 2).reshape(-1, M, n)


def _multiply(call: Call, compiler: Compiler) -> Run:
    """wgmma.mma_async.sync.aligned.m64nNkK.f32.A.B d, descriptor of A, of B, scale-d, signs{, transposed}."""
    size, result, *kinds = call.modifiers[3:6] + call.modifiers[6:7]
    n = int(size.removeprefix("m64n").partition("k")[0])
    if result != "f32" or len(kinds) != 2 or not set(kinds) <= set(_DTYPES):
        raise AnalysisError(f"{call}, which cannot be executed")
    into = [compiler.registers(operand) for operand in call.operands[: n // 2]]
    if len({id(registers) for registers, _ in into}) != 1:
        raise AnalysisError(f"{call} into registers of several buffers")
    machine = compiler.machine
    accumulators = _Registers(into[0][0], [index for _, index in into])
    left, right, keeps = (compiler.code(operand) for operand in call.operands[n // 2 : n // 2 + 3])
    signs = [int(operand) for operand in call.operands[n // 2 + 3 : n // 2 + 5]]
    if any(int(operand) for operand in call.operands[n // 2 + 5 :]):
        raise AnalysisError(f"{call} of operands that are not K-major")
    k = K_BYTES // numpy_dtype(_DTYPES[kinds[0]]).itemsize
    operands = ((left, M, kinds[0]), (right, n, kinds[1]))

    def tell(lanes: NDArray[np.intp]) -> None:
        if machine.watch is not None:
            for name in ("Mul", "Add"):
                machine.watch.operation(name, lanes, M * n * k // WARPGROUP, 4)

    def where_of(code: Code, count: int, kind: str, mask: Mask, groups: NDArray[np.intp]) -> NDArray[np.int64]:
        descriptors = _descriptors(machine, machine.decided(code, mask), groups, call)
        where, swizzle = _rows(descriptors, count, str(call))
        _tell(machine, where, groups, kind, swizzle)
        return where

    groups_of: dict[bytes, NDArray[np.intp]] = {}

    def known_groups(mask: Mask) -> NDArray[np.intp]:
        key = b"" if mask is None else mask.tobytes()
        if key not in groups_of:
            groups_of[key] = machine.warpgroups(mask)
        return groups_of[key]

    def pretend(mask: Mask) -> None:
        """What is accessed, and not what comes of it."""
        groups = known_groups(mask)
        lanes = groups.reshape(-1)
        rows = accumulators.rows(lanes)
        accumulators.registers.written[rows[:, None], lanes] = True
        accumulators.registers.loaded[rows] = True
        if machine.tells_bulk:
            for operand in operands:
                where_of(*operand, mask, groups)
        tell(lanes)

    if not machine.checked:
        return pretend
    sign = np.float32(signs[0] * signs[1])
    watched = machine.multiplications.accumulators(accumulators.registers)
    data = accumulators.registers.data

    def multiply(mask: Mask) -> None:
        groups = machine.warpgroups(mask)
        lanes = groups.reshape(-1)
        rows = accumulators.rows(lanes)
        if watched.dirty[lanes // WARP].any():
            raise RaceError(f"race: {call} into {watched.name} with no wgmma.fence behind what accessed it before")
        blocks = groups[:, 0] // machine.threads.padded
        chunks, values = [], []
        for code, count, kind in operands:
            where = where_of(code, count, kind, mask, groups)
            at = machine.shared.chunks(where.reshape(len(groups), -1), blocks)
            found = machine.shared.read_async(at, groups, "wgmma")
            values.append(_values(found.reshape(len(groups), count, K_BYTES), kind))
            chunks.append(at)
        sums = np.matmul(values[0], values[1].transpose(0, 2, 1)) * sign
        keep = machine.rows(keeps(mask), lanes).astype(bool).reshape(groups.shape)
        if (keep != keep[:, :1]).any():
            raise ExecutionError(f"{call} with a predicate that differs within a warpgroup")
        if keep.any():
            before = _gathered(data[rows[:, None], lanes])
            sums = sums + np.where(keep[:, :1, None], before, np.float32(0))
        data[rows[:, None], lanes] = _spread(sums)
        accumulators.registers.written[rows[:, None], lanes] = True
        accumulators.registers.loaded[rows] = True
        machine.multiplications.issue(groups, np.concatenate(chunks, axis=1), watched, rows)
        tell(lanes)

    return multiply


def _descriptors(machine: Machine, value: Any, groups: NDArray[np.intp], call: Call) -> NDArray[np.uint64]:
    """A descriptor for each warpgroup."""
    found = machine.rows(value, groups.reshape(-1)).astype(np.uint64).reshape(groups.shape)
    if (found != found[:, :1]).any():
        raise ExecutionError(f"{call} of descriptors that differ within a warpgroup")
    return found[:, 0]


def _tell(machine: Machine, where: NDArray[np.int64], groups: NDArray[np.intp], kind: str, swizzle: int) -> None:
    if machine.watch is not None:
        itemsize = numpy_dtype(_DTYPES[kind]).itemsize
        flat = where.reshape(len(groups), -1)
        lanes, at = np.repeat(groups[:, 0], flat.shape[1]), flat.reshape(-1)
        name = machine.buffer_at(int(flat[0, 0]))
        told = Accessed(machine.site, "shared", "load", name, CHUNK, lanes, at, itemsize, swizzle=swizzle)
        machine.watch.bulk(told)


def _fence(call: Call, compiler: Compiler) -> Run:
    machine = compiler.machine
    return lambda mask: machine.multiplications.fence(machine.warpgroups(mask).reshape(-1))


def _commit(call: Call, compiler: Compiler) -> Run:
    machine = compiler.machine
    return lambda mask: machine.multiplications.commit(machine.warpgroups(mask))


def _wait(call: Call, compiler: Compiler) -> Run:
    machine, pending = compiler.machine, int(call.operands[0])
    return lambda mask: machine.multiplications.wait(machine.warpgroups(mask), pending)


INSTRUCTIONS: dict[str, Callable[[Call, Compiler], Run]] = {
    "wgmma_f16_ss": _multiply,
    "wgmma_bf16_ss": _multiply,
    "wgmma_tf32_ss": _multiply,
    "wgmma_fp8_ss": _multiply,
    "wgmma_fence": _fence,
    "wgmma_commit_group": _commit,
    "wgmma_wait_group": _wait,
}
