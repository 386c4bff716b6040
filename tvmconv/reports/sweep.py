"""A sweep as a table, as a Markdown page and as a chart."""

from __future__ import annotations

from pathlib import Path

from tvmconv.experiments.run import TUNED
from tvmconv.experiments.sweep import Sweep, fill_counts, split_input_shape
from tvmconv.reports import library_comparison
from tvmconv.reports.charts import SweepInfo, compute_size_info, compute_sweep_info, draw_sweep
from tvmconv.reports.suite import SuiteInfo, compute_suite_info, format_heading
from tvmconv.reports.suite_chart import draw_suite
from tvmconv.reports.tables import Table, make_bandwidth_table, make_sweep_table
from tvmconv.workloads.filters import Filter


def make_title(sweep: Sweep) -> str:
    """Return the title of a sweep's chart."""
    first_result = sweep.results[0]
    if sweep.is_size_sweep:
        _, subject = split_input_shape(first_result.workload)
    else:
        filters = {isinstance(result.workload, Filter) for result in sweep.results}
        kind = "Workloads" if len(filters) > 1 else "Filters" if filters == {True} else "Convolutions"
        subject = f"{kind} of suite {sweep.name}"
    return f"{subject}, {first_result.workload.dtype}, on {first_result.device_name}"


def make_table(sweep: Sweep) -> Table:
    """Return a table of bandwidths for memory-bound workloads that differ only in size, else of times."""
    if sweep.shows_bandwidth:
        return make_bandwidth_table(sweep.labels, sweep.results)
    return make_sweep_table(sweep.axis, sweep.labels, sweep.results, fill_counts(sweep).counts)


def format_text(sweep: Sweep) -> str:
    """Return the table for a terminal, with a comparison with libraries if the sweep has a network's tuned kernels."""
    comparison_tables = (
        [library_comparison.make_comparison_table(sweep)] if library_comparison.is_comparison(sweep) else []
    )
    return "\n\n".join(shown_table.format_text() for shown_table in (make_table(sweep), *comparison_tables))


def format_markdown(sweep: Sweep) -> str:
    """Return the Markdown page: tables, and how they were measured."""
    references = [result.rows[0].name for result in sweep.results if any(row.speedup for row in result.rows)]
    reference_note = f"; in parentheses the speed-up over `{references[0]}`" if references else ""
    caption = f"Median times{reference_note}."
    if sweep.shows_bandwidth:
        peak = sweep.results[0].peak_bandwidth
        peak_note = f"; in parentheses its fraction of the memory's peak, {peak / 1e9:,.0f} GB/s" if peak else ""
        caption = (
            f"Bandwidth: bytes of input and output divided by the median time{peak_note}. "
            "Hot: the arrays are in the L2 cache; cold: they are not, or exceed it."
        )
    paragraphs = [make_table(sweep).format_markdown(), f"{caption} {sweep.provenance}"]
    if library_comparison.is_comparison(sweep):
        has_other_schedules = library_comparison.has_other_schedules(sweep)
        schedule_paragraphs = ["With schedules that are not tuned:", paragraphs[0]] if has_other_schedules else []
        remark_paragraphs = [
            *library_comparison.list_remarks(sweep),
            *schedule_paragraphs,
            "The schedules and configs:",
            library_comparison.make_configs_table(sweep).format_markdown(),
        ]
        paragraphs = [
            library_comparison.make_comparison_table(sweep).format_markdown(),
            *remark_paragraphs,
            paragraphs[1] if has_other_schedules else f"Median times. {sweep.provenance}",
        ]
    return "\n\n".join(paragraphs) + "\n"


def compute_chart(sweep: Sweep) -> SweepInfo | SuiteInfo:
    """Return lines over sizes or channels if the workloads differ in nothing else, otherwise bars per layer.

    The title has the totals of tuned layers.
    """
    if sweep.is_size_sweep:
        return compute_size_info(make_title(sweep), sweep.results)
    suite = compute_suite_info(make_title(sweep), sweep)
    if suite and sweep.axis == "layer":
        return suite
    chart_title = format_heading(suite) if suite and suite.kernel_name == TUNED else make_title(sweep)
    return compute_sweep_info(chart_title, sweep.axis, sweep.labels, sweep.results)


def draw_chart(sweep: Sweep, path: Path) -> None:
    """Draw the chart of a sweep to a file, whose suffix, one of `charts.FORMATS`, selects the format."""
    info = compute_chart(sweep)
    if isinstance(info, SuiteInfo):
        draw_suite(info, path)
    else:
        draw_sweep(info, path)


def write_sweep(sweep: Sweep, folder: Path) -> None:
    """Write NAME.json, the page NAME.md and the chart NAME.png."""
    write_numbers(sweep, folder)
    rewrite_page(Sweep.read(folder / f"{sweep.name}.json"), folder)


def write_numbers(sweep: Sweep, folder: Path) -> None:
    """Write NAME.json and NAME.md."""
    partial_file = folder / f"{sweep.name}.json.part"
    partial_file.write_text(sweep.to_json(), encoding="utf-8")
    partial_file.replace(folder / f"{sweep.name}.json")  # an interruption leaves the earlier measurements intact
    _write_markdown(sweep, folder)


def rewrite_page(sweep: Sweep, folder: Path) -> None:
    """Write NAME.md and the chart NAME.png; NAME.json is not changed."""
    _write_markdown(sweep, folder)
    draw_chart(sweep, folder / f"{sweep.name}.png")


def _write_markdown(sweep: Sweep, folder: Path) -> None:
    (folder / f"{sweep.name}.md").write_text(format_markdown(sweep), encoding="utf-8")
