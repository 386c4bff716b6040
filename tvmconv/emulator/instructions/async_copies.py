"""Asynchronous copies of threads from global to shared memory: cp.async.

Source: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions.operands import PtxCall, resolve_address
from tvmconv.emulator.lane_code import Pointer, StatementCode, TirTranslator
from tvmconv.emulator.memory.arrays import GlobalArray
from tvmconv.emulator.memory.shared_memory import MemoryAddress, SharedMemory
from tvmconv.emulator.state import EmulatorState, Mask
from tvmconv.emulator.threads import Lanes


def start_async_copy(
    state: EmulatorState,
    target: MemoryAddress,
    source: MemoryAddress,
    nbytes: int,
    source_bytes: NDArray[np.int64],
    lanes: Lanes,
) -> None:
    """Start asynchronous copies of `source_bytes` bytes per lane, padded with zeros to `nbytes` bytes."""
    if not isinstance(target.memory, SharedMemory) or not isinstance(source.memory, GlobalArray):
        raise ExecutionError(
            f"an asynchronous copy is from {source.name} to {target.name}, not from global to shared memory"
        )
    array = source.memory
    if ((source_bytes < 0) | (source_bytes > nbytes)).any():
        raise ExecutionError(f"an asynchronous copy of {nbytes} bytes must read 0 to {nbytes} bytes of its source")
    unit_indices = target.memory.find_units(target.byte_offsets, lanes, nbytes)
    if state.is_checked:
        data = _read_sources(array, source.byte_offsets, nbytes, source_bytes)
        target.memory.start_copy(unit_indices, lanes, data.view(f"u{target.memory.unit_bytes}"))
    has_source = source_bytes > 0
    itemsize = array.dtype.itemsize
    sources = np.where(has_source, source.byte_offsets, -1)
    state.notify("shared", "store", target.name, lanes, target.byte_offsets, nbytes, itemsize, sources)
    state.notify("global", "load", source.name, lanes[has_source], source.byte_offsets[has_source], nbytes, itemsize)


def _read_sources(
    array: GlobalArray, byte_offsets: NDArray[np.int64], nbytes: int, source_bytes: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Return the data of copies of `nbytes` bytes, of which only the first `source_bytes` are read."""
    data = np.zeros((len(byte_offsets), nbytes), np.uint8)
    is_full = source_bytes == nbytes
    if is_full.any():
        data[is_full] = array.read(byte_offsets[is_full], nbytes)
    for row in np.flatnonzero(~is_full & (source_bytes > 0)):
        first, length = int(byte_offsets[row]), int(source_bytes[row])
        if first < 0 or first + length > array.nbytes:
            raise ExecutionError(f"out of bounds: {length} bytes at byte {first} of {array.name}")
        data[row, :length] = array.raw_bytes[first : first + length]
    return data


def _translate_cp_async(call: PtxCall, translator: TirTranslator) -> StatementCode:
    operands = call.operands
    if "L2::cache_hint" in call.modifiers:
        operands = operands[:-1]
    target_code, source_code = map(translator.translate_expression, operands[:2])
    nbytes = int(operands[2])
    size_code = translator.translate_expression(operands[3]) if len(operands) > 3 else None
    ignores_source = call.name.endswith("ignore_src")
    state = translator.state
    shared_call = PtxCall(call.name, (), None, ("shared",))

    def copy(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        source_bytes = np.full(len(lanes), nbytes)
        if size_code is not None:
            source_bytes = state.evaluate_lanes(size_code, mask, lanes).astype(np.int64)
            source_bytes = np.where(source_bytes != 0, 0, nbytes) if ignores_source else source_bytes
        pointer = state.evaluate_data_independent(source_code, mask)
        if not isinstance(pointer, Pointer) or not isinstance(pointer.memory, GlobalArray):
            raise ExecutionError(f"the source of {call} is not an array in global memory")
        offsets = state.select_lane_values(pointer.byte_offset, lanes).astype(np.int64)
        source = MemoryAddress(pointer.memory, offsets, pointer.name)
        target = resolve_address(shared_call, state.evaluate_data_independent(target_code, mask), state, lanes)
        start_async_copy(state, target, source, nbytes, source_bytes, lanes)

    return copy


def _translate_commit_group(call: PtxCall, translator: TirTranslator) -> StatementCode:
    state = translator.state
    return lambda mask: state.shared.commit_group(state.find_lanes(mask))


def _translate_wait_group(call: PtxCall, translator: TirTranslator) -> StatementCode:
    state, max_pending_groups = translator.state, int(call.operands[0])
    return lambda mask: state.shared.wait_group(state.find_lanes(mask), max_pending_groups)


def _translate_wait_all(call: PtxCall, translator: TirTranslator) -> StatementCode:
    state = translator.state

    def wait(mask: Mask) -> None:
        state.shared.commit_group(state.find_lanes(mask))
        state.shared.wait_group(state.find_lanes(mask), 0)

    return wait


INSTRUCTIONS: dict[str, Callable[[PtxCall, TirTranslator], StatementCode]] = {
    "cp_async_commit_group": _translate_commit_group,
    "cp_async_wait_group": _translate_wait_group,
    "cp_async_wait_all": _translate_wait_all,
    **{
        f"cp_async_{cop}{tail}": _translate_cp_async
        for cop in ("ca", "cg")
        for tail in ("", "_src_size", "_ignore_src")
    },
}
