"""Pictures of docs/kernels.md: the pipeline in time by a model of its events, and the 128-byte swizzle.

    python docs/kernels_pictures.py docs     write kernels-timeline.svg and kernels-swizzle.svg

The model has the rules of the barriers and assumed durations: a copy starts when its stage is empty, a multiplication
when its stage is full and the tensor cores are free, and an epilogue when all K tiles of its tile are multiplied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

K_TILES, TILES = 5, 3
CTA_START, COPY_LATENCY, COPY_INTERVAL, MULTIPLICATION, EPILOGUE = 0.6, 0.8, 0.25, 0.35, 1.2  # microseconds


@dataclass(frozen=True)
class Variant:
    """A kernel whose events are drawn.

    Attributes:
        title: Title of its picture.
        stages: Stages of the pipeline.
        is_persistent: Whether one CTA computes all tiles; otherwise one CTA runs after another.
        has_pingpong: Whether two warpgroups compute tiles in turn, so that the next mainloop overlaps an epilogue.
    """

    title: str
    stages: int
    is_persistent: bool = False
    has_pingpong: bool = False


VARIANTS = (
    Variant("Step 3: one stage, a CTA for each tile", 1),
    Variant("Step 4: four stages", 4),
    Variant("Step 5: persistent CTA", 4, is_persistent=True),
    Variant("Step 8: ping-pong", 4, is_persistent=True, has_pingpong=True),
)


@dataclass(frozen=True)
class Event:
    """What happens in a row of the picture, from `start` to `end` in microseconds."""

    row: str
    kind: str
    tile: int
    start: float
    end: float


def simulate(variant: Variant) -> list[Event]:
    """Return the events of a kernel's tiles on one SM."""
    events, now = [], CTA_START
    empty_at, issued_at, full_at, cores_free_at, stored_at, step = [now] * variant.stages, now, now, now, now, 0
    for tile in range(TILES):
        if tile and not variant.is_persistent:  # a new CTA starts when the one before has ended
            now = stored_at + CTA_START
            empty_at, issued_at, full_at, cores_free_at = [now] * variant.stages, now, now, now
        for _ in range(K_TILES):
            stage = step % variant.stages
            issued_at = max(issued_at, empty_at[stage])
            full_at = max(issued_at + COPY_LATENCY, full_at + COPY_INTERVAL)
            start = max(full_at, cores_free_at)
            cores_free_at = start + MULTIPLICATION
            events.append(Event(f"stage {stage}", "copy", tile, issued_at, full_at))
            events.append(Event(f"stage {stage}", "multiply", tile, start, cores_free_at))
            events.append(Event("tensor cores", "multiply", tile, start, cores_free_at))
            empty_at[stage], step = cores_free_at, step + 1
        stored_at = cores_free_at + EPILOGUE
        events.append(Event("epilogue", "store", tile, cores_free_at, stored_at))
        if not variant.has_pingpong:
            cores_free_at = stored_at  # the same warpgroup multiplies and stores
    return events


STYLE = """<style>
text { font: 12px Helvetica, Arial, sans-serif; fill: #24292f }
.title { font-weight: bold }
.small { font-size: 10px }
.card { fill: #ffffff; stroke: #d0d7de }
.row { fill: #f2f4f7 }
.t0 { fill: #1f77b4 } .t1 { fill: #d9730d } .t2 { fill: #2a9d4a }
.copy { fill-opacity: 0.35 }
.store { fill-opacity: 0.65 }
.cell { fill: #e8ecf1; stroke: #ffffff }
.read { fill: #d9730d }
.read-text { fill: #ffffff; font-weight: bold }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.card { fill: #0d1117; stroke: #30363d }
.row { fill: #1a2029 }
.t0 { fill: #58a6ff } .t1 { fill: #f0883e } .t2 { fill: #56d364 }
.cell { fill: #262d37; stroke: #0d1117 }
.read-text { fill: #ffffff }
}
</style>"""


def svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    """Return a picture on a card of its own, which suits light and dark pages."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
    card = f'<rect class="card" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="6"/>'
    return "\n".join([f'{head} role="img" aria-label="{label}">', STYLE, card, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, css: str = "", anchor: str = "start") -> str:
    """Return a text."""
    css = f' class="{css}"' if css else ""
    return f'<text x="{x:g}" y="{y:g}"{css} text-anchor="{anchor}">{words}</text>'


def rect(x: float, y: float, width: float, height: float, css: str) -> str:
    """Return a rectangle."""
    return f'<rect class="{css}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}"/>'


LEFT, PIXELS_PER_US = 106, 33
ROW_HEIGHTS = {"tensor cores": 16, "epilogue": 16}  # other rows are stages


def draw_timeline() -> str:
    """Return the picture of all variants, with one time axis."""
    parts: list[str] = []
    runs = [(variant, simulate(variant)) for variant in VARIANTS]
    end = max(event.end for _, events in runs for event in events)
    width, y = LEFT + end * PIXELS_PER_US + 70, 12.0
    for variant, events in runs:
        duration = max(event.end for event in events)
        parts.append(text(12, y + 14, variant.title, "title"))
        y += 22
        for row in [*(f"stage {i}" for i in range(variant.stages)), "tensor cores", "epilogue"]:
            height = ROW_HEIGHTS.get(row, 13)
            parts.append(text(LEFT - 8, y + height / 2 + 4, row, anchor="end"))
            parts.append(rect(LEFT, y, duration * PIXELS_PER_US, height, "row"))
            for event in events:
                if event.row == row:
                    x, length = LEFT + event.start * PIXELS_PER_US, (event.end - event.start) * PIXELS_PER_US
                    parts.append(rect(x, y + 1, length - 1, height - 2, f"t{event.tile} {event.kind}"))
            y += height + 2
        parts.append(text(LEFT + duration * PIXELS_PER_US + 6, y - 6, f"{duration:.1f} µs"))
        y += 10
    parts += draw_legend(y + 4)
    return svg(width, y + 34, "Events of four kernels in time", parts)


def draw_legend(y: float) -> Iterator[str]:
    """Yield the legend: colours of tiles, and shades of what happens."""
    x = 12.0
    for css, words in (
        ("t0 copy", "TMA copies"),
        ("t0 multiply", "wgmma multiplies"),
        ("t0 store", "epilogue"),
        ("t0", "tile 0"),
        ("t1", "tile 1"),
        ("t2", "tile 2"),
    ):
        yield rect(x, y, 16, 12, css)
        yield text(x + 22, y + 10, words)
        x += 40 + 6.6 * len(words)


CELL = 34


def draw_swizzle() -> str:
    """Return the picture of 8 rows of 128 bytes, without and with the 128-byte swizzle."""
    parts = []
    for panel, (title, mask) in enumerate((("no swizzle: 8-way bank conflict", 0), ("128-byte swizzle: all banks", 7))):
        left, top = 60 + panel * (8 * CELL + 70), 58
        parts.append(text(left, 22, title, "title"))
        parts.append(text(left - 8, top - 8, "banks", "small", "end"))
        for place in range(8):
            banks = f"{4 * place}–{4 * place + 3}"
            parts.append(text(left + (place + 0.5) * CELL, top - 8, banks, "small", "middle"))
        for row in range(8):
            y = top + row * CELL
            parts.append(text(left - 8, y + CELL / 2 + 4, f"row {row}", anchor="end"))
            for place in range(8):
                chunk = place ^ (row & mask)
                is_read = chunk == 2
                parts.append(rect(left + place * CELL, y, CELL, CELL, "read" if is_read else "cell"))
                middle = left + (place + 0.5) * CELL, y + CELL / 2 + 4
                parts.append(text(*middle, str(chunk), "read-text" if is_read else "", "middle"))
    width, height = 60 + 2 * (8 * CELL + 70) - 50, 58 + 8 * CELL + 40
    parts.append(
        text(
            60, height - 16, "Each cell is a chunk of 16 bytes; its number is its place in the row before the swizzle."
        )
    )
    return svg(width, height, "Chunks of eight rows in the banks of shared memory", parts)


def main(folder: str) -> None:
    """Write the pictures to a folder."""
    for name, picture in (("timeline", draw_timeline()), ("swizzle", draw_swizzle())):
        Path(folder, f"kernels-{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
