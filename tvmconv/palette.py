"""One color and one marker for each schedule in all charts.

The colors are those of Okabe and Ito ("Color Universal Design", 2008) and of Paul Tol ("Colour Schemes", 2021, scheme
muted), which people with color blindness tell apart. Schedules with similar colors have other markers. Libraries are
black, and differ in their lines.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class SeriesStyle:
    """How a schedule is drawn."""

    color: str  # "#rrggbb"
    marker: str  # Matplotlib's name


STYLES = {
    "default": SeriesStyle("#8c8c8c", "o"),
    "tiling": SeriesStyle("#56b4e9", "s"),
    "columns": SeriesStyle("#009e73", "^"),
    "vthread": SeriesStyle("#cc79a7", "v"),
    "conflict_free": SeriesStyle("#d55e00", "D"),
    "direct": SeriesStyle("#0072b2", "P"),
    "implicit_gemm": SeriesStyle("#e69f00", "X"),
    "winograd": SeriesStyle("#882255", "o"),
    "winograd_fused": SeriesStyle("#aa4499", "<"),
    "winograd_hopper": SeriesStyle("#332288", ">"),
    "depthwise": SeriesStyle("#117733", "p"),
    "depthwise_nhwc": SeriesStyle("#44aa99", "h"),
    "depthwise_tma": SeriesStyle("#44aa99", "^"),
    "depthwise_planes": SeriesStyle("#44aa99", "X"),
    "depthwise_cluster": SeriesStyle("#44aa99", "v"),
    "grouped_nhwc": SeriesStyle("#999933", "*"),
    "depthwise_nchw": SeriesStyle("#44aa99", "H"),
    "grouped_nchw": SeriesStyle("#999933", "X"),
    "grouped_mma_sync": SeriesStyle("#999933", "P"),
    "depthwise_mma_sync": SeriesStyle("#44aa99", "P"),
    "depthwise_diagonal": SeriesStyle("#44aa99", "D"),
    "pointwise_mma_sync": SeriesStyle("#661100", "P"),
    "tensor_core": SeriesStyle("#88ccee", "d"),
    "mma_sync": SeriesStyle("#661100", "s"),
    "halo_mma_sync": SeriesStyle("#661100", "^"),
    "hopper": SeriesStyle("#cc6677", "D"),
    "stem": SeriesStyle("#ddaa33", "v"),
    "kn2row_hopper": SeriesStyle("#cc6677", "X"),
    "window_hopper": SeriesStyle("#cc6677", "^"),
    "filter_rows_hopper": SeriesStyle("#cc6677", "v"),
    "pixel_dots": SeriesStyle("#999933", "v"),
    "halo_hopper": SeriesStyle("#cc6677", "P"),
    "upsample_hopper": SeriesStyle("#cc6677", "s"),
    "upsample_mma_sync": SeriesStyle("#661100", "D"),
    # Filters are never in a chart with convolutions.
    "basic": SeriesStyle("#8c8c8c", "o"),
    "constant": SeriesStyle("#56b4e9", "s"),
    "caching": SeriesStyle("#009e73", "^"),
    "halo_blocks": SeriesStyle("#cc79a7", "v"),
    "halo_strided": SeriesStyle("#117733", "<"),
    "halo_threads": SeriesStyle("#d55e00", "D"),
    "halo_two_step": SeriesStyle("#e69f00", "X"),
    "register": SeriesStyle("#332288", ">"),
    "shuffle": SeriesStyle("#882255", "P"),
    "texture": SeriesStyle("#999933", "*"),
    # Rows of tables that may be of any schedule.
    "tuned": SeriesStyle("#004488", "*"),
    "predicted": SeriesStyle("#6699cc", "h"),
    "untuned": SeriesStyle("#bbbbbb", "p"),
}
LIBRARY_COLOR = "#000000"
OTHER_STYLES = tuple(SeriesStyle(color, "8") for color in ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"))


def find_style_name(name: str) -> str | None:
    """Return the key of `STYLES` for a series: the first word of its name that is one; None if it has none.

    Examples:
        >>> find_style_name("my.jsonl: tiling, 64 trials")
        'tiling'
    """
    return next((word for word in re.findall(r"\w+", name) if word in STYLES), None)


def find_style(name: str) -> SeriesStyle:
    """Return the style of a schedule, or of a series whose name has that of a schedule as a word. A schedule of a user
    has the same style in all charts, too.

    Examples:
        >>> find_style("my.jsonl: tiling, 64 trials") == find_style("tiling")
        True
    """
    known = find_style_name(name)
    return STYLES[known] if known else OTHER_STYLES[zlib.crc32(name.encode()) % len(OTHER_STYLES)]


def lighten(color: str, paper: str, min_contrast: float = 3.0) -> str:
    """Return a color mixed with as little white as it needs to stand out from dark paper. WCAG 2.2, 1.4.11, asks for a
    contrast of 3 of graphics.

    Examples:
        >>> lighten("#56b4e9", "#12161b")
        '#56b4e9'
        >>> lighten("#332288", "#12161b")
        '#6659a6'
    """
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    for step in range(21):
        mixed = "#" + "".join(f"{round(channel + (255 - channel) * step / 20):02x}" for channel in channels)
        if (_compute_luminance(mixed) + 0.05) / (_compute_luminance(paper) + 0.05) >= min_contrast:
            break
    return mixed


def _compute_luminance(color: str) -> float:
    """Return the relative luminance of a color (WCAG 2.2)."""
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
