"""Asynchronous copies of threads from global to shared memory: cp.async.

Source: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions.operands import Instruction, executes
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


@executes(*(f"cp_async_{cop}{tail}" for cop in ("ca", "cg") for tail in ("", "_src_size", "_ignore_src")))
def _copy(op: Instruction, mask: Mask) -> None:
    """cp.async target, source, bytes{, bytes to read | condition to read none}{, cache policy}."""
    lanes, nbytes = op.state.find_lanes(mask), op.constant(2)
    source_bytes = np.full(len(lanes), nbytes)
    if op.num_operands - ("L2::cache_hint" in op.modifiers) > 3:
        source_bytes = op.values(3, mask).astype(np.int64)
        if op.call.name.endswith("ignore_src"):
            source_bytes = np.where(source_bytes != 0, 0, nbytes)
    start_async_copy(
        op.state, op.address(0, mask, "shared"), op.address(1, mask, "global"), nbytes, source_bytes, lanes
    )


@executes("cp_async_commit_group")
def _commit_group(op: Instruction, mask: Mask) -> None:
    op.state.shared.commit_group(op.state.find_lanes(mask))


@executes("cp_async_wait_group")
def _wait_group(op: Instruction, mask: Mask) -> None:
    op.state.shared.wait_group(op.state.find_lanes(mask), op.constant(0))


@executes("cp_async_wait_all")
def _wait_all(op: Instruction, mask: Mask) -> None:
    lanes = op.state.find_lanes(mask)
    op.state.shared.commit_group(lanes)
    op.state.shared.wait_group(lanes, 0)
