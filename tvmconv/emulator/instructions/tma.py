"""Copies by the Tensor Memory Accelerator, executed.

A copy to shared memory lands as late as it can, which is when nobody can go on without it. Source: PTX ISA,
"cp.async.on_async_proxy_access.tensor".
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

TILE_ALIGNMENT_BYTES = 128  # bytes, of where a tile lies in shared memory


class _TmaOperands:
    """The operands of a copy that tell what of an array it takes.

    Args:
        call: the instruction.
        translator: for its operands.
        map_operand: which operand is the map; the place is behind it.
        offsets_operand: which operands are the offsets of im2col.
    """

    def __init__(
        self, call: PtxCall, translator: TirTranslator, map_operand: int, offsets_operand: int | None = None
    ) -> None:
        num_axes = next(int(operand[0]) for operand in call.modifiers if operand in ("1d", "2d", "3d", "4d", "5d"))
        self.next_operand = map_operand + 1 + num_axes
        self._call, self._state = call, translator.state
        pointer = translator.translate_expression(call.operands[map_operand])(None)
        if not isinstance(pointer, Pointer) or not isinstance(pointer.memory, TensorMapArray):
            raise AnalysisError(f"{call} of what is no tensor map")
        self.array_map = pointer.memory
        tensor_map = self.array_map.tensor_map
        if len(tensor_map.extents) != num_axes or tensor_map.is_im2col != (offsets_operand is not None):
            raise ExecutionError(f"{call} with {tensor_map}")
        self._coordinate_codes = [
            translator.translate_expression(operand) for operand in call.operands[map_operand + 1 : self.next_operand]
        ]
        offset_operands = (
            []
            if offsets_operand is None
            else call.operands[self.next_operand + offsets_operand : self.next_operand + offsets_operand + num_axes - 2]
        )
        self._offset_codes = [translator.translate_expression(operand) for operand in offset_operands]

    @property
    def nbytes(self) -> int:
        """Of a copy."""
        tensor_map = self.array_map.tensor_map
        rows_per_axis = (
            tensor_map.box[1:]
            if tensor_map.is_im2col
            else (
                ceil_div(box_extent, element_stride)
                for box_extent, element_stride in zip(tensor_map.box[1:], tensor_map.element_strides[1:], strict=True)
            )
        )
        return tensor_map.box[0] * self.array_map.array.dtype.itemsize * math.prod(rows_per_axis)

    def select_box(self, mask: Mask, lanes: Lanes) -> TmaBox:
        """What each lane takes."""
        coordinates = self._evaluate_codes(self._coordinate_codes, mask, lanes)
        if not self._offset_codes:
            return select_tiles(self.array_map.tensor_map, coordinates)
        return select_pixels(
            self.array_map.tensor_map, coordinates, self._evaluate_codes(self._offset_codes, mask, lanes)
        )

    def _evaluate_codes(self, codes: list[Callable[[Mask], Any]], mask: Mask, lanes: Lanes) -> NDArray[np.int64]:
        state = self._state
        columns = [
            state.select_lane_values(state.evaluate_data_independent(code, mask), lanes).astype(np.int64)
            for code in codes
        ]
        return np.stack(columns, axis=1)

    def find_chunks(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the chunks of copies lie that begin at addresses in shared memory, shape (copies, chunks)."""
        if (addresses % TILE_ALIGNMENT_BYTES).any():
            raise ExecutionError(
                f"misaligned: {self._call} of shared memory at byte "
                f"{int(addresses[addresses % TILE_ALIGNMENT_BYTES != 0][0])}, "
                f"no multiple of {TILE_ALIGNMENT_BYTES}"
            )
        return swizzle_addresses(
            addresses[:, None] + np.arange(0, self.nbytes, CHUNK_BYTES), self.array_map.tensor_map.swizzle
        )

    def read_words(self, words: BoxWords) -> NDArray[np.uint8]:
        """What words of the array are, zeros where there are none; shape (copies, chunks, 16)."""
        data = self.array_map.array.raw_bytes.reshape(-1, words.word_bytes)[words.word_indices]
        data[~words.is_inside] = 0
        return data.reshape(len(data), -1, CHUNK_BYTES)

    def notify(self, kind: Any, words: BoxWords, lanes: Lanes, chunks: NDArray[np.int64], owners: Lanes) -> None:
        """Tell who watches of words of the array, and chunks of shared memory of the blocks of `owners`."""
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
        state.observer.on_async_proxy_access(
            replace(event, swizzle_bytes=self.array_map.tensor_map.swizzle, global_array=array.name)
        )


def _translate_load(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """cp.async.on_async_proxy_access.tensor.*.shared::cluster.global: to, map, place, mbarrier{, offsets of a tap}{,
    blocks}.
    """
    im2col = "im2col" in call.modifiers
    if any(modifier.startswith("im2col::") for modifier in call.modifiers) or "tile::gather4" in call.modifiers:
        raise AnalysisError(f"{call}, which cannot be executed")
    operands = _TmaOperands(call, translator, 1, 1 if im2col else None)
    state, shared, barriers = translator.state, translator.state.shared, translator.state.mbarriers
    target_code, barrier_code = (
        translator.translate_expression(call.operands[0]),
        translator.translate_expression(call.operands[operands.next_operand]),
    )
    mask_operand = operands.next_operand + 1 + (len(operands.array_map.tensor_map.lower_corner) if im2col else 0)
    cta_mask_code = (
        translator.translate_expression(call.operands[mask_operand]) if "multicast::cluster" in call.modifiers else None
    )

    def load(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        location, barrier_location = (
            resolve_address(call, state.evaluate_data_independent(code, mask), state, lanes)
            for code in (target_code, barrier_code)
        )
        needs_words = state.is_checked or state.observes_async_proxy
        words = list_words(operands.array_map, operands.select_box(mask, lanes)) if needs_words else None
        data = operands.read_words(words) if words and state.is_checked else None
        copy_indices, blocks = _select_target_blocks(
            state, location, lanes, state.evaluate_data_independent(cta_mask_code, mask) if cta_mask_code else None
        )
        copy_lanes = lanes[copy_indices]
        mbarriers = barriers.find_mbarriers(
            MemoryAddress(shared, barrier_location.byte_offsets[copy_indices], barrier_location.name, blocks),
            copy_lanes,
            is_async_proxy=True,
        )
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
    """Which copy goes to which block, of copies of some lanes."""
    own_blocks = lanes // state.threads.lanes_per_block
    if cta_mask is None:
        return np.arange(len(lanes)), own_blocks if location.target_blocks is None else location.target_blocks
    cluster_size = state.threads.cluster_size
    bits = state.select_lane_values(cta_mask, lanes).astype(np.int64)[:, None] >> np.arange(16) & 1
    if bits[:, cluster_size:].any():
        raise ExecutionError(
            f"a copy to block {int(np.flatnonzero(bits.any(axis=0))[-1])} of a cluster of {cluster_size}"
        )
    copy_indices, cta_rank = np.nonzero(bits)
    return copy_indices, own_blocks[copy_indices] - own_blocks[copy_indices] % cluster_size + cta_rank


def _translate_store(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """cp.async.on_async_proxy_access.tensor.*.global.shared::cta: map, place, from."""
    if "tile::scatter4" in call.modifiers:
        raise AnalysisError(f"{call}, which cannot be executed")
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
        operands.array_map.array.raw_bytes.reshape(-1, words.word_bytes)[words.word_indices[words.is_inside]] = (
            word_data[words.is_inside]
        )
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
