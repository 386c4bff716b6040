"""The table of whole networks inside PyTorch: the results of `tvmconv bench torch-models`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant

PYTORCH, TVMCONV, COMPILED_LABEL, FROM_LOG_LABEL = "PyTorch", "tvmconv", "compiled", "from the log"


def make_torch_models_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with one row per network, and the geometric mean in the last row.

    Args:
        results: Results of networks, as `tvmconv bench torch-models` writes them.

    Raises:
        KeyError: The results have another format.
    """
    lines, time_ratios = [], []
    for result in sorted(results, key=lambda item: (item["network"], item["batch"], item["dtype"])):
        timings_by_name = {item["name"]: item for item in result["timed"]}
        pytorch_seconds, tvmconv_seconds = (
            _find_min_seconds(timings_by_name, PYTORCH, is_compiled=False),
            _find_min_seconds(timings_by_name, TVMCONV, is_compiled=False),
        )
        compiled_seconds = (
            _find_min_seconds(timings_by_name, PYTORCH, is_compiled=True),
            _find_min_seconds(timings_by_name, TVMCONV, is_compiled=True),
        )
        time_ratio = min(tvmconv_seconds, compiled_seconds[1]) / min(pytorch_seconds, compiled_seconds[0])
        time_ratios.append(time_ratio)
        from_log = timings_by_name.get(f"{TVMCONV}, {FROM_LOG_LABEL}")
        lines.append(
            (
                result["network"],
                result["dtype"],
                str(result["batch"]),
                *(
                    format_significant(seconds * 1e6)
                    for seconds in (pytorch_seconds, compiled_seconds[0], tvmconv_seconds, compiled_seconds[1])
                ),
                format_significant(time_ratio),
                format_significant(timings_by_name[TVMCONV]["made"]),
                format_significant(from_log["made"]) if from_log else EMPTY_CELL,
                f"{timings_by_name[PYTORCH]['error']:.1e}",
                f"{timings_by_name[TVMCONV]['error']:.1e}",
            )
        )
    if time_ratios:
        mean = format_significant(statistics.geometric_mean(time_ratios))
        lines.append(("geometric mean", *(EMPTY_CELL,) * 6, mean, *(EMPTY_CELL,) * 4))
    headers = ("network", "dtype", "batch", "PyTorch [µs]", "compiled [µs]", "tvmconv [µs]", "compiled [µs] ")
    second_headers = ("time ×", "made in [s]", "again in [s]", "error, PyTorch", "error, tvmconv")
    return Table((*headers, *second_headers), lines, left_aligned=frozenset({"network", "dtype"}))


def _find_min_seconds(
    timings_by_name: Mapping[str, Mapping[str, Any]], name_prefix: str, *, is_compiled: bool
) -> float:
    """Return the shortest time in a CUDA graph among the timings whose names have a prefix."""
    matching_timings = [
        timing
        for name, timing in timings_by_name.items()
        if name.startswith(name_prefix) and (COMPILED_LABEL in name) == is_compiled
    ]
    return min((float(timing["graph"]) for timing in matching_timings), default=float("inf"))
