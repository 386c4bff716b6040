"""A sweep as a table, as a Markdown page and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tvmconv.experiments.results import TUNED, Result, ResultRow
from tvmconv.experiments.sweep import Sweep, fill_counts, split_input_shape
from tvmconv.reports import library_comparison
from tvmconv.reports.charts import SweepInfo, compute_size_info, compute_sweep_info, draw_sweep
from tvmconv.reports.limits import compute_limits_info, draw_limits
from tvmconv.reports.suite import SuiteInfo, compute_suite_info, draw_suite, format_heading
from tvmconv.reports.tables import (
    EMPTY_CELL,
    NETWORK_ROW,
    Table,
    TableFormatter,
    format_gigabytes,
    format_micros,
    format_significant,
)
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
    return _make_bandwidth_table(sweep) if sweep.shows_bandwidth else _make_time_table(fill_counts(sweep))


def _make_time_table(sweep: Sweep) -> Table:
    """Return a table with one row per workload and one column per schedule: µs and the speed-up over the first. If the
    network's counts are known, the last row has the times of all its layers.
    """
    names = _list_row_names(sweep.results)
    lines = []
    for label, result in sweep.labeled_results:
        rows = {row.name: row for row in result.rows}
        lines.append([label, *(_format_time(rows.get(name), has_speedup=name != names[0]) for name in names)])
    if sweep.counts:
        totals = [library_comparison.sum_network_seconds(sweep, name) for name in names]
        first_total = totals[0] if any(row.speedup for result in sweep.results for row in result.rows) else None
        speedups = [first_total / total if first_total and total else None for total in totals]
        lines.append([NETWORK_ROW, *map(_format_seconds, totals, [None, *speedups[1:]])])
    has_speedups = any(row.speedup for result in sweep.results for row in result.rows[1:])
    reference = f" (× {names[0]})" * has_speedups
    first_header, *other_headers = (library_comparison.make_time_header(sweep.results, name) for name in names)
    headers = [first_header, *(f"{header}{reference}" for header in other_headers)]
    return Table([sweep.axis, *headers], lines, {sweep.axis})


def _format_time(row: ResultRow | None, *, has_speedup: bool) -> str:
    if row is None:
        return EMPTY_CELL
    return _format_seconds(row.seconds, row.speedup if has_speedup else None) if row.seconds else "failed"


def _format_seconds(seconds: float | None, speedup: float | None) -> str:
    return format_micros(seconds) + (f" ({format_significant(speedup)})" if speedup else "")


def _make_bandwidth_table(sweep: Sweep) -> Table:
    """Return a table with one column per size and one row per schedule: GB/s and the fraction of the memory's peak."""
    rows_by_result = [{row.name: row for row in result.rows} for result in sweep.results]
    lines = [
        [name, *(_format_bandwidth(rows.get(name)) for rows in rows_by_result)]
        for name in _list_row_names(sweep.results)
    ]
    headers = [f"{label} {'cold' if result.is_cold else 'hot'}" for label, result in sweep.labeled_results]
    return Table(["GB/s", *headers], lines, {"GB/s"})


def _format_bandwidth(row: ResultRow | None) -> str:
    if row is None:
        return EMPTY_CELL
    if row.bandwidth is None:
        return "failed"
    fraction_text = "" if row.bandwidth_share is None else f" ({row.bandwidth_share:.1%})"
    return format_gigabytes(row.bandwidth) + fraction_text


def _list_row_names(results: Sequence[Result]) -> list[str]:
    """Return the names of all rows in order; results with speed-ups come first, so that their reference leads."""
    sorted_results = sorted(results, key=lambda result: not any(row.speedup for row in result.rows))
    return list(dict.fromkeys(row.name for result in sorted_results for row in result.rows))


def format_text(sweep: Sweep, formatter: TableFormatter = Table.format_text) -> str:
    """Return the table for a terminal, with a comparison with libraries if the sweep has a network's tuned kernels;
    `formatter` returns a table as text.
    """
    tables = [make_table(sweep)]
    if library_comparison.is_comparison(sweep):
        tables.append(library_comparison.make_comparison_table(sweep))
    return "\n\n".join(map(formatter, tables))


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
    table = make_table(sweep).format_markdown()
    if not library_comparison.is_comparison(sweep):
        return f"{table}\n\n{caption} {sweep.provenance}\n"
    has_other_schedules = library_comparison.has_other_schedules(sweep)
    paragraphs = [
        library_comparison.make_comparison_table(sweep).format_markdown(),
        *library_comparison.list_remarks(sweep),
        *(["With schedules that are not tuned:", table] if has_other_schedules else []),
        "The schedules and configs:",
        library_comparison.make_configs_table(sweep).format_markdown(),
        f"{caption if has_other_schedules else 'Median times.'} {sweep.provenance}",
    ]
    return "\n\n".join(paragraphs) + "\n"


def compute_chart(sweep: Sweep) -> SweepInfo | SuiteInfo:
    """Return lines over sizes or channels if the workloads differ in nothing else, otherwise bars per layer. The title
    has the totals of tuned layers.
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
    """Write NAME.json, the page NAME.md, the chart NAME.png, and NAME-limits.png if clock and energy were measured."""
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
    if limits := compute_limits_info(make_title(sweep), sweep):
        draw_limits(limits, folder / f"{sweep.name}-limits.png")


def _write_markdown(sweep: Sweep, folder: Path) -> None:
    (folder / f"{sweep.name}.md").write_text(format_markdown(sweep), encoding="utf-8")
