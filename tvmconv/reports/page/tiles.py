"""The page's pictures of tiles: which outputs one block computes, and one warp and one thread of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.memory.outputs import NOBODY, Outputs, outputs
from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARP
from tvmconv.kernel import Kernel
from tvmconv.reports.page.markup import Markup, element, paragraph
from tvmconv.reports.page.svg import chart, text

MOST = 64  # rows and columns that are drawn
SIDE = 640  # of a picture, at most
HEIGHT = 240
LARGEST = 14  # a cell
LEVELS = ("block", "warp", "thread")  # each within the one before
LEGEND = (
    "Outputs that the middle block of the grid computes, those of its first warp that stores, and of that warp's first "
    "thread."
)


def tiles(kernel: Kernel) -> Markup:
    """Pictures of one kernel's tiles: over the image, and over the channels."""
    try:
        found = outputs(kernel)
    except AnalysisError as error:
        return paragraph(f"Tiles cannot be told: {error}")
    if not len(found.places):
        return paragraph("The middle block of the grid stores nothing.")
    *before, _, _ = axes = range(len(found.shape)) if len(found.shape) > 1 else (-1, 0)
    parts = [_image(found, axes[-2], axes[-1])]
    if len(before) > 1:  # N, C and space
        parts.append(_strip(found, before[1], "channels"))
    return element("div", *parts, class_="tiles")


def _levels(found: Outputs) -> list[tuple[str, NDArray[np.bool_]]]:
    """Which of the outputs are of the block, of a warp, of a thread; TMA stores those of all threads."""
    stored = found.threads[found.threads != NOBODY]
    masks = [np.ones(len(found.threads), bool)]
    if len(stored):
        first = int(stored.min())
        masks += [found.threads // WARP == first // WARP, found.threads == first]
    return list(zip(LEVELS, masks, strict=False))


def _image(found: Outputs, rows: int, columns: int) -> Markup:
    """The plane of an image; of one axis of space a single row."""
    height = found.shape[rows] if rows >= 0 else 1
    down = found.places[:, rows] if rows >= 0 else np.zeros(len(found.places), np.int64)
    return _picture(found, "image", (height, found.shape[columns]), down, found.places[:, columns])


def _strip(found: Outputs, axis: int, name: str) -> Markup:
    """One axis, as a row."""
    down = np.zeros(len(found.places), np.int64)
    return _picture(found, name, (1, found.shape[axis]), down, found.places[:, axis])


def _picture(
    found: Outputs, name: str, sizes: tuple[int, int], down: NDArray[np.int64], across: NDArray[np.int64]
) -> Markup:
    windows = [_window(places, size) for places, size in zip((down, across), sizes, strict=True)]
    (top, bottom), (left, right) = windows
    cell = min(LARGEST, SIDE / (right - left), HEIGHT / (bottom - top))
    drawn = [
        element("rect", x=0, y=0, width=(right - left) * cell, height=(bottom - top) * cell, class_="plane"),
    ]
    counts = []
    for level, mask in _levels(found):
        cells = sorted(set(zip(down[mask].tolist(), across[mask].tolist(), strict=True)))
        counts.append(f"{level} {int(mask.sum()):,}")
        inside = [(row, column) for row, column in cells if top <= row < bottom and left <= column < right]
        for row, begin, end in _runs(inside):
            drawn.append(
                element(
                    *("rect",),
                    x=(begin - left) * cell,
                    y=(row - top) * cell,
                    width=(end - begin) * cell,
                    height=cell,
                    class_=f"tile {level}",
                )
            )
    where = f"{name}: " + _spans(sizes, windows)
    caption = text(0, (bottom - top) * cell + 14, f"{where}; outputs of the {', the '.join(counts)}", class_="small")
    return chart(where, SIDE, (bottom - top) * cell + 20, *drawn, caption)


def _window(places: NDArray[np.int64], size: int) -> tuple[int, int]:
    """The part of an axis that is drawn: all of it, or what is around the block."""
    if size <= MOST:
        return 0, size
    first, last = int(places.min()), int(places.max()) + 1
    begin = max(0, min((first + last - MOST) // 2, size - MOST) if last - first < MOST else first)
    return begin, begin + MOST


def _spans(sizes: Sequence[int], windows: Sequence[tuple[int, int]]) -> str:
    """What is drawn of an image or an axis."""
    names = [("rows", sizes[0], windows[0]), ("columns", sizes[1], windows[1])]
    told = [
        f"{size:,} {name}" if end - begin == size else f"{name} {begin:,} to {end - 1:,} of {size:,}"
        for name, size, (begin, end) in names
        if size > 1
    ]
    return ", ".join(told) or "one"


def _runs(cells: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Neighbouring cells of a row as one: (row, first column, the one behind the last)."""
    found: list[tuple[int, int, int]] = []
    for row, column in cells:
        if found and found[-1][0] == row and found[-1][2] == column:
            found[-1] = row, found[-1][1], column + 1
        else:
            found.append((row, column, column + 1))
    return found
