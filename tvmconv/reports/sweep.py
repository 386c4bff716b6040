"""A sweep as a table, as a page and as a chart."""

from __future__ import annotations

from pathlib import Path

from tvmconv.experiments.run import TUNED
from tvmconv.experiments.sweep import Sweep, counted, size_and_rest
from tvmconv.reports import tuned
from tvmconv.reports.charts import SweepInfo, draw_sweep, size_info, sweep_info
from tvmconv.reports.suite import SuiteInfo, heading, suite_info
from tvmconv.reports.suite_chart import draw_suite
from tvmconv.reports.tables import Table, bandwidth_table, sweep_table
from tvmconv.workloads.filters import Filter


def title(sweep: Sweep) -> str:
    """What a chart of the sweep shows."""
    first = sweep.results[0]
    if sweep.over_sizes:
        _, what = size_and_rest(first.workload)
    else:
        filters = {isinstance(result.workload, Filter) for result in sweep.results}
        kind = "Workloads" if len(filters) > 1 else "Filters" if filters == {True} else "Convolutions"
        what = f"{kind} of suite {sweep.name}"
    return f"{what}, {first.workload.dtype}, on {first.device_name}"


def table(sweep: Sweep) -> Table:
    """Bandwidths, if the workloads differ in their size alone and memory bounds them all; else times, and their sum."""
    if sweep.shows_bandwidth:
        return bandwidth_table(sweep.labels, sweep.results)
    return sweep_table(sweep.axis, sweep.labels, sweep.results, counted(sweep).counts)


def text(sweep: Sweep) -> str:
    """The table for a terminal; of a network whose tuned kernels are in it, these beside libraries as well."""
    beside = [tuned.comparison(sweep)] if tuned.is_comparison(sweep) else []
    return "\n\n".join(each.text() for each in (table(sweep), *beside))


def markdown(sweep: Sweep) -> str:
    """The table, and on what it was measured; of a network's tuned layers also what comes of them."""
    references = [result.rows[0].name for result in sweep.results if any(row.speedup for row in result.rows)]
    over = f"; in parentheses the speed-up over `{references[0]}`" if references else ""
    caption = f"Median times{over}."
    if sweep.shows_bandwidth:
        peak = sweep.results[0].peak_bandwidth
        known = f"; in parentheses its share of the memory's peak, {peak / 1e9:,.0f} GB/s" if peak else ""
        caption = (
            f"Bandwidth: input and output once over the median time{known}. "
            "Hot: the arrays are in the L2 cache; cold: they are not, or exceed it."
        )
    parts = [table(sweep).markdown(), f"{caption} {sweep.provenance}"]
    if tuned.is_comparison(sweep):
        ladder = tuned.has_ladder(sweep)
        beside = ["Beside schedules that are not tuned:", parts[0]] if ladder else []
        said = [*tuned.remarks(sweep), *beside, "The schedules and configs:", tuned.configs(sweep).markdown()]
        parts = [tuned.comparison(sweep).markdown(), *said, parts[1] if ladder else f"Median times. {sweep.provenance}"]
    return "\n\n".join(parts) + "\n"


def chart(sweep: Sweep) -> SweepInfo | SuiteInfo:
    """Lines over sizes or channels, if the workloads differ in nothing else; else a bar a layer beside a library.

    What comes of all tuned layers is said above either.
    """
    if sweep.over_sizes:
        return size_info(title(sweep), sweep.results)
    bars = suite_info(title(sweep), sweep)
    if bars and sweep.axis == "layer":
        return bars
    said = heading(bars) if bars and bars.ours == TUNED else title(sweep)
    return sweep_info(said, sweep.axis, sweep.labels, sweep.results)


def draw(sweep: Sweep, path: Path) -> None:
    """Draw the chart; the suffix of the file to write, one of `charts.FORMATS`, tells the format."""
    info = chart(sweep)
    if isinstance(info, SuiteInfo):
        draw_suite(info, path)
    else:
        draw_sweep(info, path)


def write(sweep: Sweep, folder: Path) -> None:
    """Write NAME.json, and of its numbers NAME.md and the chart NAME.png."""
    write_numbers(sweep, folder)
    write_again(Sweep.read(folder / f"{sweep.name}.json"), folder)


def write_numbers(sweep: Sweep, folder: Path) -> None:
    """Write NAME.json and NAME.md."""
    part = folder / f"{sweep.name}.json.part"
    part.write_text(sweep.to_json(), encoding="utf-8")
    part.replace(folder / f"{sweep.name}.json")  # whole or not at all: what took long to measure is read again
    _write_page(sweep, folder)


def write_again(sweep: Sweep, folder: Path) -> None:
    """Write NAME.md and the chart NAME.png beside NAME.json, which stays as it was measured."""
    _write_page(sweep, folder)
    draw(sweep, folder / f"{sweep.name}.png")


def _write_page(sweep: Sweep, folder: Path) -> None:
    (folder / f"{sweep.name}.md").write_text(markdown(sweep), encoding="utf-8")
