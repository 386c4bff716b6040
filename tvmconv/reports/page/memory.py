"""The page's pictures of memory: a warp's lanes on the banks of shared memory and on the sectors of global memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvmconv.analysis.asked import costliest_requests
from tvmconv.analysis.memory.coalescing import SECTOR_BYTES
from tvmconv.analysis.memory.requests import Request
from tvmconv.errors import AnalysisError
from tvmconv.gpu import BANK_BYTES, BANKS, VECTOR_BYTES, WARP
from tvmconv.kernel import Kernel
from tvmconv.reports.page.markup import Markup, element, joined, paragraph
from tvmconv.reports.page.svg import chart, line, text

CELL, ROW, LEFT, TOP = 20, 16, 84, 20  # a word's width and height, and where the grid begins
WIDTH = LEFT + BANKS * CELL + 4
LINE_BYTES = BANKS * BANK_BYTES  # 128: a row of either picture
MOST_ROWS = 32
MOST_FIGURES = 8  # of a kernel
LEGEND = (
    "Each number is a lane of one warp, where its bytes lie: the request of each access that takes most. Words of "
    "shared memory that lie in one bank are served one after the other, row by row; words of global memory come by "
    "sectors of 32 bytes, which are shaded where one has to come."
)


@dataclass(frozen=True)
class _Alike:
    """Accesses whose costliest requests look the same."""

    request: Request
    groups: tuple[str, ...]


def memory(kernel: Kernel, number: int) -> Markup:
    """The pictures of one kernel, those first whose requests take most beyond what they have to.

    Args:
        kernel: a built kernel.
        number: of the kernel on the page, as in the ids of its statements' groups.
    """
    try:
        found = list(_alike(kernel, number))
    except AnalysisError as error:
        return paragraph(f"Accesses cannot be counted: {error}")
    found.sort(key=lambda each: (each.request.least - each.request.takes, -each.request.takes))
    left = len(found) - MOST_FIGURES
    more = [paragraph(f"{left} more kinds of accesses take no more than these beyond what they have to.")]
    return joined([*(_figure(each) for each in found[:MOST_FIGURES]), *(more if left > 0 else [])])


def _alike(kernel: Kernel, number: int) -> Iterator[_Alike]:
    """The costliest requests, with the groups of all statements whose requests are like them."""
    kinds: dict[tuple[object, ...], list[str]] = {}
    firsts: dict[tuple[object, ...], Request] = {}
    for place, step in enumerate(kernel.steps):
        for request in costliest_requests(kernel, step):
            begin = request.addresses[0] // LINE_BYTES * LINE_BYTES
            pattern = request.lanes, tuple(address - begin for address in request.addresses)
            kind: tuple[object, ...] = place, request.space, request.kind, request.name, request.nbytes, pattern
            firsts.setdefault(kind, request)
            kinds.setdefault(kind, []).append(f"k{number}s{place}n{request.statement}")
    for kind, request in firsts.items():
        yield _Alike(request, tuple(dict.fromkeys(kinds[kind])))


def _figure(alike: _Alike) -> Markup:
    request = alike.request
    told = _told(request, len(alike.groups))
    return element(
        "div",
        _banks(request, told) if request.space == "shared" else _sectors(request, told),
        paragraph(told),
        class_="request" + " costly" * (request.takes > request.least),
        data_groups=" ".join(alike.groups),
        tabindex="0",
        role="button",
        aria_label=told,
    )


def _told(request: Request, places: int) -> str:
    unit = "wavefront" if request.space == "shared" else "sector"
    plural = "" if request.takes == 1 else "s"
    rest = "as few as can be" if request.takes == request.least else f"{request.least} would do"
    where = f", in {places} places of the code" if places > 1 else ""
    return (
        f"{request.kind} of {request.name}, {request.space} memory, {request.nbytes} bytes a lane: "
        f"{request.takes} {unit}{plural}, {rest}{where}"
    )


def _banks(request: Request, told: str) -> Markup:
    """Banks as columns, and a row for each wavefront."""
    found = [_rows_of_banks(request, together) for together in (1, 2)]
    cells, top = next((each for each in found if each[1] == request.takes), found[0])
    labels = [f"wavefront {row + 1}" for row in range(top)]
    return _grid(told, "bank", labels, cells, [])


def _rows_of_banks(request: Request, together: int) -> tuple[list[tuple[int, int, list[int]]], int]:
    """The words of a request as (bank, row, lanes), and how many rows they are.

    Args:
        request: to shared memory.
        together: parts of a warp that are served at once, of those that so many bytes a lane make of it.
    """
    words = max(1, min(request.nbytes, VECTOR_BYTES) // BANK_BYTES)
    served: dict[int, dict[int, list[int]]] = {}  # lanes by word, of the threads that are served together
    for lane, address in zip(request.lanes, request.addresses, strict=True):
        group = served.setdefault(lane * words // WARP // together, {})
        for word in range(address // BANK_BYTES, address // BANK_BYTES + words):
            group.setdefault(word, []).append(lane)
    cells, top = [], 0
    for _, group in sorted(served.items()):
        depth: Counter[int] = Counter()
        for word in sorted(group):
            cells.append((word % BANKS, top + depth[word % BANKS], group[word]))
            depth[word % BANKS] += 1
        top += max(depth.values())
    return cells, top


def _sectors(request: Request, told: str) -> Markup:
    """Words as columns, and a row for each 128 bytes that are touched."""
    lanes: dict[int, list[int]] = {}  # by word
    for lane, address in zip(request.lanes, request.addresses, strict=True):
        for word in range(address // BANK_BYTES, (address + request.nbytes - 1) // BANK_BYTES + 1):
            lanes.setdefault(word, []).append(lane)
    rows = {begin: row for row, begin in enumerate(sorted({word // BANKS for word in lanes}))}
    cells = [(word % BANKS, rows[word // BANKS], own) for word, own in sorted(lanes.items())]
    words = SECTOR_BYTES // BANK_BYTES
    shaded = sorted({(word % BANKS // words, rows[word // BANKS]) for word in lanes})
    first = min(rows) if rows else 0
    labels = [f"+{(begin - first) * LINE_BYTES:,} B" for begin in rows]
    return _grid(told, "word", labels, cells, shaded)


def _grid(
    told: str,
    unit: str,
    labels: Sequence[str],
    cells: Sequence[tuple[int, int, list[int]]],
    shaded: Sequence[tuple[int, int]],
) -> Markup:
    """A grid of words.

    Args:
        told: what it shows.
        unit: what the columns are.
        labels: of the rows.
        cells: with lanes in them, as (column, row, lanes).
        shaded: sectors, as (which of the row's four, row).
    """
    shown = min(len(labels), MOST_ROWS)
    height = TOP + shown * ROW + (ROW if shown < len(labels) else 4)
    words = SECTOR_BYTES // BANK_BYTES
    drawn = [text(LEFT - 6, 14, unit, "end", "axis-label")]
    drawn += [text(LEFT + (bank + 0.5) * CELL, 14, str(bank), "middle", "small") for bank in range(0, BANKS, 4)]
    drawn += [text(LEFT - 6, TOP + (row + 0.75) * ROW, labels[row], "end", "small") for row in range(shown)]
    drawn += [
        element(
            *("rect",),
            x=LEFT + sector * words * CELL,
            y=TOP + row * ROW,
            width=words * CELL,
            height=ROW,
            class_="sector",
        )
        for sector, row in shaded
        if row < shown
    ]
    drawn += [_cell(*cell) for cell in _runs(cells) if cell[2] < shown]
    drawn += [
        line(LEFT + bank * CELL, TOP, LEFT + bank * CELL, TOP + shown * ROW, "grid" if bank % words else "axis")
        for bank in range(0, BANKS + 1, 4)
    ]
    if shown < len(labels):
        drawn.append(text(LEFT, height - 3, f"and {len(labels) - shown} rows more", class_="small"))
    return chart(told, WIDTH, height, *drawn)


def _runs(cells: Sequence[tuple[int, int, list[int]]]) -> Iterator[tuple[int, int, int, list[int]]]:
    """Neighbouring words of the same lanes as one: (first column, the one behind the last, row, lanes)."""
    ordered = sorted(cells, key=lambda cell: (cell[1], cell[0]))
    begin = 0
    for i, (column, row, lanes) in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != (column + 1, row, lanes):
            yield ordered[begin][0], column + 1, row, lanes
            begin = i + 1


def _cell(first: int, behind: int, row: int, lanes: Sequence[int]) -> Markup:
    x, y, width = LEFT + first * CELL, TOP + row * ROW, (behind - first) * CELL
    rect = element("rect", x=x + 0.5, y=y + 0.5, width=width - 1, height=ROW - 1, class_=f"lane l{lanes[0] // 4}")
    if len(lanes) == 1:
        return joined([rect, text(x + width / 2, y + 12, str(lanes[0]), "middle", "lane-label")])
    who = element("title", f"lanes {', '.join(map(str, lanes))}")
    return element("g", who, rect, text(x + width / 2, y + 12, f"{lanes[0]}+", "middle", "lane-label"))
