"""Charts of searches and of measurements as axes of Matplotlib, for notebooks and scripts; `tvmconv plot` writes files.

    >>> import tvmconv.plot
    >>> axes = tvmconv.plot.search("my.jsonl")  # doctest: +SKIP
    >>> axes.figure.savefig("search.png")  # doctest: +SKIP

A schedule has the same color in all charts (`tvmconv.palette`). Ratios say how many times as fast as the named baseline
something is.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tvmconv.errors import Error
from tvmconv.experiments.results import Result
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.lines import InvalidLines
from tvmconv.palette import find_style
from tvmconv.reports.charts import (
    compute_sweep_width,
    make_history_title,
    plot_history,
    plot_sweep,
    scale_logarithmically,
)
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
        >>> sweep("tuning_logs/nvidia-h200/d2l/d2l.json")  # doctest: +SKIP
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


def roofline(source: Sweep | PathText, *, axes: Axes | None = None) -> Axes:
    """Draw the fastest kernel of each layer below the roofline of the device.

    The slanted roof is the memory bandwidth, for the bytes that any kernel has to move; the level one is the float32
    rate without tensor cores. Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.

    Args:
        source: Results of `tvmconv bench tune-suite` or `sweep`, the output of `tvmconv run --json`, or the file.
        axes: Axes to draw on; by default those of a new figure.

    Returns:
        The axes, with one point per layer; libraries are hollow.

    Raises:
        Error: The file has no results, or the peak rates of its device are unknown.

    Examples:
        >>> roofline("tuning_logs/nvidia-h200/resnet50/resnet50-tuned.json")  # doctest: +SKIP
    """
    results = (source if isinstance(source, Sweep) else Sweep.read(Path(source))).results
    peak_flops, bandwidth = results[0].peak_flops, results[0].peak_bandwidth
    if not peak_flops or not bandwidth:
        raise Error(f"the peak rates of {results[0].device_name} are unknown")
    axes = axes or _create_axes(9.0, 5.5)
    drawn: set[str] = set()
    fractions: list[float] = []
    for each in results:
        intensity = each.workload.arithmetic_intensity
        rows = [row for row in each.rows if row.gflops and not row.library]
        best = max(rows, key=lambda row: row.gflops or 0.0, default=None)
        for row in [*filter(None, [best]), *(row for row in each.rows if row.library and row.gflops)]:
            name = row.name if row.library else row.schedule or row.name
            style = (
                {"color": "black", "marker": "o", "markerfacecolor": "none"} if row.library else vars(find_style(name))
            )
            label = None if name in drawn else name
            drawn.add(name)
            axes.plot(intensity, row.gflops or 0.0, linestyle="none", markersize=6, label=label, **style)
        roof = min(peak_flops, bandwidth * intensity) / 1e9
        fractions += [(best.gflops or 0.0) / roof] if best else []
    intensities = [each.workload.arithmetic_intensity for each in results]
    ends = (min(intensities) / 2, peak_flops / bandwidth, max(*intensities, peak_flops / bandwidth) * 2)
    axes.plot(ends, [min(peak_flops, bandwidth * x) / 1e9 for x in ends], color="#8c8c8c", linewidth=1.5, zorder=0)
    scale_logarithmically(axes.xaxis)
    scale_logarithmically(axes.yaxis)
    axes.set_xlabel("FLOP per byte of minimum memory traffic")
    axes.set_ylabel("GFLOP/s of direct convolution")
    title = f"Half of the {len(results)} layers reach more than {statistics.median(fractions):.0%} of the roofline"
    axes.set_title(f"{title}\n{peak_flops / 1e12:.0f} TFLOP/s, {bandwidth / 1e12:.1f} TB/s of {results[0].device_name}")
    axes.grid(alpha=0.4)
    axes.legend(frameon=False)
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
