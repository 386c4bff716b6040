"""Pictures of tiles, and of memory requests: a warp's lanes on the banks and on the sectors of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.block_accesses import find_costliest_requests
from tvmconv.analysis.memory.output_tiles import NO_THREAD, OutputTileMap, map_output_tile
from tvmconv.analysis.memory.requests import CostliestRequest
from tvmconv.errors import AnalysisError
from tvmconv.kernel import Kernel
from tvmconv.reports.page.markup import Markup, join_markup, make_element, make_paragraph
from tvmconv.reports.page.svg import make_chart, make_line, make_rect, make_text
from tvmconv.target import BANK_BYTES, NUM_BANKS, SECTOR_BYTES, VECTOR_BYTES, WARP_SIZE

MAX_DRAWN_CELLS = 64  # rows and columns
MAX_PICTURE_WIDTH = 640  # px
HEIGHT = 240
MAX_CELL_SIZE = 14  # px
LEVELS = ("block", "warp", "thread")
TILES_LEGEND = (
    "Outputs of the middle block of the grid, of its first warp that stores, and of that warp's first thread."
)
CELL_WIDTH, ROW_HEIGHT, LEFT, TOP = 20, 16, 84, 20  # px: size of a word, origin of the grid
WIDTH = LEFT + NUM_BANKS * CELL_WIDTH + 4
LINE_BYTES = NUM_BANKS * BANK_BYTES  # one row of a picture
MAX_ROWS = 32
MAX_FIGURES = 8  # per kernel
MEMORY_LEGEND = (
    "Each picture shows the most expensive request of an access; each number is a lane of the warp, at the address of "
    "its bytes. Words of shared memory in the same bank are served one after the other, one row per wavefront. Words "
    "of global memory are loaded in sectors of 32 bytes; the sectors that are needed are shaded."
)


def render_memory(kernel: Kernel, kernel_number: int) -> Markup:
    """Render the pictures of one kernel, the largest excess over the minimum first. The kernel has this number on the
    page, as in the ids of its statements' groups.
    """
    try:
        requests = _group_requests(kernel, kernel_number)
    except AnalysisError as error:
        return make_paragraph(f"Accesses cannot be counted: {error}")
    requests.sort(key=lambda item: (item[0].min_cost - item[0].cost, -item[0].cost))
    fragments = [_render_figure(request, groups) for request, groups in requests[:MAX_FIGURES]]
    if (num_omitted := len(requests) - MAX_FIGURES) > 0:
        text = f"{num_omitted} more kinds of accesses have no larger excess over their minimum."
        fragments.append(make_paragraph(text))
    return join_markup(fragments)


def _group_requests(kernel: Kernel, kernel_number: int) -> list[tuple[CostliestRequest, list[str]]]:
    """Return the most expensive requests, each with the groups of all statements whose requests look the same."""
    requests: dict[tuple[object, ...], tuple[CostliestRequest, list[str]]] = {}
    for kernel_index, lowered_kernel in enumerate(kernel.kernels):
        for request in find_costliest_requests(kernel, lowered_kernel):
            line_start = request.addresses[0] // LINE_BYTES * LINE_BYTES
            offsets = tuple(address - line_start for address in request.addresses)
            access = request.memory_space, request.kind, request.name, request.access_bytes
            _, groups = requests.setdefault((kernel_index, *access, request.lanes, offsets), (request, []))
            group = f"k{kernel_number}s{kernel_index}n{request.statement_index}"
            groups += [group] if group not in groups else []
    return [*requests.values()]


def _render_figure(request: CostliestRequest, groups: Sequence[str]) -> Markup:
    description = _describe_request(request, len(groups))
    render_lanes = _render_banks if request.memory_space == "shared" else _render_sectors
    return make_element(
        "div",
        render_lanes(request, description),
        make_paragraph(description),
        class_="request" + " costly" * (request.cost > request.min_cost),
        data_groups=" ".join(groups),
        tabindex="0",
        role="button",
        aria_label=description,
    )


def _describe_request(request: CostliestRequest, num_occurrences: int) -> str:
    unit = "wavefront" if request.memory_space == "shared" else "sector"
    plural = "" if request.cost == 1 else "s"
    minimum_text = "the minimum" if request.cost == request.min_cost else f"the minimum is {request.min_cost}"
    occurrence_text = f", at {num_occurrences} statements of the code" if num_occurrences > 1 else ""
    return (
        f"{request.kind} of {request.name}, {request.memory_space} memory, {request.access_bytes} bytes per lane: "
        f"{request.cost} {unit}{plural}, {minimum_text}{occurrence_text}"
    )


def _render_banks(request: CostliestRequest, description: str) -> Markup:
    """Render banks as columns and wavefronts as rows."""
    cells, num_rows = _arrange_banks(request, 1)
    if num_rows != request.cost:
        paired_cells, num_paired_rows = _arrange_banks(request, 2)
        if num_paired_rows == request.cost:
            cells, num_rows = paired_cells, num_paired_rows
    return _render_grid(description, "bank", [f"wavefront {row + 1}" for row in range(num_rows)], cells, [])


def _arrange_banks(request: CostliestRequest, parts_per_wavefront: int) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Return the words of a request as (bank, row, lanes), and the number of rows. An access of more than 4 bytes per
    lane splits the warp into parts, of which `parts_per_wavefront` are served at once.
    """
    words = max(1, min(request.access_bytes, VECTOR_BYTES) // BANK_BYTES)
    lanes_by_group: dict[int, dict[int, list[int]]] = {}  # lanes by word, per group of threads that are served at once
    for lane, address in zip(request.lanes, request.addresses, strict=True):
        lanes_by_word = lanes_by_group.setdefault(lane * words // WARP_SIZE // parts_per_wavefront, {})
        for word in range(address // BANK_BYTES, address // BANK_BYTES + words):
            lanes_by_word.setdefault(word, []).append(lane)
    cells, num_rows = [], 0
    for _, lanes_by_word in sorted(lanes_by_group.items()):
        words_by_bank: Counter[int] = Counter()
        for word in sorted(lanes_by_word):
            cells.append((word % NUM_BANKS, num_rows + words_by_bank[word % NUM_BANKS], lanes_by_word[word]))
            words_by_bank[word % NUM_BANKS] += 1
        num_rows += max(words_by_bank.values())
    return cells, num_rows


def _render_sectors(request: CostliestRequest, description: str) -> Markup:
    """Render words as columns, and one row for each 128 bytes that are accessed."""
    lanes: dict[int, list[int]] = {}  # by word
    for lane, address in zip(request.lanes, request.addresses, strict=True):
        for word in range(address // BANK_BYTES, (address + request.access_bytes - 1) // BANK_BYTES + 1):
            lanes.setdefault(word, []).append(lane)
    row_by_line = {line_index: row for row, line_index in enumerate(sorted({word // NUM_BANKS for word in lanes}))}
    cells = [
        (word % NUM_BANKS, row_by_line[word // NUM_BANKS], word_lanes) for word, word_lanes in sorted(lanes.items())
    ]
    words = SECTOR_BYTES // BANK_BYTES
    shaded_sectors = sorted({(word % NUM_BANKS // words, row_by_line[word // NUM_BANKS]) for word in lanes})
    first_line = min(row_by_line) if row_by_line else 0
    labels = [f"+{(line_index - first_line) * LINE_BYTES:,} B" for line_index in row_by_line]
    return _render_grid(description, "word", labels, cells, shaded_sectors)


def _render_grid(
    description: str,
    unit: str,
    labels: Sequence[str],
    cells: Sequence[tuple[int, int, list[int]]],
    shaded_sectors: Sequence[tuple[int, int]],
) -> Markup:
    """Render a grid of words: cells are (column, row, lanes), and shaded sectors (index in the row, row)."""
    num_shown = min(len(labels), MAX_ROWS)
    bottom, words = TOP + num_shown * ROW_HEIGHT, SECTOR_BYTES // BANK_BYTES
    height = bottom + (ROW_HEIGHT if num_shown < len(labels) else 4)
    elements = [make_text(LEFT - 6, 14, unit, "end", "axis-label")]
    for bank in range(0, NUM_BANKS, 4):
        elements.append(make_text(LEFT + (bank + 0.5) * CELL_WIDTH, 14, str(bank), "middle", "small"))
    for row, label in enumerate(labels[:num_shown]):
        elements.append(make_text(LEFT - 6, TOP + (row + 0.75) * ROW_HEIGHT, label, "end", "small"))
    for sector, row in shaded_sectors:
        if row < num_shown:
            x, y = LEFT + sector * words * CELL_WIDTH, TOP + row * ROW_HEIGHT
            elements.append(make_rect(x, y, words * CELL_WIDTH, ROW_HEIGHT, "sector"))
    elements += [_render_cell(*cell) for cell in _merge_cells(cells) if cell[2] < num_shown]
    for bank in range(0, NUM_BANKS + 1, 4):
        x = LEFT + bank * CELL_WIDTH
        elements.append(make_line(x, TOP, x, bottom, "grid" if bank % words else "axis"))
    if num_shown < len(labels):
        elements.append(make_text(LEFT, height - 3, f"and {len(labels) - num_shown} more rows", class_="small"))
    return make_chart(description, WIDTH, height, *elements)


def _merge_cells(cells: Sequence[tuple[int, int, Any]]) -> Iterator[tuple[int, int, int, Any]]:
    """Yield neighboring cells (column, row, content) of equal content as (first column, end column, row, content)."""
    sorted_cells = sorted(cells, key=lambda cell: (cell[1], cell[0]))
    run_start = 0
    for index, (column, row, lanes) in enumerate(sorted_cells):
        if index + 1 == len(sorted_cells) or sorted_cells[index + 1] != (column + 1, row, lanes):
            yield sorted_cells[run_start][0], column + 1, row, lanes
            run_start = index + 1


def _render_cell(first_column: int, end_column: int, row: int, lanes: Sequence[int]) -> Markup:
    x, y, width = LEFT + first_column * CELL_WIDTH, TOP + row * ROW_HEIGHT, (end_column - first_column) * CELL_WIDTH
    rect = make_rect(x + 0.5, y + 0.5, width - 1, ROW_HEIGHT - 1, f"lane l{lanes[0] // 4}")
    label = str(lanes[0]) if len(lanes) == 1 else f"{lanes[0]}+"
    text = make_text(x + width / 2, y + 12, label, "middle", "lane-label")
    if len(lanes) == 1:
        return join_markup([rect, text])
    return make_element("g", make_element("title", f"lanes {', '.join(map(str, lanes))}"), rect, text)


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
        cells = set(zip((columns[shown] - first_column).tolist(), (rows[shown] - first_row).tolist(), strict=True))
        for first, end, row, _ in _merge_cells([(column, row, None) for column, row in cells]):
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
