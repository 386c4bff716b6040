"""Shared-memory layout of the input rows of `stem`, chosen by counting bank conflicts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from tvmconv.arithmetic import ceil_div
from tvmconv.target import BANK_BYTES, NUM_BANKS, WARP_SIZE
from tvmconv.workloads import Conv3d

from .row_layout import MMA_PIXELS, QUAD_WORDS, RowLayout

_BANK_CYCLE_BYTES = NUM_BANKS * BANK_BYTES
_PIXEL_SPREADS = ((1, 8), (2, 1))  # distance in pixels between neighbouring lanes, and between a lane's two pixels


@dataclass(frozen=True)
class StemSmemLayout:
    """Layout of a tile's input rows in shared memory, and assignment of pixels to lanes.

    Attributes:
        row_layout: Layout of the convolution in memory rows.
        elements_per_row: Elements of a row that a tile needs.
        row_bytes: Distance between staged rows in bytes.
        rows_per_plane: Staged rows per plane.
        pixel_spread: Distance in pixels between neighbouring lanes, and between a lane's two pixels.
        groups_row_ends: Whether the last words of the filter rows, fewer than four, follow all other words of the
            reduction, grouped as one word of each of four rows.
        num_conflicts: Additional wavefronts of the input loads of one output row, summed over all k-steps.
    """

    row_layout: RowLayout
    elements_per_row: int
    row_bytes: int
    rows_per_plane: int
    pixel_spread: tuple[int, int]
    groups_row_ends: bool

    def list_quads(self) -> Iterator[tuple[int, ...]]:
        """Return the shared-memory offsets of each four words of the reduction; see `RowLayout.list_quads`."""
        return self.row_layout.list_quads(self.groups_row_ends, self.row_bytes, self.rows_per_plane * self.row_bytes)

    @property
    def units_per_row(self) -> int:
        """Staged units per row."""
        return ceil_div(self.elements_per_row, self.row_layout.elements_per_unit)

    @property
    def pixel_bytes(self) -> int:
        """Distance in bytes between neighbouring pixels of a warp."""
        return self.row_layout.num_phases * self.row_layout.output_step_elements * self.row_layout.element_bytes

    @property
    def num_conflicts(self) -> int:
        """Wavefronts beyond one per load, summed over the quads of an output row."""
        row_offset_bytes, plane_offset_bytes = (
            nbytes % _BANK_CYCLE_BYTES for nbytes in (self.row_bytes, self.rows_per_plane * self.row_bytes)
        )
        return _count_conflicts(
            self.row_layout, self.groups_row_ends, self.pixel_spread, row_offset_bytes, plane_offset_bytes
        )


@functools.lru_cache(maxsize=4096)
def choose_smem_layout(w: Conv3d, num_output_rows: int, num_warps: int) -> StemSmemLayout:
    """Return the layout with the fewest bank conflicts, and among those the smallest."""
    row_layout = RowLayout(w)
    elements_per_row = (
        row_layout.lead_elements
        + (MMA_PIXELS * num_warps - 1) * row_layout.output_step_elements
        + row_layout.words_per_filter_row * row_layout.elements_per_word
    )
    unit_bytes = row_layout.elements_per_unit * row_layout.element_bytes
    min_row_bytes = ceil_div(elements_per_row, row_layout.elements_per_unit) * unit_bytes
    plane_lines = (num_output_rows - 1) * w.stride[1] + w.window[1]
    candidates = (
        StemSmemLayout(row_layout, elements_per_row, min_row_bytes + extra_bytes, plane_lines, spread, groups_row_ends)
        for extra_bytes in range(0, _BANK_CYCLE_BYTES, unit_bytes)
        for spread in _PIXEL_SPREADS
        for groups_row_ends in ((False, True) if row_layout.can_share_row_ends else (False,))
    )
    best = next(candidates)
    for candidate in candidates:
        if best.num_conflicts == 0:
            break
        best = min(best, candidate, key=lambda placement: placement.num_conflicts)
    return best


@functools.lru_cache(maxsize=1 << 16)
def _count_conflicts(
    row_layout: RowLayout,
    groups_row_ends: bool,
    spread: tuple[int, int],
    row_offset_bytes: int,
    plane_offset_bytes: int,
) -> int:
    """Return the conflicts for rows and planes with the given offsets in bytes relative to the first bank."""
    pixel_step_bytes = spread[0] * row_layout.num_phases * row_layout.output_step_elements * row_layout.element_bytes
    pixel_offsets = [lane * pixel_step_bytes for lane in range(WARP_SIZE // QUAD_WORDS)]
    separation_bytes = _BANK_CYCLE_BYTES << 20  # keeps the words of different rows apart
    quads = row_layout.list_quads(
        groups_row_ends, separation_bytes + row_offset_bytes, (separation_bytes << 10) + plane_offset_bytes
    )
    return sum(
        _count_wavefronts({(pixel + word) // BANK_BYTES for pixel in pixel_offsets for word in quad}) - 1
        for quad in quads
    )


def _count_wavefronts(words: set[int]) -> int:
    """Return the number of wavefronts of a load: the maximum number of distinct words in one bank."""
    banks = [word % NUM_BANKS for word in words]
    return max(map(banks.count, set(banks)))
