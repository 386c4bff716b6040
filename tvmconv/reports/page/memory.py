"""Pictures of memory requests: a warp's lanes on the banks of shared memory and on the sectors of global memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvmconv.analysis.block_accesses import find_costliest_requests
from tvmconv.analysis.memory.requests import CostliestRequest
from tvmconv.errors import AnalysisError
from tvmconv.kernel import Kernel
from tvmconv.reports.page.markup import Markup, join_markup, make_element, make_paragraph
from tvmconv.reports.page.svg import make_chart, make_line, make_text
from tvmconv.target import BANK_BYTES, NUM_BANKS, SECTOR_BYTES, VECTOR_BYTES, WARP_SIZE

CELL_WIDTH, ROW_HEIGHT, LEFT, TOP = 20, 16, 84, 20  # px: size of a word, origin of the grid
WIDTH = LEFT + NUM_BANKS * CELL_WIDTH + 4
LINE_BYTES = NUM_BANKS * BANK_BYTES  # one row of a picture
MAX_ROWS = 32
MAX_FIGURES = 8  # per kernel
LEGEND = (
    "Each picture shows the most expensive request of an access; each number is a lane of the warp, at the address of "
    "its bytes. Words of shared memory in the same bank are served one after the other, one row per wavefront. Words "
    "of global memory are loaded in sectors of 32 bytes; the sectors that are needed are shaded."
)


@dataclass(frozen=True)
class _RequestGroup:
    """Accesses whose most expensive requests look the same."""

    request: CostliestRequest
    groups: tuple[str, ...]


def render_memory(kernel: Kernel, kernel_number: int) -> Markup:
    """Render the pictures of one kernel, the largest excess over the minimum first.

    Args:
        kernel: A built kernel.
        kernel_number: Number of the kernel on the page, as in the ids of its statements' groups.
    """
    try:
        request_groups = list(_group_requests(kernel, kernel_number))
    except AnalysisError as error:
        return make_paragraph(f"Accesses cannot be counted: {error}")
    request_groups.sort(
        key=lambda request_group: (
            request_group.request.min_cost - request_group.request.cost,
            -request_group.request.cost,
        )
    )
    num_omitted = len(request_groups) - MAX_FIGURES
    omission_note = [make_paragraph(f"{num_omitted} more kinds of accesses have no larger excess over their minimum.")]
    return join_markup(
        [
            *(_render_figure(request_group) for request_group in request_groups[:MAX_FIGURES]),
            *(omission_note if num_omitted > 0 else []),
        ]
    )


def _group_requests(kernel: Kernel, kernel_number: int) -> Iterator[_RequestGroup]:
    """Yield the most expensive requests, each with the groups of all statements whose requests are equal."""
    statements_by_key: dict[tuple[object, ...], list[str]] = {}
    first_requests: dict[tuple[object, ...], CostliestRequest] = {}
    for kernel_index, lowered_kernel in enumerate(kernel.kernels):
        for request in find_costliest_requests(kernel, lowered_kernel):
            line_start = request.addresses[0] // LINE_BYTES * LINE_BYTES
            pattern = request.lanes, tuple(address - line_start for address in request.addresses)
            group_key: tuple[object, ...] = (
                kernel_index,
                request.memory_space,
                request.kind,
                request.name,
                request.access_bytes,
                pattern,
            )
            first_requests.setdefault(group_key, request)
            statements_by_key.setdefault(group_key, []).append(
                f"k{kernel_number}s{kernel_index}n{request.statement_index}"
            )
    for group_key, request in first_requests.items():
        yield _RequestGroup(request, tuple(dict.fromkeys(statements_by_key[group_key])))


def _render_figure(request_group: _RequestGroup) -> Markup:
    request = request_group.request
    description = _describe_request(request, len(request_group.groups))
    return make_element(
        "div",
        _render_banks(request, description)
        if request.memory_space == "shared"
        else _render_sectors(request, description),
        make_paragraph(description),
        class_="request" + " costly" * (request.cost > request.min_cost),
        data_groups=" ".join(request_group.groups),
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
    arrangements = [_arrange_banks(request, parts_per_wavefront) for parts_per_wavefront in (1, 2)]
    cells, num_rows = next(
        (arrangement for arrangement in arrangements if arrangement[1] == request.cost), arrangements[0]
    )
    labels = [f"wavefront {row + 1}" for row in range(num_rows)]
    return _render_grid(description, "bank", labels, cells, [])


def _arrange_banks(request: CostliestRequest, parts_per_wavefront: int) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Return the words of a request as (bank, row, lanes), and the number of rows.

    Args:
        request: Request to shared memory.
        parts_per_wavefront: Number of parts of a warp that are served at once, where an access of more than 4 bytes per
            lane splits the warp into parts.
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
    """Render a grid of words.

    Args:
        description: Description of the picture.
        unit: Unit of the columns.
        labels: Labels of the rows.
        cells: Words that lanes access, as (column, row, lanes).
        shaded_sectors: Sectors as (index in the row, row).
    """
    num_shown = min(len(labels), MAX_ROWS)
    height = TOP + num_shown * ROW_HEIGHT + (ROW_HEIGHT if num_shown < len(labels) else 4)
    words = SECTOR_BYTES // BANK_BYTES
    elements = [make_text(LEFT - 6, 14, unit, "end", "axis-label")]
    elements += [
        make_text(LEFT + (bank + 0.5) * CELL_WIDTH, 14, str(bank), "middle", "small") for bank in range(0, NUM_BANKS, 4)
    ]
    elements += [
        make_text(LEFT - 6, TOP + (row + 0.75) * ROW_HEIGHT, labels[row], "end", "small") for row in range(num_shown)
    ]
    elements += [
        make_element(
            *("rect",),
            x=LEFT + sector * words * CELL_WIDTH,
            y=TOP + row * ROW_HEIGHT,
            width=words * CELL_WIDTH,
            height=ROW_HEIGHT,
            class_="sector",
        )
        for sector, row in shaded_sectors
        if row < num_shown
    ]
    elements += [_render_cell(*cell) for cell in _merge_cells(cells) if cell[2] < num_shown]
    elements += [
        make_line(
            LEFT + bank * CELL_WIDTH,
            TOP,
            LEFT + bank * CELL_WIDTH,
            TOP + num_shown * ROW_HEIGHT,
            "grid" if bank % words else "axis",
        )
        for bank in range(0, NUM_BANKS + 1, 4)
    ]
    if num_shown < len(labels):
        elements.append(make_text(LEFT, height - 3, f"and {len(labels) - num_shown} more rows", class_="small"))
    return make_chart(description, WIDTH, height, *elements)


def _merge_cells(cells: Sequence[tuple[int, int, list[int]]]) -> Iterator[tuple[int, int, int, list[int]]]:
    """Yield neighboring words of the same lanes as one: (first column, end column, row, lanes)."""
    sorted_cells = sorted(cells, key=lambda cell: (cell[1], cell[0]))
    run_start = 0
    for index, (column, row, lanes) in enumerate(sorted_cells):
        if index + 1 == len(sorted_cells) or sorted_cells[index + 1] != (column + 1, row, lanes):
            yield sorted_cells[run_start][0], column + 1, row, lanes
            run_start = index + 1


def _render_cell(first_column: int, end_column: int, row: int, lanes: Sequence[int]) -> Markup:
    x, y, width = LEFT + first_column * CELL_WIDTH, TOP + row * ROW_HEIGHT, (end_column - first_column) * CELL_WIDTH
    rect = make_element(
        "rect", x=x + 0.5, y=y + 0.5, width=width - 1, height=ROW_HEIGHT - 1, class_=f"lane l{lanes[0] // 4}"
    )
    if len(lanes) == 1:
        return join_markup([rect, make_text(x + width / 2, y + 12, str(lanes[0]), "middle", "lane-label")])
    lanes_title = make_element("title", f"lanes {', '.join(map(str, lanes))}")
    return make_element(
        "g", lanes_title, rect, make_text(x + width / 2, y + 12, f"{lanes[0]}+", "middle", "lane-label")
    )
