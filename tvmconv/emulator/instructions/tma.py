"""Copies by the Tensor Memory Accelerator.

A copy to shared memory completes as late as possible, when no thread can continue without it. Source: PTX ISA,
"cp.async.bulk.tensor".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import ceil_div
from tvmconv.emulator.addresses import CHUNK_BYTES
from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions.operands import PtxCall, resolve_address, translate_no_op
from tvmconv.emulator.instructions.tma_boxes import (
    BoxWords,
    TmaBox,
    list_words,
    select_pixels,
    select_tiles,
    swizzle_addresses,
)
from tvmconv.emulator.lane_code import Pointer, StatementCode, TirTranslator
from tvmconv.emulator.memory.arrays import TensorMapArray
from tvmconv.emulator.memory.shared_memory import MemoryAddress
from tvmconv.emulator.observers import AccessKind, MemoryAccess
from tvmconv.emulator.state import EmulatorState, Mask
from tvmconv.emulator.threads import Lanes
from tvmconv.errors import AnalysisError

TILE_ALIGNMENT_BYTES = 128  # alignment of a tile in shared memory


class _TmaOperands:
    """Operands of a copy that select a box of an array.

    Args:
        call: Copy instruction.
        translator: Translator of the operands.
        map_operand: Index of the tensor map operand, which the coordinates follow.
        offsets_operand: Index of the first im2col offset after the coordinates; None in tiled mode.
    """

    def __init__(
        self, call: PtxCall, translator: TirTranslator, map_operand: int, offsets_operand: int | None = None
    ) -> None:
        num_axes = next(int(modifier[0]) for modifier in call.modifiers if modifier in ("1d", "2d", "3d", "4d", "5d"))
        self.next_operand = map_operand + 1 + num_axes
        self._call, self._state = call, translator.state
        pointer = translator.translate_expression(call.operands[map_operand])(None)
        if not isinstance(pointer, Pointer) or not isinstance(pointer.memory, TensorMapArray):
            raise AnalysisError(f"the operand {call.operands[map_operand]} of {call} is not a tensor map")
        self.array_map = pointer.memory
        tensor_map = self.array_map.tensor_map
        if len(tensor_map.extents) != num_axes or tensor_map.is_im2col != (offsets_operand is not None):
            raise ExecutionError(f"{call} does not match the number of axes or the mode of {tensor_map}")
        coordinates = call.operands[map_operand + 1 : self.next_operand]
        self._coordinate_codes = [translator.translate_expression(operand) for operand in coordinates]
        self._offset_codes = []
        if offsets_operand is not None:
            first_offset = self.next_operand + offsets_operand
            offsets = call.operands[first_offset : first_offset + num_axes - 2]
            self._offset_codes = [translator.translate_expression(operand) for operand in offsets]

    @property
    def nbytes(self) -> int:
        """Bytes per copy."""
        tensor_map = self.array_map.tensor_map
        steps = [1] * len(tensor_map.box) if tensor_map.is_im2col else tensor_map.element_strides
        num_rows = math.prod(ceil_div(*pair) for pair in list(zip(tensor_map.box, steps, strict=True))[1:])
        return tensor_map.box[0] * self.array_map.array.dtype.itemsize * num_rows

    def select_box(self, mask: Mask, lanes: Lanes) -> TmaBox:
        """Return the box of each lane's copy."""
        coordinates = self._evaluate_codes(self._coordinate_codes, mask, lanes)
        if not self._offset_codes:
            return select_tiles(self.array_map.tensor_map, coordinates)
        offsets = self._evaluate_codes(self._offset_codes, mask, lanes)
        return select_pixels(self.array_map.tensor_map, coordinates, offsets)

    def _evaluate_codes(self, codes: list[Callable[[Mask], Any]], mask: Mask, lanes: Lanes) -> NDArray[np.int64]:
        return np.stack([self._state.evaluate_lanes(code, mask, lanes).astype(np.int64) for code in codes], axis=1)

    def find_chunks(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the addresses of the chunks of copies at shared-memory addresses, of shape (copies, chunks)."""
        misaligned = addresses[addresses % TILE_ALIGNMENT_BYTES != 0]
        if misaligned.size:
            place = f"byte {int(misaligned[0])}, which is not a multiple of {TILE_ALIGNMENT_BYTES}"
            raise ExecutionError(f"misaligned: {self._call} of shared memory at {place}")
        chunk_addresses = addresses[:, None] + np.arange(0, self.nbytes, CHUNK_BYTES)
        return swizzle_addresses(chunk_addresses, self.array_map.tensor_map.swizzle)

    def read_words(self, words: BoxWords) -> NDArray[np.uint8]:
        """Return the data of words of the array, zeros outside of it, of shape (copies, chunks, 16)."""
        data = self.array_map.array.raw_bytes.reshape(-1, words.word_bytes)[words.word_indices]
        data[~words.is_inside] = 0
        return data.reshape(len(data), -1, CHUNK_BYTES)

    def notify(self, kind: Any, words: BoxWords, lanes: Lanes, chunks: NDArray[np.int64], owners: Lanes) -> None:
        """Notify the observer of array words, and of shared-memory chunks of the blocks of `owners`."""
        state, array = self._state, self.array_map.array
        if state.observer is None:
            return
        itemsize = array.dtype.itemsize
        access_lanes = np.broadcast_to(lanes[:, None, None], words.word_indices.shape)[words.is_inside]
        byte_offsets = words.word_indices[words.is_inside] * words.word_bytes
        state.observer.on_async_proxy_access(
            MemoryAccess(state.site, "global", kind, array.name, words.word_bytes, access_lanes, byte_offsets, itemsize)
        )
        shared_kind: AccessKind = "store" if kind == "load" else "load"
        name, access_lanes = state.find_buffer_name(int(chunks[0, 0])), np.repeat(owners, chunks.shape[1])
        byte_offsets = chunks.reshape(-1)
        event = MemoryAccess(state.site, "shared", shared_kind, name, CHUNK_BYTES, access_lanes, byte_offsets, itemsize)
        swizzle = self.array_map.tensor_map.swizzle
        state.observer.on_async_proxy_access(replace(event, swizzle_bytes=swizzle, global_array=array.name))


def _translate_load(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """cp.async.bulk.tensor.*.shared::cluster.global destination, map, coordinates, mbarrier{, offsets}{, CTA mask}."""
    is_im2col = "im2col" in call.modifiers
    if any(modifier.startswith("im2col::") for modifier in call.modifiers) or "tile::gather4" in call.modifiers:
        raise AnalysisError(f"{call} is not supported by the emulator")
    operands = _TmaOperands(call, translator, 1, 1 if is_im2col else None)
    state, shared, barriers = translator.state, translator.state.shared, translator.state.mbarriers
    target_code = translator.translate_expression(call.operands[0])
    barrier_code = translator.translate_expression(call.operands[operands.next_operand])
    mask_operand = operands.next_operand + 1 + (len(operands.array_map.tensor_map.lower_corner) if is_im2col else 0)
    is_multicast = "multicast::cluster" in call.modifiers
    cta_mask_code = translator.translate_expression(call.operands[mask_operand]) if is_multicast else None

    def load(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        location, barrier_location = (
            resolve_address(call, state.evaluate_data_independent(code, mask), state, lanes)
            for code in (target_code, barrier_code)
        )
        needs_words = state.is_checked or state.observes_async_proxy
        words = list_words(operands.array_map, operands.select_box(mask, lanes)) if needs_words else None
        data = operands.read_words(words) if words and state.is_checked else None
        cta_mask = state.evaluate_data_independent(cta_mask_code, mask) if cta_mask_code else None
        copy_indices, blocks = _select_target_blocks(state, location, lanes, cta_mask)
        copy_lanes = lanes[copy_indices]
        offsets = barrier_location.byte_offsets[copy_indices]
        mbarrier_address = MemoryAddress(shared, offsets, barrier_location.name, blocks)
        mbarriers = barriers.find_mbarriers(mbarrier_address, copy_lanes, is_async_proxy=True)
        for mbarrier in mbarriers:
            mbarrier.copies_in_flight += 1
        if words:
            chunk_addresses = operands.find_chunks(location.byte_offsets[copy_indices])
            chunks = shared.find_chunks(chunk_addresses, blocks)
            shared.start_async_write(chunks, copy_lanes, np.array([mbarrier.writer_agent for mbarrier in mbarriers]))
            owners = blocks * state.threads.lanes_per_block + copy_lanes % state.threads.lanes_per_block
            operands.notify("load", words, lanes, chunk_addresses, owners)

        def complete() -> None:
            if data is not None:
                shared.complete_copy(chunks, data[copy_indices])
            for mbarrier in mbarriers:
                barriers.complete_tx(mbarrier, operands.nbytes)

        state.pending_copies.append(complete)

    return load


def _select_target_blocks(
    state: EmulatorState, location: MemoryAddress, lanes: Lanes, cta_mask: Any
) -> tuple[NDArray[np.intp], Lanes]:
    """Return the index of the copy and the destination block of each transfer; multicast copies have several."""
    own_blocks = lanes // state.threads.lanes_per_block
    if cta_mask is None:
        return np.arange(len(lanes)), own_blocks if location.target_blocks is None else location.target_blocks
    cluster_size = state.threads.cluster_size
    bits = state.select_lane_values(cta_mask, lanes).astype(np.int64)[:, None] >> np.arange(16) & 1
    if bits[:, cluster_size:].any():
        last_rank = int(np.flatnonzero(bits.any(axis=0))[-1])
        raise ExecutionError(f"a copy to the block of rank {last_rank} exceeds the cluster of {cluster_size} blocks")
    copy_indices, cta_rank = np.nonzero(bits)
    return copy_indices, own_blocks[copy_indices] - own_blocks[copy_indices] % cluster_size + cta_rank


def _translate_store(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """cp.async.bulk.tensor.*.global.shared::cta map, coordinates, source."""
    if "tile::scatter4" in call.modifiers:
        raise AnalysisError(f"{call} is not supported by the emulator")
    operands = _TmaOperands(call, translator, 0)
    source_code, state = translator.translate_expression(call.operands[operands.next_operand]), translator.state
    shared_call = PtxCall(call.name, (), None, ("shared::cta",))

    def store(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        location = resolve_address(shared_call, state.evaluate_data_independent(source_code, mask), state, lanes)
        if not (state.is_checked or state.observes_async_proxy):
            return
        chunk_addresses = operands.find_chunks(location.byte_offsets)
        words = list_words(operands.array_map, operands.select_box(mask, lanes))
        operands.notify("store", words, lanes, chunk_addresses, lanes)
        if not state.is_checked:
            return
        chunks = state.shared.find_chunks(chunk_addresses, lanes // state.threads.lanes_per_block)
        loaded = state.shared.read_async(chunks, lanes[:, None], "a bulk copy")
        word_data = np.ascontiguousarray(loaded).reshape(*words.word_indices.shape, words.word_bytes)
        array_words = operands.array_map.array.raw_bytes.reshape(-1, words.word_bytes)
        array_words[words.word_indices[words.is_inside]] = word_data[words.is_inside]
        for lane, read_chunks in zip(lanes.tolist(), chunks, strict=True):
            state.bulk_copy_groups.issue(lane, read_chunks)

    return store


def _translate_commit_group(call: PtxCall, translator: TirTranslator) -> StatementCode:
    state = translator.state
    return lambda mask: state.bulk_copy_groups.commit_group(state.find_lanes(mask))


def _translate_wait_group(call: PtxCall, translator: TirTranslator) -> StatementCode:
    state, max_pending_groups = translator.state, int(call.operands[0])
    return lambda mask: state.bulk_copy_groups.wait_group(state.find_lanes(mask), max_pending_groups)


INSTRUCTIONS: dict[str, Callable[[PtxCall, TirTranslator], StatementCode]] = {
    "cp_async_bulk_tensor_g2s_cluster": _translate_load,
    "cp_async_bulk_tensor_g2s_cta": _translate_load,
    "cp_async_bulk_tensor_g2s_cluster_im2col": _translate_load,
    "cp_async_bulk_tensor_g2s_cta_im2col": _translate_load,
    "cp_async_bulk_tensor_s2g": _translate_store,
    "cp_async_bulk_tensor_prefetch": translate_no_op,
    "cp_async_bulk_tensor_prefetch_im2col": translate_no_op,
    "cp_async_bulk_prefetch": translate_no_op,
    "cp_async_bulk_commit_group": _translate_commit_group,
    "cp_async_bulk_wait_group": _translate_wait_group,
}
