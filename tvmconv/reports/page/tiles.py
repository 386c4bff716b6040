"""Pictures of tiles: the outputs of one block, of one of its warps, and of one thread of that warp."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.memory.output_tiles import NO_THREAD, OutputTileMap, map_output_tile
from tvmconv.errors import AnalysisError
from tvmconv.kernel import Kernel
from tvmconv.reports.page.markup import Markup, make_element, make_paragraph
from tvmconv.reports.page.svg import make_chart, make_rect, make_text
from tvmconv.target import WARP_SIZE

MAX_DRAWN_CELLS = 64  # rows and columns
MAX_PICTURE_WIDTH = 640  # px
HEIGHT = 240
MAX_CELL_SIZE = 14  # px
LEVELS = ("block", "warp", "thread")
LEGEND = "Outputs of the middle block of the grid, of its first warp that stores, and of that warp's first thread."


def render_tiles(kernel: Kernel) -> Markup:
    """Render pictures of one kernel's tiles, over the image and over the channels."""
    try:
        tile = map_output_tile(kernel)
    except AnalysisError as error:
        return make_paragraph(f"The tiles are unknown: {error}")
    if not len(tile.coordinates):
        return make_paragraph("The middle block of the grid stores nothing.")
    num_axes = len(tile.shape)
    pictures = [_render_picture(tile, "image", num_axes - 2 if num_axes > 1 else None, num_axes - 1)]
    if num_axes > 3:  # N, C and space
        pictures.append(_render_picture(tile, "channels", None, 1))
    return make_element("div", *pictures, class_="tiles")


def _list_level_masks(tile: OutputTileMap) -> list[tuple[str, NDArray[np.bool_]]]:
    """Return which outputs belong to the block, to a warp and to a thread; TMA stores for all threads."""
    storing_threads = tile.threads[tile.threads != NO_THREAD]
    masks = [np.ones(len(tile.threads), bool)]
    if len(storing_threads):
        first = int(storing_threads.min())
        masks += [tile.threads // WARP_SIZE == first // WARP_SIZE, tile.threads == first]
    return list(zip(LEVELS, masks, strict=False))


def _render_picture(tile: OutputTileMap, name: str, row_axis: int | None, column_axis: int) -> Markup:
    """Render the plane of two axes, or a single row of one axis."""
    columns = tile.coordinates[:, column_axis]
    rows = np.zeros_like(columns) if row_axis is None else tile.coordinates[:, row_axis]
    sizes = 1 if row_axis is None else tile.shape[row_axis], tile.shape[column_axis]
    windows = [_select_window(rows, sizes[0]), _select_window(columns, sizes[1])]
    (first_row, end_row), (first_column, end_column) = windows
    num_rows, num_columns = end_row - first_row, end_column - first_column
    cell = min(MAX_CELL_SIZE, MAX_PICTURE_WIDTH / num_columns, HEIGHT / num_rows)
    is_visible = (first_row <= rows) & (rows < end_row) & (first_column <= columns) & (columns < end_column)
    elements = [make_rect(0, 0, num_columns * cell, num_rows * cell, "plane")]
    counts = []
    for level, mask in _list_level_masks(tile):
        counts.append(f"{level} {int(mask.sum()):,}")
        shown = mask & is_visible
        for row, first, end in _merge_cells(rows[shown] - first_row, columns[shown] - first_column):
            elements.append(make_rect(first * cell, row * cell, (end - first) * cell, cell, f"tile {level}"))
    description = f"{name}: {_describe_window(sizes, windows)}"
    caption = f"{description}; outputs of the {', the '.join(counts)}"
    elements.append(make_text(0, num_rows * cell + 14, caption, class_="small"))
    return make_chart(description, MAX_PICTURE_WIDTH, num_rows * cell + 20, *elements)


def _select_window(indices: NDArray[np.int64], size: int) -> tuple[int, int]:
    """Return the drawn part of an axis: all of it, or the surroundings of the block."""
    if size <= MAX_DRAWN_CELLS:
        return 0, size
    start, end = int(indices.min()), int(indices.max()) + 1
    if end - start < MAX_DRAWN_CELLS:
        start = max(0, min((start + end - MAX_DRAWN_CELLS) // 2, size - MAX_DRAWN_CELLS))
    return start, start + MAX_DRAWN_CELLS


def _describe_window(sizes: Sequence[int], windows: Sequence[tuple[int, int]]) -> str:
    """Return a description of the drawn part of an image or an axis."""
    texts = [
        f"{size:,} {name}" if stop - start == size else f"{name} {start:,} to {stop - 1:,} of {size:,}"
        for name, size, (start, stop) in zip(("rows", "columns"), sizes, windows, strict=True)
        if size > 1
    ]
    return ", ".join(texts) or "one"


def _merge_cells(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return neighboring cells of a row as one: (row, first column, end column)."""
    runs: list[tuple[int, int, int]] = []
    for row, column in sorted(set(zip(rows.tolist(), columns.tolist(), strict=True))):
        if runs and runs[-1][0] == row and runs[-1][2] == column:
            runs[-1] = row, runs[-1][1], column + 1
        else:
            runs.append((row, column, column + 1))
    return runs
