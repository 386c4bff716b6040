"""Copies by the Tensor Memory Accelerator.

A copy to shared memory completes as late as possible, when no thread can continue without it. Source: PTX ISA,
"cp.async.bulk.tensor".
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.addresses import CHUNK_BYTES
from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions.operands import Instruction, executes, translates
from tvmconv.emulator.instructions.tma_boxes import BoxWords, count_rows, list_words, swizzle_addresses
from tvmconv.emulator.lane_code import StatementCode
from tvmconv.emulator.memory.arrays import TensorMapArray
from tvmconv.emulator.memory.shared_memory import MemoryAddress
from tvmconv.emulator.observers import AccessKind, MemoryAccess
from tvmconv.emulator.state import EmulatorState, Mask
from tvmconv.emulator.threads import Lanes
from tvmconv.errors import AnalysisError

TILE_ALIGNMENT_BYTES = 128  # alignment of a tile in shared memory


class _BoxCopy:
    """Copy between shared memory and a box of an array.

    Args:
        op: Instruction.
        map_operand: Index of the tensor map operand, which the coordinates follow.
        offsets_operand: Index of the first im2col offset after the coordinates; None in tiled mode.
    """

    def __init__(self, op: Instruction, map_operand: int, offsets_operand: int | None = None) -> None:
        num_axes = next(int(modifier[0]) for modifier in op.modifiers if modifier in ("1d", "2d", "3d", "4d", "5d"))
        self.next_operand = map_operand + 1 + num_axes
        self._op, array_map = op, op.pointer(map_operand).memory
        if not isinstance(array_map, TensorMapArray):
            raise AnalysisError(f"the operand {op.call.operands[map_operand]} of {op} is not a tensor map")
        self.array, self.tensor_map, self._array_map = array_map.array, array_map.tensor_map, array_map
        if len(self.tensor_map.extents) != num_axes or self.tensor_map.is_im2col != (offsets_operand is not None):
            raise ExecutionError(f"{op} does not match the number of axes or the mode of {self.tensor_map}")
        self._coordinates = range(map_operand + 1, self.next_operand)
        first_offset = self.next_operand + (offsets_operand or 0)
        self._offsets = range(first_offset, first_offset + num_axes - 2) if offsets_operand is not None else None
        self._num_rows = math.prod(count_rows(self.tensor_map))
        self._row_bytes = self.tensor_map.box[0] * self.array.dtype.itemsize
        self._is_store = op.call.name.endswith("s2g")
        self.nbytes = self._num_rows * self._row_bytes

    def list_words(self, mask: Mask) -> BoxWords:
        """Return the words of each lane's copy; hardware refuses to store from a negative coordinate on."""

        def evaluate(operands: range) -> NDArray[np.int64]:
            return np.stack([self._op.values(index, mask).astype(np.int64) for index in operands], axis=1)

        offsets = None if self._offsets is None else evaluate(self._offsets)
        coordinates = evaluate(self._coordinates)
        if self._is_store and (coordinates < 0).any():
            raise ExecutionError(f"{self._op} to the negative coordinate {int(coordinates.min())} of {self.array.name}")
        return list_words(self._array_map, coordinates, offsets)

    def find_chunks(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the addresses of the chunks of copies at shared-memory addresses, of shape (copies, chunks).

        Rows that are narrower than the swizzle lie at its distance.
        """
        misaligned = addresses[addresses % TILE_ALIGNMENT_BYTES != 0]
        if misaligned.size:
            place = f"byte {int(misaligned[0])}, which is not a multiple of {TILE_ALIGNMENT_BYTES}"
            raise ExecutionError(f"misaligned: {self._op} of shared memory at {place}")
        row_pitch = max(self._row_bytes, self.tensor_map.swizzle)
        chunk_offsets = np.arange(self._num_rows)[:, None] * row_pitch + np.arange(0, self._row_bytes, CHUNK_BYTES)
        return swizzle_addresses(addresses[:, None] + chunk_offsets.reshape(-1), self.tensor_map.swizzle)

    def read_words(self, words: BoxWords) -> NDArray[np.uint8]:
        """Return the data of words of the array, zeros outside of it, of shape (copies, chunks, 16)."""
        data = self.array.raw_bytes.reshape(-1, words.word_bytes)[words.word_indices]
        data[~words.is_inside] = 0
        return data.reshape(len(data), -1, CHUNK_BYTES)

    def notify(self, kind: AccessKind, words: BoxWords, lanes: Lanes, chunks: NDArray[np.int64], owners: Lanes) -> None:
        """Notify the observer of array words, and of shared-memory chunks of the blocks of `owners`."""
        state, array, swizzle = self._op.state, self.array, self.tensor_map.swizzle
        if state.observer is None:
            return
        itemsize = array.dtype.itemsize
        access_lanes = np.broadcast_to(lanes[:, None, None], words.word_indices.shape)[words.is_inside]
        byte_offsets = words.word_indices[words.is_inside] * words.word_bytes
        state.observer.on_async_proxy_access(
            MemoryAccess(state.site, "global", kind, array.name, words.word_bytes, access_lanes, byte_offsets, itemsize)
        )
        name, access_lanes = state.find_buffer_name(int(chunks[0, 0])), np.repeat(owners, chunks.shape[1])
        shared_kind: AccessKind = "store" if kind == "load" else "load"
        access = access_lanes, chunks.reshape(-1), itemsize, None, swizzle, array.name
        state.observer.on_async_proxy_access(
            MemoryAccess(state.site, "shared", shared_kind, name, CHUNK_BYTES, *access)
        )


@translates("cp_async_bulk_tensor_g2s_cluster", "cp_async_bulk_tensor_g2s_cta")
@translates("cp_async_bulk_tensor_g2s_cluster_im2col", "cp_async_bulk_tensor_g2s_cta_im2col")
def _translate_load(op: Instruction) -> StatementCode:
    """cp.async.bulk.tensor.*.shared::cluster.global destination, map, coordinates, mbarrier{, offsets}{, CTA mask}."""
    is_im2col = "im2col" in op.modifiers
    if any(modifier.startswith("im2col::") for modifier in op.modifiers) or "tile::gather4" in op.modifiers:
        raise op.unsupported()
    copy = _BoxCopy(op, 1, 1 if is_im2col else None)
    state, shared, barriers = op.state, op.state.shared, op.state.mbarriers
    mask_operand = copy.next_operand + 1 + len(copy.tensor_map.lower_corner)
    is_multicast = "multicast::cluster" in op.modifiers

    def load(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        location, barrier_location = op.address(0, mask), op.address(copy.next_operand, mask)
        words = copy.list_words(mask) if state.is_checked or state.observes_async_proxy else None
        data = copy.read_words(words) if words and state.is_checked else None
        cta_mask = op.values(mask_operand, mask) if is_multicast else None
        copy_indices, blocks = _select_target_blocks(state, location, lanes, cta_mask)
        copy_lanes, offsets = lanes[copy_indices], barrier_location.byte_offsets[copy_indices]
        mbarrier_address = MemoryAddress(shared, offsets, barrier_location.name, blocks)
        mbarriers = barriers.find_mbarriers(mbarrier_address, copy_lanes, is_async_proxy=True)
        for mbarrier in mbarriers:
            mbarrier.copies_in_flight += 1
        if words:
            chunk_addresses = copy.find_chunks(location.byte_offsets[copy_indices])
            chunks = shared.find_chunks(chunk_addresses, blocks)
            shared.start_async_write(chunks, copy_lanes, np.array([mbarrier.writer_agent for mbarrier in mbarriers]))
            owners = blocks * state.threads.lanes_per_block + copy_lanes % state.threads.lanes_per_block
            copy.notify("load", words, lanes, chunk_addresses, owners)

        def complete() -> None:
            if data is not None:
                shared.complete_copy(chunks, data[copy_indices])
            for mbarrier in mbarriers:
                barriers.complete_tx(mbarrier, copy.nbytes)

        state.pending_copies.append(complete)

    return load


def _select_target_blocks(
    state: EmulatorState, location: MemoryAddress, lanes: Lanes, cta_mask: NDArray[Any] | None
) -> tuple[NDArray[np.intp], Lanes]:
    """Return the index of the copy and the destination block of each transfer; multicast copies have several."""
    own_blocks = lanes // state.threads.lanes_per_block
    if cta_mask is None:
        return np.arange(len(lanes)), own_blocks if location.target_blocks is None else location.target_blocks
    cluster_size = state.threads.cluster_size
    bits = cta_mask.astype(np.int64)[:, None] >> np.arange(16) & 1
    if bits[:, cluster_size:].any():
        last_rank = int(np.flatnonzero(bits.any(axis=0))[-1])
        raise ExecutionError(f"a copy to the block of rank {last_rank} exceeds the cluster of {cluster_size} blocks")
    copy_indices, cta_rank = np.nonzero(bits)
    return copy_indices, own_blocks[copy_indices] - own_blocks[copy_indices] % cluster_size + cta_rank


@translates("cp_async_bulk_tensor_s2g")
def _translate_store(op: Instruction) -> StatementCode:
    """cp.async.bulk.tensor.*.global.shared::cta map, coordinates, source."""
    if "tile::scatter4" in op.modifiers:
        raise op.unsupported()
    copy, state = _BoxCopy(op, 0), op.state

    def store(mask: Mask) -> None:
        lanes, location = state.find_lanes(mask), op.address(copy.next_operand, mask, "shared")
        if not (state.is_checked or state.observes_async_proxy):
            return
        chunk_addresses, words = copy.find_chunks(location.byte_offsets), copy.list_words(mask)
        copy.notify("store", words, lanes, chunk_addresses, lanes)
        if not state.is_checked:
            return
        chunks = state.shared.find_chunks(chunk_addresses, lanes // state.threads.lanes_per_block)
        loaded = state.shared.read_async(chunks, lanes[:, None], "a bulk copy")
        word_data = np.ascontiguousarray(loaded).reshape(*words.word_indices.shape, words.word_bytes)
        array_words = copy.array.raw_bytes.reshape(-1, words.word_bytes)
        array_words[words.word_indices[words.is_inside]] = word_data[words.is_inside]
        state.bulk_copy_groups.issue(lanes, chunks)

    return store


@executes("cp_async_bulk_commit_group")
def _commit_group(op: Instruction, mask: Mask) -> None:
    op.state.bulk_copy_groups.commit_group(op.state.find_lanes(mask))


@executes("cp_async_bulk_wait_group")
def _wait_group(op: Instruction, mask: Mask) -> None:
    op.state.bulk_copy_groups.wait_group(op.state.find_lanes(mask), op.constant(0))
