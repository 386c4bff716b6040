"""Copies by the Tensor Memory Accelerator: boxes of an array, which are tiles or im2col pixels of a filter tap.

A copy to shared memory completes as late as possible, when no thread can continue without it. Source: PTX ISA,
"cp.async.bulk.tensor", and "Tensors" (tiled and im2col mode, swizzling modes).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import ceil_div
from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions.operands import Instruction, executes, translates
from tvmconv.emulator.memory.arrays import TensorMapArray
from tvmconv.emulator.memory.shared_memory import MemoryAddress
from tvmconv.emulator.observers import AccessKind, MemoryAccess
from tvmconv.emulator.state import EmulatorState, Mask, StatementCode
from tvmconv.emulator.threads import CHUNK_BYTES, Lanes
from tvmconv.errors import AnalysisError
from tvmconv.tensor_map import TensorMap


def swizzle_addresses(addresses: NDArray[np.int64], swizzle_bytes: int) -> NDArray[np.int64]:
    """Apply a swizzle: XOR the index of a chunk among 8, 4 or 2 with that of its 128-byte row."""
    chunks = max(swizzle_bytes, CHUNK_BYTES) // CHUNK_BYTES
    return addresses ^ ((addresses >> 7 & chunks - 1) << 4)


def count_rows(tensor_map: TensorMap) -> list[int]:
    """Return the rows of a box along each axis but the innermost; for im2col, its pixels."""
    if tensor_map.is_im2col:
        return [tensor_map.box[1]]
    return [ceil_div(*pair) for pair in zip(tensor_map.box[1:], tensor_map.element_strides[1:], strict=True)]


# Offset in bytes of the first element of each row of contiguous elements, and whether the row is inside the array, both
# of shape (copies, rows).
_Rows = tuple[NDArray[np.int64], NDArray[np.bool_]]


def _select_tiles(tensor_map: TensorMap, coordinates: NDArray[np.int64]) -> _Rows:
    """Return the rows of tiled copies; `coordinates` of their first elements have the shape (copies, axes)."""
    row_counts = count_rows(tensor_map)
    row_index = np.arange(math.prod(row_counts))
    row_offsets = np.zeros((len(coordinates), len(row_index)), np.int64)
    is_inside = np.ones(row_offsets.shape, bool)
    for axis, (count, stride) in enumerate(zip(row_counts, tensor_map.strides, strict=True), 1):
        positions = coordinates[:, axis, None] + row_index % count * tensor_map.element_strides[axis]
        row_offsets += positions * stride
        is_inside &= (positions >= 0) & (positions < tensor_map.extents[axis])
        row_index = row_index // count
    return row_offsets, is_inside


def _select_pixels(tensor_map: TensorMap, coordinates: NDArray[np.int64], offsets: NDArray[np.int64]) -> _Rows:
    """Return the rows of im2col copies: pixels of images with their channels.

    Pixels are counted in strides within the bounding box along each spatial axis. After its end they continue along the
    next axis, and in the next image.
    `coordinates` are the channel, the filter position along each spatial axis and the image, of shape (copies, axes).
    `offsets` are those of the filter tap from the filter position, of shape (copies, spatial axes).
    """
    pixel_index = np.broadcast_to(np.arange(tensor_map.box[1]), (len(coordinates), tensor_map.box[1]))
    row_offsets, is_inside = np.zeros(pixel_index.shape, np.int64), np.ones(pixel_index.shape, bool)
    for axis, (lower, upper) in enumerate(zip(tensor_map.lower_corner, tensor_map.upper_corner, strict=True), 1):
        extent, element_stride = tensor_map.extents[axis], tensor_map.element_strides[axis]
        start, last_start = coordinates[:, axis, None], extent - 1 + upper
        if (start < lower).any() or (start > last_start).any():
            starts = start.reshape(-1).tolist()
            raise ExecutionError(f"{tensor_map}: a copy starts at {starts} along axis {axis}, outside of the box")
        first_line_pixels = (last_start - start) // element_stride + 1
        full_line_pixels = (last_start - lower) // element_stride + 1
        is_in_first_line = pixel_index < first_line_pixels
        later_index = pixel_index - first_line_pixels
        first_line_positions = start + pixel_index * element_stride
        later_positions = lower + later_index % full_line_pixels * element_stride
        positions = np.where(is_in_first_line, first_line_positions, later_positions) + offsets[:, axis - 1, None]
        pixel_index = np.where(is_in_first_line, 0, 1 + later_index // full_line_pixels)
        row_offsets += positions * tensor_map.strides[axis - 1]
        is_inside &= (positions >= 0) & (positions < extent)
    image = coordinates[:, -1, None] + pixel_index
    is_inside &= (image >= 0) & (image < tensor_map.extents[-1])
    return row_offsets + image * tensor_map.strides[-1], is_inside


class BoxWords(NamedTuple):
    """Words of an array that boxes contain, of 16 bytes if alignment permits."""

    word_bytes: int  # bytes per word
    word_indices: NDArray[np.int64]  # index of each word in the array, 0 outside of it; of shape (copies, rows, words)
    is_inside: NDArray[np.bool_]  # whether the word is inside the array, of the same shape


def list_words(
    source: TensorMapArray, coordinates: NDArray[np.int64], offsets: NDArray[np.int64] | None = None
) -> BoxWords:
    """Return the words of copies at coordinates; `offsets` are those of the filter tap for im2col."""
    tensor_map, itemsize = source.tensor_map, source.array.dtype.itemsize
    row_offsets, is_row_inside = (
        _select_tiles(tensor_map, coordinates) if offsets is None else _select_pixels(tensor_map, coordinates, offsets)
    )
    first_bytes, end_byte = coordinates[:, 0] * itemsize, tensor_map.extents[0] * itemsize
    if (first_bytes % CHUNK_BYTES).any():
        first = int(coordinates[first_bytes % CHUNK_BYTES != 0, 0][0])
        raise ExecutionError(f"misaligned: {tensor_map}: a copy starts at element {first}, which is not at 16 bytes")
    word_bytes = CHUNK_BYTES if end_byte % CHUNK_BYTES == 0 else itemsize
    byte_offsets = first_bytes[:, None, None] + np.arange(0, tensor_map.box[0] * itemsize, word_bytes)
    is_inside = (byte_offsets >= 0) & (byte_offsets < end_byte) & is_row_inside[:, :, None]
    word_indices = np.where(is_inside, (row_offsets[:, :, None] + byte_offsets) // word_bytes, 0)
    return BoxWords(word_bytes, word_indices, is_inside)


TILE_ALIGNMENT_BYTES = 128  # alignment of a tile in shared memory


class _BoxCopy:
    """Copy between shared memory and a box of an array.

    The coordinates follow the operand of the tensor map. `offsets_operand` is the index of the first im2col offset
    after the coordinates, and None in tiled mode.
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
