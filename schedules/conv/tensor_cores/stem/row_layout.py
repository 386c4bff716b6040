"""Layout of a convolution in memory rows, as `stem` computes it.

The layouts of input and output are independent; the weight has that of the input. In NHWC an input row is an image row
with interleaved channels; in NCHW it is a row of one channel's plane. A filter row is the part of a filter that
multiplies one input row: the taps of a row, with the channels of a pixel in NHWC. The reduction runs over filter rows,
and along them in 32-bit words. The filter rows of one plane follow each other; a plane is a tap along the depth, of one
channel in NCHW. `view_as_volume` gives images a depth of 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.workloads import Conv3d
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_LAST

WORD_BYTES = 4  # bytes of a register and of a bank
VECTOR_BYTES = 16  # bytes of the widest copy
MMA_PIXELS, MMA_CHANNELS, MMA_K_WORDS = 16, 8, 8  # shape of an mma: m16n8k16 of 16 bits, or m16n8k8 of TF32
QUAD_WORDS = 4  # words of the reduction that neighbouring lanes load together
ACCUMULATOR_BYTES = 4


@dataclass(frozen=True)
class RowLayout:
    """Layout of a convolution in memory rows."""

    w: Conv3d  # the convolution, of three spatial axes

    @property
    def channels_last(self) -> bool:
        """Whether an input row contains all channels of its pixels."""
        return self.w.input_layout == CHANNELS_LAST

    @property
    def stores_channels_last(self) -> bool:
        """Whether an output row contains all channels of its pixels."""
        return self.w.output_layout == CHANNELS_LAST

    @property
    def rows_per_image_row(self) -> int:
        """Memory rows per image row."""
        return 1 if self.channels_last else self.w.C

    @property
    def num_planes(self) -> int:
        """Planes of memory rows below an output: one for each tap along the depth, and in NCHW for each channel."""
        return self.rows_per_image_row * self.w.T

    @property
    def elements_per_pixel(self) -> int:
        """Elements per pixel in a row."""
        return self.w.C if self.channels_last else 1

    @property
    def elements_per_row(self) -> int:
        """Elements per input row."""
        return self.w.W * self.elements_per_pixel

    @property
    def element_bytes(self) -> int:
        """Bytes per element."""
        return get_itemsize(self.w.storage)

    @property
    def elements_per_word(self) -> int:
        """Elements per word."""
        return WORD_BYTES // self.element_bytes

    @property
    def elements_per_copy(self) -> int:
        """Elements per copy; every row starts at a multiple of it."""
        return math.gcd(self.elements_per_row, VECTOR_BYTES // self.element_bytes)

    @property
    def can_copy_async(self) -> bool:
        """Whether a copy has at least four bytes, the minimum of cp.async (PTX ISA, "cp.async")."""
        return self.elements_per_copy * self.element_bytes >= WORD_BYTES

    @property
    def elements_per_unit(self) -> int:
        """Elements that a thread stages at a time."""
        return self.elements_per_copy if self.can_copy_async else self.elements_per_word

    @property
    def output_step_elements(self) -> int:
        """Distance in elements between the inputs of neighbouring outputs."""
        return self.w.stride[-1] * self.elements_per_pixel

    @property
    def num_phases(self) -> int:
        """Number of alignments of neighbouring pixels relative to words: 1 or 2."""
        return 2 if self.output_step_elements % self.elements_per_word else 1

    @property
    def lead_elements(self) -> int:
        """Elements that are staged before the first one that a tile needs, so that a whole copy starts there."""
        return -self.w.pad_low[-1] * self.elements_per_pixel % self.elements_per_copy

    def phase_shift(self, phase: int) -> int:
        """Return the element of a word at which the pixels of a phase start, and with them the filter."""
        return (self.lead_elements + phase * self.output_step_elements) % self.elements_per_word

    @property
    def filter_row_elements(self) -> int:
        """Elements per filter row in memory."""
        return self.w.S * self.elements_per_pixel

    @property
    def num_filter_rows(self) -> int:
        """Filter rows, over all planes."""
        return self.num_planes * self.w.R

    @property
    def filter_elements(self) -> int:
        """Elements per filter in memory."""
        return self.num_filter_rows * self.filter_row_elements

    @property
    def words_per_filter_row(self) -> int:
        """Words per filter row as multiplied, including the zeros of dilation and phases."""
        window_elements = self.w.window[-1] * self.elements_per_pixel
        return ceil_div(window_elements + max(map(self.phase_shift, range(self.num_phases))), self.elements_per_word)

    @property
    def num_k_words(self) -> int:
        """Words of the reduction."""
        return self.num_filter_rows * self.words_per_filter_row

    @property
    def num_k_steps(self) -> int:
        """K-steps of the reduction, one mma each."""
        return ceil_div(self.num_k_words, MMA_K_WORDS)

    @property
    def can_share_row_ends(self) -> bool:
        """Whether the last words of four rows can share a load without additional k-steps."""
        num_end_quads = self.words_per_filter_row % QUAD_WORDS * ceil_div(self.num_filter_rows, QUAD_WORDS)
        num_quads = self.num_filter_rows * (self.words_per_filter_row // QUAD_WORDS) + num_end_quads
        return ceil_div(num_quads * QUAD_WORDS, MMA_K_WORDS) == self.num_k_steps

    def word_position(self, word: Any, groups_row_ends: bool, select: Callable[[Any, Any, Any], Any]) -> Any:
        """Return the position in the reduction of a word of the filter rows; words past the last one are zeros.

        Args:
            word: Index of the word, a number or an expression.
            groups_row_ends: Whether the last words of the rows follow all other words; see `StemSmemLayout`.
            select: Function (condition, a, b) that returns a if the condition holds, otherwise b.
        """
        num_rows, words_per_row = self.num_filter_rows, self.words_per_filter_row
        if not groups_row_ends:
            return word
        full_quad_words = words_per_row // QUAD_WORDS * QUAD_WORDS
        padded_num_rows = round_up(num_rows, QUAD_WORDS)
        filter_row, word_in_row = word // words_per_row, word % words_per_row
        end_position = num_rows * full_quad_words + (word_in_row - full_quad_words) * padded_num_rows + filter_row
        filter_position = (
            select(word_in_row < full_quad_words, filter_row * full_quad_words + word_in_row, end_position)
            if full_quad_words
            else end_position
        )
        if padded_num_rows == num_rows:
            return select(word < num_rows * words_per_row, filter_position, word)
        zero_idx = word - num_rows * words_per_row
        padding_position = (
            num_rows * full_quad_words
            + zero_idx // (padded_num_rows - num_rows) * padded_num_rows
            + num_rows
            + zero_idx % (padded_num_rows - num_rows)
        )
        zero_position = select(
            word < num_rows * full_quad_words + (words_per_row - full_quad_words) * padded_num_rows,
            padding_position,
            word,
        )
        return select(word < num_rows * words_per_row, filter_position, zero_position)

    def list_quads(self, groups_row_ends: bool, row_bytes: int, plane_bytes: int) -> Iterator[tuple[int, ...]]:
        """Yield the shared-memory offsets in bytes of each four words of the reduction, relative to the pixel's first
        word.

        Zeros of the weight multiply the quad's first word, which must be a finite number.

        Args:
            groups_row_ends: As for `word_position`.
            row_bytes: Distance between staged rows in bytes.
            plane_bytes: Distance between planes in bytes.
        """
        for quad in _list_quads(self, groups_row_ends):
            word_offsets = [
                plane * plane_bytes + row * row_bytes + word_in_row * WORD_BYTES for plane, row, word_in_row in quad
            ]
            yield (*word_offsets, *(word_offsets[:1] or [0]) * (QUAD_WORDS - len(word_offsets)))

    @property
    def weight_row_bytes(self) -> int:
        """Bytes per channel of the spread weight: an odd number of 16-byte units, so eight rows cover all banks."""
        return self.num_k_steps * MMA_K_WORDS * WORD_BYTES + VECTOR_BYTES


@functools.lru_cache(maxsize=256)
def _list_quads(layout: RowLayout, groups_row_ends: bool) -> list[list[tuple[int, int, int]]]:
    """Return (plane, row, word in the row) of each four words of the reduction, without zeros."""
    words_per_row, words_by_position = layout.words_per_filter_row, dict[int, tuple[int, int, int]]()
    for word in range(layout.num_k_words):
        filter_row_idx, word_in_row = divmod(word, words_per_row)
        plane, filter_row = divmod(filter_row_idx, layout.w.R)
        position = layout.word_position(word, groups_row_ends, lambda test, one, other: one if test else other)
        words_by_position[position] = plane, filter_row * layout.w.dilation[1], word_in_row
    quad_positions = range(0, layout.num_k_steps * MMA_K_WORDS, QUAD_WORDS)
    return [
        [words_by_position[n] for n in range(first_position, first_position + QUAD_WORDS) if n in words_by_position]
        for first_position in quad_positions
    ]
