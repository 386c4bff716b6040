"""Input loader of `stem`: whole input rows are copied to shared memory, tiles ahead."""

from __future__ import annotations

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div

from ....tir_builder import (
    Expr,
    emit_call,
    emit_ptx,
    if_,
    logical_and,
    serial_loop,
    store,
    store_shared,
    to_uint32,
    unrolled_loop,
)
from .base import CP_ASYNC_MNEMONIC, INPUT_WORDS_IN_FLIGHT, StemKernelBase
from .row_layout import WORD_BYTES

MAX_UNROLLED_COPIES = 16  # iterations of a copy loop


class StemInputLoader(StemKernelBase):
    """Copies of the input rows of tiles to shared memory."""

    def load_tile_if_valid(self, tile_idx: Expr, buffer: Expr) -> None:
        """Copy a tile's input rows to shared memory if the tile index is valid."""
        with if_(tile_idx < int(self.config.num_pixel_tiles)):
            if self.row_layout.can_copy_async:
                self.load_input_rows(tile_idx, buffer)
            else:
                self.load_input_rows_by_words(tile_idx, buffer)
        if self.row_layout.can_copy_async:
            emit_call(T.ptx.cp.async_.commit_group())

    def wait_inputs(self) -> None:
        """Wait until the next tile's inputs have arrived and all threads have read the previous ones."""
        if self.row_layout.can_copy_async:
            emit_call(T.ptx.cp.async_.wait_group(max(0, self.num_input_buffers - 2)))
        emit_call(T.cuda.cta_sync())

    def load_input_rows(self, tile_idx: Expr, buffer: Expr) -> None:
        """Copy rows asynchronously in whole copies."""
        num_units = self.num_units
        with (unrolled_loop if num_units <= MAX_UNROLLED_COPIES * self.num_threads else serial_loop)(
            ceil_div(num_units, self.num_threads), "unit"
        ) as i:
            unit_idx = i * self.num_threads + self.thread_idx
            with if_(unit_idx < num_units if num_units % self.num_threads else True):
                source, is_inside = self.locate_input_element(tile_idx, unit_idx, 0)
                source = T.Select(is_inside, source, 0)
                address = self.arguments["X"].access_ptr("r", offset=source)
                nbytes = self.row_layout.elements_per_unit * self.row_layout.element_bytes
                valid_bytes = T.Select(is_inside, to_uint32(nbytes), to_uint32(0))  # other bytes become zeros
                emit_ptx(
                    CP_ASYNC_MNEMONIC[nbytes], self.smem_destination(unit_idx, buffer), address, nbytes, valid_bytes
                )

    def load_input_rows_by_words(self, tile_idx: Expr, buffer: Expr) -> None:
        """Copy rows of which every second starts in the middle of a word, element by element, several at a time."""
        num_units = self.num_units
        units_per_thread = ceil_div(num_units, self.num_threads)
        batch_size = min(units_per_thread, INPUT_WORDS_IN_FLIGHT)

        def compute_unit_idx(i: Expr, j: Expr) -> Expr:
            return (i * batch_size + j) * self.num_threads + self.thread_idx

        with serial_loop(ceil_div(units_per_thread, batch_size), "i") as i:
            with unrolled_loop(batch_size, "j") as j:
                for half_idx in range(2):
                    source, is_inside = self.locate_input_element(tile_idx, compute_unit_idx(i, j), half_idx)
                    is_inside = logical_and(is_inside, compute_unit_idx(i, j) < num_units)
                    address = self.arguments["X"].access_ptr("r", offset=T.Select(is_inside, source, 0))
                    emit_ptx("ld.global.nc.b16", self.halves[j * 2 + half_idx], address)
                    half_word = self.halves[j * 2 + half_idx]
                    store(self.halves, j * 2 + half_idx, T.Select(is_inside, half_word, T.uint16(0)))
            with unrolled_loop(batch_size, "j") as j, if_(compute_unit_idx(i, j) < num_units):
                store(self.packed, 0, self.join_halves(j * 2))
                store_shared(self.smem_destination(compute_unit_idx(i, j), buffer), self.packed, WORD_BYTES)

    @property
    def num_units(self) -> int:
        """Copies per tile."""
        return self.row_layout.rows_per_image_row * self.smem_layout.rows_per_plane * self.smem_layout.units_per_row

    def locate_input_element(self, tile_idx: Expr, unit_idx: Expr, element_idx: int) -> tuple[Expr, Expr]:
        """Return the index in X of an element of a copy, and whether it is inside the image."""
        w, layout = self.w, self.row_layout
        n, p, q = self.compute_tile_origin(tile_idx)
        row_idx, unit_in_row = unit_idx // self.smem_layout.units_per_row, unit_idx % self.smem_layout.units_per_row
        plane, row = row_idx // self.smem_layout.rows_per_plane, row_idx % self.smem_layout.rows_per_plane
        h = p * w.stride[0] - w.pad_low[0] + row
        element = (
            q * layout.output_step_elements
            - (w.pad_low[1] * layout.elements_per_pixel + layout.lead_elements)
            + unit_in_row * layout.elements_per_unit
            + element_idx
        )
        is_inside = logical_and(h >= 0, h < w.H, element >= 0, element < layout.elements_per_row)
        return ((n * layout.rows_per_image_row + plane) * w.H + h) * layout.elements_per_row + element, is_inside

    def smem_destination(self, unit_idx: Expr, buffer: Expr) -> Expr:
        """Return the shared-memory address to which a copy of a tile goes."""
        row_idx, unit_in_row = unit_idx // self.smem_layout.units_per_row, unit_idx % self.smem_layout.units_per_row
        offset = row_idx * self.smem_layout.row_bytes + unit_in_row * (
            self.row_layout.elements_per_unit * self.row_layout.element_bytes
        )
        return self.smem_base[0] + to_uint32(buffer * self.input_bytes) + to_uint32(self.inputs_offset + offset)
