"""Section 4: the course of the search: best throughput so far, tried configs, importance of knobs, and failures."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.logs.record import Record
from tvmconv.reports.history import BestSoFarCurve, HistoryInfo, collect_traces, compute_history_info, format_result
from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, join_markup, make_element, make_paragraph, render_table
from tvmconv.reports.page.parallel_coordinates import render_parallel_coordinates
from tvmconv.reports.tables import Table
from tvmconv.reports.trials import MIN_TRIALS, compute_knob_importances, group_failures
from tvmconv.workloads import Workload

WIDTH, HEIGHT = 600, 280
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 28, 44
TRIALS_UNIT = "trials"
THINNED_NOTE = (
    "The log has few records of this workload. It may keep only the best of a search, as the packaged logs do."
)


def render_search(source: str, workload: Workload, records: Sequence[Record]) -> Markup:
    """Render a search, schedule by schedule.

    Args:
        source: Name of the log.
        workload: Workload that was tuned.
        records: Records of the workload on one device, in the order of the log.
    """
    trials = [record for record in records if not record.final] or list(records)
    if not trials:
        return make_paragraph(f"{source[:1].upper()}{source[1:]}: no record of {workload}.")
    info = compute_history_info(workload, collect_traces(source, records))
    fragments = [
        make_element("h3", info.title),
        *([make_paragraph(THINNED_NOTE, "soft")] if len(trials) < MIN_TRIALS else []),
        _render_histories(info),
    ]
    for schedule in dict.fromkeys(record.schedule for record in trials):
        schedule_records = [record for record in trials if record.schedule == schedule]
        timed_records = [record for record in schedule_records if record.ok]
        if len(timed_records) > 1 and timed_records[0].config:
            fragments += [
                make_element("h3", f"{schedule}: tried configs"),
                render_parallel_coordinates(timed_records),
                _render_importances(timed_records),
            ]
    fragments.append(_render_failures(trials))
    return join_markup(fragments)


def _render_histories(info: HistoryInfo) -> Markup:
    long_histories = [curve for curve in info.curves if len(curve.best_gflops) > 1 and curve.best_gflops[-1]]
    legend = svg.make_legend(
        {
            f"{curve.summary}{_format_result(curve)}": svg.make_mark(index, 8, 8, curve.name)
            for index, curve in enumerate(info.curves)
        }
    )
    if not long_histories:
        return legend
    charts = [
        _draw_history(
            info,
            TRIALS_UNIT,
            [
                [float(trial_index + 1) for trial_index in range(len(shown_curve.best_gflops))]
                for shown_curve in info.curves
            ],
        )
    ]
    if all(curve.elapsed for curve in info.curves):
        charts.append(
            _draw_history(info, "seconds of tuning", [list(shown_curve.elapsed) for shown_curve in info.curves])
        )
    return join_markup([legend, make_element("div", *charts, class_="grids")])


def _format_result(history: BestSoFarCurve) -> str:
    return f": {format_result(history.result)}" if history.result else ""


def _draw_history(info: HistoryInfo, unit: str, positions_by_curve: Sequence[Sequence[float]]) -> Markup:
    """Draw the best throughput so far over trials or over time, as a step function."""
    last_position = max(max(curve_positions) for curve_positions in positions_by_curve)
    first_position = min(min(curve_positions) for curve_positions in positions_by_curve)
    best_rate = max(curve.best_gflops[-1] for curve in info.curves)
    x = svg.AxisScale(min(first_position, 1.0), last_position, LEFT, WIDTH - RIGHT, is_integer=unit == TRIALS_UNIT)
    y = svg.AxisScale(0, best_rate * 1.08, HEIGHT - BOTTOM, TOP)
    fragments = [svg.make_axes(x, y, unit, "GFLOP/s of the best trial so far")]
    for index, (curve, positions) in enumerate(zip(info.curves, positions_by_curve, strict=True)):
        points: list[tuple[float, float]] = []
        for position, rate in zip(positions, curve.best_gflops, strict=True):
            if rate and (not points or y(rate) != points[-1][1]):
                if points:
                    points.append((x(position), points[-1][1]))
                points.append((x(position), y(rate)))
        if points:
            points.append((x(positions[-1]), points[-1][1]))
            fragments += [
                svg.make_path(points, f"s{index % svg.NUM_MARKS}", curve.summary),
                svg.make_mark(index, *points[-1], "", 3.5),
            ]
    return svg.make_chart(f"Best throughput so far over {unit}", WIDTH, HEIGHT, *fragments)


def _render_importances(timed_records: Sequence[Record]) -> Markup:
    """Render the importance of each knob as bars."""
    importances = compute_knob_importances(timed_records)
    if not importances:
        return make_paragraph(
            f"The importance of knobs needs {MIN_TRIALS} trials with times, and several of each value.", "soft"
        )
    lines = [
        make_element(
            "tr",
            make_element(
                "th",
                join_markup(
                    [importance.knob, " ", make_element("span", f"{importance.num_values} values", class_="soft")]
                ),
                scope="row",
            ),
            make_element("td", f"{importance.explained_fraction:.0%}"),
            make_element(
                "td",
                svg.make_bar(
                    0, importance.explained_fraction, "s2", f"{importance.knob}: {importance.explained_fraction:.0%}"
                ),
                class_="bar-cell",
            ),
        )
        for importance in importances
    ]
    return join_markup(
        [
            make_paragraph(
                "The fraction of the differences in time that each knob explains alone (variance of the logarithms, "
                "minus what as many values would explain by chance). It is only a hint, because a search tries good "
                "values more often.",
                "soft",
            ),
            make_element("table", make_element("tbody", join_markup(lines)), class_="bars"),
        ]
    )


def _render_failures(trials: Sequence[Record]) -> Markup:
    failure_groups = group_failures(trials)
    if not failure_groups:
        return make_paragraph(f"None of {len(trials):,} trials failed.")
    rows = [(failure.kind, f"{failure.count:,}", failure.message) for failure in failure_groups]
    headers = ("failed", "trials", "the first one's message")
    return render_table(Table(headers, rows, frozenset({headers[0], headers[2]})), "Failures by kind")
