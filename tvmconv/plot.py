"""Charts of searches and of measurements as axes of Matplotlib, for notebooks and scripts; `tvmconv plot` writes files.

    >>> import tvmconv.plot
    >>> axes = tvmconv.plot.search("my.jsonl")  # doctest: +SKIP
    >>> axes.figure.savefig("search.png")  # doctest: +SKIP

A schedule has the same color in all charts (`tvmconv.palette`). Ratios say how many times as fast as the named baseline
something is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tvmconv.errors import Error
from tvmconv.experiments.results import Result
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.lines import InvalidLines
from tvmconv.palette import find_style
from tvmconv.reports.charts import compute_sweep_width, make_history_title, plot_history, plot_sweep
from tvmconv.reports.history import compute_history_info, read_traces
from tvmconv.reports.suite import SuiteInfo, compute_suite_height, plot_speedups
from tvmconv.reports.sweep import compute_chart
from tvmconv.reports.tables import format_significant
from tvmconv.workloads import Workload, parse

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PathText: TypeAlias = "str | os.PathLike[str]"
RESULT_WIDTH, ROW_HEIGHT = 7.0, 0.35  # inches


def search(
    *logs: PathText, workload: Workload | str | None = None, over: str = "trials", axes: Axes | None = None
) -> Axes:
    """Draw the best throughput so far of the searches of one workload.

    Args:
        logs: Tuning logs.
        workload: Workload, or its text, of logs with several ones.
        over: "trials" or "seconds", the unit of the x axis.
        axes: Axes to draw on; by default those of a new figure.

    Returns:
        The axes.

    Raises:
        Error: A log has no record of the workload, or has several workloads and none is named.

    Examples:
        >>> search("my.jsonl", over="seconds")  # doctest: +SKIP
    """
    traces = [trace for log in logs for trace in read_traces(Path(log).stem, Path(log), InvalidLines())]
    workloads = dict.fromkeys(trace.workload for trace in traces)
    chosen = parse(workload) if isinstance(workload, str) else workload
    if chosen is None and len(workloads) != 1:
        texts = ", ".join(each.text for each in workloads) or "none"
        raise Error(f"expected logs of one workload, or its text as `workload`; the logs have {texts}")
    chosen = chosen or next(iter(workloads))
    if chosen not in workloads:
        raise Error(f"no record of {chosen} in {', '.join(map(str, logs))}")
    info = compute_history_info(chosen, traces)
    axes = axes or _create_axes(9.0, 5.0)
    plot_history(info, axes, is_over_time=over == "seconds")
    axes.set_title(make_history_title(info))
    axes.legend(frameon=False)
    return axes


def sweep(source: Sweep | PathText, *, axes: Axes | None = None) -> Axes:
    """Draw the throughput of schedules over sizes or channels, or the speed-ups over a library for layers of a suite.

    Args:
        source: Results of `tvmconv bench sweep` or `tune-suite`, the output of `tvmconv run --json`, or the file.
        axes: Axes to draw on; by default those of a new figure.

    Returns:
        The axes.

    Raises:
        Error: The file has no results.

    Examples:
        >>> sweep("tuning_logs/nvidia-h200/d2l.json")  # doctest: +SKIP
    """
    info = compute_chart(source if isinstance(source, Sweep) else Sweep.read(Path(source)))
    if isinstance(info, SuiteInfo):
        axes = axes or _create_axes(9.0, compute_suite_height(info))
        plot_speedups(axes, info)
        axes.set_title(info.title)
        return axes
    axes = axes or _create_axes(compute_sweep_width(info), 5.5)
    plot_sweep(info, axes)
    return axes


def result(measured: Result, *, axes: Axes | None = None) -> Axes:
    """Draw the speed-up of each schedule and library of one workload over the first row, the baseline.

    Args:
        measured: Result of `tvmconv.run`.
        axes: Axes to draw on; by default those of a new figure.

    Returns:
        The axes, with one bar per schedule or library.

    Raises:
        Error: No schedule has a time.

    Examples:
        >>> import tvmconv as tc
        >>> measured = tc.run("conv2d:1x8x8x8,8x8x3x3,s1,p1", ["tiling"], device="opencl:0", seconds=0.01)
        >>> result(measured).get_xlabel()
        'times as fast as default'
    """
    rows = [row for row in measured.rows if row.seconds]
    if not rows:
        raise Error(f"no schedule of {measured.workload} has a time")
    axes = axes or _create_axes(RESULT_WIDTH, 1.2 + ROW_HEIGHT * len(rows))
    baseline_seconds = rows[0].seconds or 1.0
    speedups = [baseline_seconds / (row.seconds or 1.0) for row in rows]
    colors = ["black" if row.library else find_style(row.schedule or row.name).color for row in rows]
    bars = axes.barh([row.name for row in rows], speedups, color=colors)
    axes.bar_label(bars, _label_bars(measured, speedups), padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, max(speedups) * 1.35)
    axes.set_xlabel(f"times as fast as {rows[0].name}")
    fastest = min(rows, key=lambda row: row.seconds or 0.0)
    axes.set_title(f"{fastest.name} is the fastest\n{measured.workload.text} on {measured.device_name}", fontsize=10)
    return axes


def _label_bars(measured: Result, speedups: Sequence[float]) -> list[str]:
    seconds = [row.seconds for row in measured.rows if row.seconds]
    return [
        f"{format_significant(speedup)} ×, {format_significant(each * 1e6)} µs"
        for speedup, each in zip(speedups, seconds, strict=True)
    ]


def _create_axes(width: float, height: float) -> Any:
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    return axes
