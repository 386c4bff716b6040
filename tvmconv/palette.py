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
    "grouped_nhwc": SeriesStyle("#999933", "*"),
    "grouped_mma_sync": SeriesStyle("#999933", "P"),
    "tensor_core": SeriesStyle("#88ccee", "d"),
    "mma_sync": SeriesStyle("#661100", "s"),
    "hopper": SeriesStyle("#cc6677", "D"),
    "stem": SeriesStyle("#ddaa33", "v"),
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


def find_style(name: str) -> SeriesStyle:
    """Return the style of a schedule, or of a series whose name has that of a schedule as a word. A schedule of a user
    has the same style in all charts, too.

    Examples:
        >>> find_style("my.jsonl: tiling, 64 trials") == find_style("tiling")
        True
    """
    words = re.findall(r"\w+", name)
    known = next((word for word in words if word in STYLES), None)
    return STYLES[known] if known else OTHER_STYLES[zlib.crc32(name.encode()) % len(OTHER_STYLES)]
