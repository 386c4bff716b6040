"""Input loader of `stem`: whole input rows are copied to shared memory, tiles ahead."""

from __future__ import annotations

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div

from ....tir_builder import (
    Buffer,
    Expr,
    allocate,
    emit_call,
    emit_ptx,
    if_,
    items_loop,
    logical_and,
    serial_loop,
    store,
    store_shared,
    to_uint32,
    unrolled_loop,
)
from ..gemm.cp_async import cp_async
from .cta import StemCta, join_halves
from .row_layout import WORD_BYTES

MAX_UNROLLED_COPIES = 16  # iterations of a copy loop
WORDS_IN_FLIGHT = 8  # input words that a thread loads at a time


class StemInputLoader:
    """Copies of the input rows of tiles to shared memory."""

    def __init__(self, cta: StemCta, source: Buffer) -> None:
        self._cta, self._source, self._rows, self._smem = cta, source, cta.row_layout, cta.smem_layout
        self._num_units = self._rows.num_planes * self._smem.rows_per_plane * self._smem.units_per_row

    def load_if_valid(self, tile_idx: Expr, buffer: Expr) -> None:
        """Copy a tile's input rows to shared memory if the tile index is valid."""
        with if_(tile_idx < int(self._cta.config.num_pixel_tiles)):
            if self._rows.can_copy_async:
                self._copy_rows(tile_idx, buffer)
            else:
                self._copy_words(tile_idx, buffer)
        if self._rows.can_copy_async:
            emit_call(T.ptx.cp.async_.commit_group())

    def wait(self) -> None:
        """Wait until the next tile's inputs have arrived and all threads have read the previous ones."""
        if self._rows.can_copy_async:
            emit_call(T.ptx.cp.async_.wait_group(max(0, int(self._cta.config.num_input_buffers) - 2)))
        emit_call(T.cuda.cta_sync())

    def _copy_rows(self, tile_idx: Expr, buffer: Expr) -> None:
        """Copy rows asynchronously in whole copies."""
        num_units, num_threads = self._num_units, self._cta.num_threads
        is_unrolled = num_units <= MAX_UNROLLED_COPIES * num_threads
        nbytes = self._rows.elements_per_unit * self._rows.element_bytes
        with items_loop(num_units, self._cta.thread.thread, num_threads, is_unrolled=is_unrolled) as unit:
            index, is_inside = self._locate(tile_idx, unit, 0)
            index, destination = T.Select(is_inside, index, 0), self._destination(unit, buffer)
            cp_async(destination, self._source, index, nbytes, is_inside, prefetches_l2=False)

    def _copy_words(self, tile_idx: Expr, buffer: Expr) -> None:
        """Copy rows of which every second starts in the middle of a word, element by element, several at a time."""
        num_units, num_threads = self._num_units, self._cta.num_threads
        units_per_thread = ceil_div(num_units, num_threads)
        batch = min(units_per_thread, WORDS_IN_FLIGHT)
        halves, word = allocate("halves", 2 * batch, "uint16"), allocate("word", 1, "uint32")

        def unit_at(i: Expr, j: Expr) -> Expr:
            return (i * batch + j) * num_threads + self._cta.thread.thread

        with serial_loop(ceil_div(units_per_thread, batch), "i") as i:
            with unrolled_loop(batch, "j") as j:
                for half in range(2):
                    index, is_inside = self._locate(tile_idx, unit_at(i, j), half)
                    is_inside = logical_and(is_inside, unit_at(i, j) < num_units)
                    address = self._source.access_ptr("r", offset=T.Select(is_inside, index, 0))
                    emit_ptx("ld.global.nc.b16", halves[j * 2 + half], address)
                    store(halves, j * 2 + half, T.Select(is_inside, halves[j * 2 + half], T.uint16(0)))
            with unrolled_loop(batch, "j") as j, if_(unit_at(i, j) < num_units):
                store(word, 0, join_halves(halves[j * 2], halves[j * 2 + 1]))
                store_shared(self._destination(unit_at(i, j), buffer), word, WORD_BYTES)

    def _locate(self, tile_idx: Expr, unit: Expr, element_in_unit: int) -> tuple[Expr, Expr]:
        """Return the index in X of an element of a copy, and whether it is inside the image."""
        w, rows = self._cta.config.w, self._rows
        output_plane, p, q = self._cta.tile_origin(tile_idx)
        row_idx, unit_in_row = unit // self._smem.units_per_row, unit % self._smem.units_per_row
        plane, row = row_idx // self._smem.rows_per_plane, row_idx % self._smem.rows_per_plane
        image, depth = output_plane // w.output_size[0], output_plane % w.output_size[0]
        d = depth * w.stride[0] - w.pad_low[0] + plane % w.T * w.dilation[0]
        h = p * w.stride[1] - w.pad_low[1] + row
        element = (
            q * rows.output_step_elements
            - (w.pad_low[-1] * rows.elements_per_pixel + rows.lead_elements)
            + unit_in_row * rows.elements_per_unit
            + element_in_unit
        )
        is_inside = logical_and(d >= 0, d < w.D, h >= 0, h < w.H, element >= 0, element < rows.elements_per_row)
        input_plane = (image * rows.rows_per_image_row + plane // w.T) * w.D + d
        return (input_plane * w.H + h) * rows.elements_per_row + element, is_inside

    def _destination(self, unit: Expr, buffer: Expr) -> Expr:
        """Return the shared-memory address to which a copy of a tile goes."""
        row_idx, unit_in_row = unit // self._smem.units_per_row, unit % self._smem.units_per_row
        unit_bytes = self._rows.elements_per_unit * self._rows.element_bytes
        offset = self._cta.inputs_offset + (row_idx * self._smem.row_bytes + unit_in_row * unit_bytes)
        return self._cta.smem + to_uint32(buffer * int(self._cta.config.input_bytes)) + to_uint32(offset)
