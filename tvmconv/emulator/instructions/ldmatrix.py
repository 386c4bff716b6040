"""Instructions with which a warp moves 8 × 8 matrices of 16-bit elements: ldmatrix and stmatrix.

Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.instructions.operands import DestinationOperands, PtxCall, SourceOperands, resolve_address
from tvmconv.emulator.lane_code import StatementCode, TirTranslator
from tvmconv.emulator.state import EmulatorState, Mask
from tvmconv.emulator.threads import Lanes
from tvmconv.target import WARP_SIZE

_ROW_BYTES = 16  # bytes per matrix row


def _select_row_addresses(
    state: EmulatorState, addresses: NDArray[np.int64], lanes: Lanes, num_matrices: int
) -> tuple[Any, Any]:
    """Return the row addresses by (warp, matrix, row), and the lanes that provide them.

    Lane 8 i + j of the warp provides the address of row j of matrix i.
    """
    address_lanes = lanes.reshape(-1, WARP_SIZE)[:, : 8 * num_matrices].reshape(-1)
    row_addresses = addresses.reshape(-1, WARP_SIZE)[:, : 8 * num_matrices].reshape(-1, num_matrices, 8)
    return row_addresses, address_lanes


def load_matrices(
    state: EmulatorState,
    name: str,
    row_starts: NDArray[np.int64],
    lanes: Lanes,
    num_matrices: int,
    *,
    is_transposed: bool,
) -> NDArray[np.uint32]:
    """Return each lane's elements of 8 × 8 matrices of 16-bit elements, of shape (lanes, matrices).

    Lane l gets elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, or of column l / 4 if transposed.
    """
    row_addresses, address_lanes = _select_row_addresses(state, row_starts, lanes, num_matrices)
    shared = state.shared
    shared.find_units(row_addresses.reshape(-1), address_lanes, _ROW_BYTES)  # checks bounds and alignment of whole rows
    state.notify("shared", "load", name, address_lanes, row_addresses.reshape(-1), _ROW_BYTES, 2)
    if not state.is_checked:
        return np.zeros((len(lanes), num_matrices), np.uint32)
    lane = np.arange(WARP_SIZE)
    warp_lanes = lanes.reshape(-1, WARP_SIZE)[:, None, :]
    if is_transposed:
        halves = []
        for half_index in range(2):
            unit_addresses = row_addresses[:, :, 2 * (lane % 4) + half_index] + lane // 4 * 2
            reading_lanes = np.broadcast_to(warp_lanes, unit_addresses.shape).reshape(-1)
            unit_indices = shared.find_units(unit_addresses.reshape(-1), reading_lanes, 2)
            loaded = shared.read(unit_indices, reading_lanes, is_whole_warp=True)
            halves.append(loaded.reshape(unit_addresses.shape).astype(np.uint32))
        words = halves[0] | halves[1] << np.uint32(16)
    else:
        unit_addresses = row_addresses[:, :, lane // 4] + lane % 4 * 4
        reading_lanes = np.broadcast_to(warp_lanes, unit_addresses.shape).reshape(-1)
        unit_indices = shared.find_units(unit_addresses.reshape(-1), reading_lanes, 4)
        loaded = np.ascontiguousarray(shared.read(unit_indices, reading_lanes, is_whole_warp=True))
        words = loaded.view(np.uint32).reshape(unit_addresses.shape)
    return np.ascontiguousarray(words.transpose(0, 2, 1).reshape(len(lanes), num_matrices))


def _translate_ldmatrix(call: PtxCall, translator: TirTranslator) -> StatementCode:
    num_matrices = int(call.modifiers[3][1:])
    destinations = DestinationOperands(call.operands[:num_matrices], translator)
    address, state = translator.translate_expression(call.operands[num_matrices]), translator.state
    is_transposed = "trans" in call.modifiers

    def load(mask: Mask) -> None:
        lanes = state.require_whole_warps(mask)
        location = resolve_address(call, state.evaluate_data_independent(address, mask), state, lanes)

        def load_words() -> NDArray[np.uint32]:
            addresses = location.byte_offsets
            return load_matrices(state, location.name, addresses, lanes, num_matrices, is_transposed=is_transposed)

        if not state.is_checked:
            return destinations.mark_written(mask, lanes, state.defer_access(lambda reading_mask: load_words()))
        destinations.write(mask, lanes, load_words())

    return load


def _translate_stmatrix(call: PtxCall, translator: TirTranslator) -> StatementCode:
    num_matrices = int(call.modifiers[3][1:])
    address, state = translator.translate_expression(call.operands[0]), translator.state
    sources = SourceOperands(call.operands[1 : 1 + num_matrices], translator)
    is_transposed = "trans" in call.modifiers

    def store(mask: Mask) -> None:
        lanes = state.require_whole_warps(mask)
        location = resolve_address(call, state.evaluate_data_independent(address, mask), state, lanes)
        row_addresses, address_lanes = _select_row_addresses(state, location.byte_offsets, lanes, num_matrices)
        shared = state.shared
        shared.find_units(row_addresses.reshape(-1), address_lanes, _ROW_BYTES)
        state.notify("shared", "store", location.name, address_lanes, row_addresses.reshape(-1), _ROW_BYTES, 2)
        if not state.is_checked:
            return sources.evaluate(mask)
        words = sources.read(mask, lanes, 4).reshape(num_matrices, -1, WARP_SIZE).transpose(1, 0, 2)
        lane = np.arange(WARP_SIZE)
        writing_lanes = np.broadcast_to(lanes.reshape(-1, WARP_SIZE)[:, None, :], words.shape).reshape(-1)
        if is_transposed:
            for half_index in range(2):
                addresses = row_addresses[:, :, 2 * (lane % 4) + half_index] + lane // 4 * 2
                half = (words >> np.uint32(16 * half_index)).astype(np.uint16)
                units = shared.find_units(addresses.reshape(-1), writing_lanes, 2)
                shared.write(units, writing_lanes, half.reshape(-1, 1))
        else:
            addresses = row_addresses[:, :, lane // 4] + lane % 4 * 4
            data = np.ascontiguousarray(words.reshape(-1, 1)).view(f"u{shared.unit_bytes}")
            shared.write(shared.find_units(addresses.reshape(-1), writing_lanes, 4), writing_lanes, data)

    return store


INSTRUCTIONS: dict[str, Callable[[PtxCall, TirTranslator], StatementCode]] = {
    "ldmatrix": _translate_ldmatrix,
    "stmatrix": _translate_stmatrix,
}
