"""Instructions by which a warp moves matrices of 8 × 8 elements of 16 bits: ldmatrix and stmatrix.

Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.compiled import Compiler, Run
from tvmconv.analysis.emulation.instructions.operands import Call, Destinations, Sources, address_of
from tvmconv.analysis.emulation.machine import Machine, Mask
from tvmconv.analysis.emulation.threads import Lanes
from tvmconv.gpu import WARP

_ROW_BYTES = 16  # of a matrix that ldmatrix and stmatrix move


def _matrix_rows(machine: Machine, at: NDArray[np.int64], lanes: Lanes, number: int) -> tuple[Any, Any]:
    """The rows that ldmatrix and stmatrix move: their addresses by (warp, matrix, row), and who gives them.

    The address of row j of matrix i is what lane 8 i + j of the warp gives.
    """
    giving = lanes.reshape(-1, WARP)[:, : 8 * number]
    return at.reshape(-1, WARP)[:, : 8 * number].reshape(-1, number, 8), giving.reshape(-1)


def load_matrix(
    machine: Machine, name: str, at: NDArray[np.int64], lanes: Lanes, number: int, *, transposed: bool
) -> NDArray[np.uint32]:
    """What each lane gets of 8 × 8 matrices of 16-bit elements, shape (lanes, matrices).

    Lane l gets of row l / 4 the elements 2 (l % 4) and the next; transposed, of column l / 4.
    """
    rows, giving = _matrix_rows(machine, at, lanes, number)
    shared = machine.shared
    shared.at(rows.reshape(-1), giving, _ROW_BYTES)  # in bounds and aligned, each row as a whole
    machine.tell("shared", "load", name, giving, rows.reshape(-1), _ROW_BYTES, 2)
    if not machine.checked:
        return np.zeros((len(lanes), number), np.uint32)
    lane = np.arange(WARP)
    owners = lanes.reshape(-1, WARP)[:, None, :]
    if transposed:
        halves = []
        for h in range(2):
            addresses = rows[:, :, 2 * (lane % 4) + h] + lane // 4 * 2
            units = shared.at(addresses.reshape(-1), np.broadcast_to(owners, addresses.shape).reshape(-1), 2)
            found = shared.read(units, np.broadcast_to(owners, addresses.shape).reshape(-1), whole_warp=True)
            halves.append(found.reshape(addresses.shape).astype(np.uint32))
        words = halves[0] | halves[1] << np.uint32(16)
    else:
        addresses = rows[:, :, lane // 4] + lane % 4 * 4
        who = np.broadcast_to(owners, addresses.shape).reshape(-1)
        units = shared.at(addresses.reshape(-1), who, 4)
        found = np.ascontiguousarray(shared.read(units, who, whole_warp=True))
        words = found.view(np.uint32).reshape(addresses.shape)
    return np.ascontiguousarray(words.transpose(0, 2, 1).reshape(len(lanes), number))


def _ldmatrix(call: Call, compiler: Compiler) -> Run:
    number = int(call.modifiers[3][1:])
    destinations = Destinations(call.operands[:number], compiler)
    address, machine = compiler.code(call.operands[number]), compiler.machine
    transposed = "trans" in call.modifiers

    def load(mask: Mask) -> None:
        lanes = machine.warps(mask)
        where = address_of(call, machine.decided(address, mask), machine, lanes)

        def matrices() -> NDArray[np.uint32]:
            return load_matrix(machine, where.name, where.at, lanes, number, transposed=transposed)

        if not machine.checked:
            return destinations.mark(mask, lanes, machine.later(lambda reading: matrices()))
        found = matrices()
        destinations.write(mask, lanes, found)

    return load


def _stmatrix(call: Call, compiler: Compiler) -> Run:
    number = int(call.modifiers[3][1:])
    address, machine = compiler.code(call.operands[0]), compiler.machine
    sources = Sources(call.operands[1 : 1 + number], compiler)
    transposed = "trans" in call.modifiers

    def store(mask: Mask) -> None:
        lanes = machine.warps(mask)
        where = address_of(call, machine.decided(address, mask), machine, lanes)
        rows, giving = _matrix_rows(machine, where.at, lanes, number)
        shared = machine.shared
        shared.at(rows.reshape(-1), giving, _ROW_BYTES)
        machine.tell("shared", "store", where.name, giving, rows.reshape(-1), _ROW_BYTES, 2)
        if not machine.checked:
            return sources.touch(mask)
        words = sources.read(mask, lanes, 4).reshape(number, -1, WARP).transpose(1, 0, 2)
        lane = np.arange(WARP)
        owners = np.broadcast_to(lanes.reshape(-1, WARP)[:, None, :], words.shape).reshape(-1)
        if transposed:
            for h in range(2):
                addresses = rows[:, :, 2 * (lane % 4) + h] + lane // 4 * 2
                half = (words >> np.uint32(16 * h)).astype(np.uint16)
                shared.write(shared.at(addresses.reshape(-1), owners, 2), owners, half.reshape(-1, 1))
        else:
            addresses = rows[:, :, lane // 4] + lane % 4 * 4
            given = np.ascontiguousarray(words.reshape(-1, 1)).view(f"u{shared.unit}")
            shared.write(shared.at(addresses.reshape(-1), owners, 4), owners, given)

    return store


INSTRUCTIONS: dict[str, Callable[[Call, Compiler], Run]] = {"ldmatrix": _ldmatrix, "stmatrix": _stmatrix}
