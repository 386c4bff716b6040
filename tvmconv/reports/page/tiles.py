"""Pictures of tiles: the outputs of one block, of one of its warps, and of one thread of that warp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.memory.output_tiles import NO_THREAD, OutputTileMap, map_output_tile
from tvmconv.errors import AnalysisError
from tvmconv.kernel import Kernel
from tvmconv.reports.page.markup import Markup, make_element, make_paragraph
from tvmconv.reports.page.svg import make_chart, make_text
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
        output_tile = map_output_tile(kernel)
    except AnalysisError as error:
        return make_paragraph(f"The tiles are unknown: {error}")
    if not len(output_tile.coordinates):
        return make_paragraph("The middle block of the grid stores nothing.")
    *leading_axes, _, _ = axes = range(len(output_tile.shape)) if len(output_tile.shape) > 1 else (-1, 0)
    fragments = [_render_image(output_tile, axes[-2], axes[-1])]
    if len(leading_axes) > 1:  # N, C and space
        fragments.append(_render_axis(output_tile, leading_axes[1], "channels"))
    return make_element("div", *fragments, class_="tiles")


def _list_level_masks(output_tile: OutputTileMap) -> list[tuple[str, NDArray[np.bool_]]]:
    """Return which outputs belong to the block, to a warp and to a thread; TMA stores for all threads."""
    storing_threads = output_tile.threads[output_tile.threads != NO_THREAD]
    masks = [np.ones(len(output_tile.threads), bool)]
    if len(storing_threads):
        first = int(storing_threads.min())
        masks += [output_tile.threads // WARP_SIZE == first // WARP_SIZE, output_tile.threads == first]
    return list(zip(LEVELS, masks, strict=False))


def _render_image(output_tile: OutputTileMap, row_axis: int, column_axis: int) -> Markup:
    """Render the plane of an image, or a single row if there is one spatial axis."""
    height = output_tile.shape[row_axis] if row_axis >= 0 else 1
    row_indices = (
        output_tile.coordinates[:, row_axis] if row_axis >= 0 else np.zeros(len(output_tile.coordinates), np.int64)
    )
    return _render_picture(
        output_tile,
        "image",
        (height, output_tile.shape[column_axis]),
        row_indices,
        output_tile.coordinates[:, column_axis],
    )


def _render_axis(output_tile: OutputTileMap, axis: int, name: str) -> Markup:
    """Render one axis as a row."""
    row_indices = np.zeros(len(output_tile.coordinates), np.int64)
    return _render_picture(
        output_tile, name, (1, output_tile.shape[axis]), row_indices, output_tile.coordinates[:, axis]
    )


def _render_picture(
    output_tile: OutputTileMap,
    name: str,
    sizes: tuple[int, int],
    row_indices: NDArray[np.int64],
    column_indices: NDArray[np.int64],
) -> Markup:
    windows = [
        _select_window(axis_indices, size)
        for axis_indices, size in zip((row_indices, column_indices), sizes, strict=True)
    ]
    (first_visible_row, end_visible_row), (first_visible_column, end_visible_column) = windows
    cell = min(
        MAX_CELL_SIZE,
        MAX_PICTURE_WIDTH / (end_visible_column - first_visible_column),
        HEIGHT / (end_visible_row - first_visible_row),
    )
    elements = [
        make_element(
            "rect",
            x=0,
            y=0,
            width=(end_visible_column - first_visible_column) * cell,
            height=(end_visible_row - first_visible_row) * cell,
            class_="plane",
        ),
    ]
    counts = []
    for level, mask in _list_level_masks(output_tile):
        cells = sorted(set(zip(row_indices[mask].tolist(), column_indices[mask].tolist(), strict=True)))
        counts.append(f"{level} {int(mask.sum()):,}")
        visible_cells = [
            (row, column)
            for row, column in cells
            if first_visible_row <= row < end_visible_row and first_visible_column <= column < end_visible_column
        ]
        for row, first_column, end_column in _merge_cells(visible_cells):
            elements.append(
                make_element(
                    *("rect",),
                    x=(first_column - first_visible_column) * cell,
                    y=(row - first_visible_row) * cell,
                    width=(end_column - first_column) * cell,
                    height=cell,
                    class_=f"tile {level}",
                )
            )
    description = f"{name}: " + _describe_window(sizes, windows)
    caption = make_text(
        0,
        (end_visible_row - first_visible_row) * cell + 14,
        f"{description}; outputs of the {', the '.join(counts)}",
        class_="small",
    )
    return make_chart(
        description, MAX_PICTURE_WIDTH, (end_visible_row - first_visible_row) * cell + 20, *elements, caption
    )


def _select_window(axis_indices: NDArray[np.int64], size: int) -> tuple[int, int]:
    """Return the drawn part of an axis: all of it, or the surroundings of the block."""
    if size <= MAX_DRAWN_CELLS:
        return 0, size
    first, last = int(axis_indices.min()), int(axis_indices.max()) + 1
    start = max(
        0,
        min((first + last - MAX_DRAWN_CELLS) // 2, size - MAX_DRAWN_CELLS) if last - first < MAX_DRAWN_CELLS else first,
    )
    return start, start + MAX_DRAWN_CELLS


def _describe_window(sizes: Sequence[int], windows: Sequence[tuple[int, int]]) -> str:
    """Return a description of the drawn part of an image or an axis."""
    names = [("rows", sizes[0], windows[0]), ("columns", sizes[1], windows[1])]
    texts = [
        f"{size:,} {name}" if stop - start == size else f"{name} {start:,} to {stop - 1:,} of {size:,}"
        for name, size, (start, stop) in names
        if size > 1
    ]
    return ", ".join(texts) or "one"


def _merge_cells(cells: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return neighboring cells of a row as one: (row, first column, end column)."""
    runs: list[tuple[int, int, int]] = []
    for row, column in cells:
        if runs and runs[-1][0] == row and runs[-1][2] == column:
            runs[-1] = row, runs[-1][1], column + 1
        else:
            runs.append((row, column, column + 1))
    return runs
