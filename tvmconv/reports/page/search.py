"""Section 4: the course of the search: best throughput so far, tried configs, importance of knobs, and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvmconv.arithmetic import ceil_div
from tvmconv.logs.record import Record
from tvmconv.reports.history import HistoryInfo, collect_traces, compute_history_info, format_result
from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, join_markup, make_element, make_paragraph, make_soft, render_table
from tvmconv.reports.page.results import make_bar_row, make_bar_table
from tvmconv.reports.tables import make_table
from tvmconv.reports.trials import (
    MIN_TRIALS,
    compute_knob_importances,
    group_failures,
    select_representative_trials,
)
from tvmconv.space import Value, format_value
from tvmconv.workloads import Workload

WIDTH, HEIGHT = 600, 280  # px, of the course
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 28, 44
AXIS_GAP, AXIS_LEFT, AXIS_TOP, AXIS_BOTTOM, AXES_HEIGHT = 92, 50, 46, 360, 380  # px, of the axes of knobs
COLOR_FRACTIONS = (0.02, 0.1, 0.3, 0.6, 1.0)  # fastest fractions of trials by color
MAX_AXIS_LABELS = 14
MAX_LABEL_CHARACTERS = 13
LETTER_WIDTH = 6.6  # px, approximate
TRIALS_UNIT = "trials"
THINNED_NOTE = (
    "The log has few records of this workload. It may keep only the best of a search, as the packaged logs do."
)


def render_search(source: str, workload: Workload, records: Sequence[Record]) -> Markup:
    """Render the searches in a log by schedule, from the records of a workload on one device, in the log's order."""
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
        timed_records = [record for record in trials if record.schedule == schedule and record.ok]
        if len(timed_records) > 1 and timed_records[0].config:
            fragments += [
                make_element("h3", f"{schedule}: tried configs"),
                _render_parallel_coordinates(timed_records),
                _render_importances(timed_records),
            ]
    return join_markup([*fragments, _render_failures(trials)])


def _render_histories(info: HistoryInfo) -> Markup:
    icons, styles = {}, svg.choose_styles({curve.name: False for curve in info.curves})
    for curve in info.curves:
        result = f": {format_result(curve.result)}" if curve.result else ""
        icons[curve.summary + result] = svg.make_mark(styles[curve.name], 8, 8, curve.name)
    legend = svg.make_legend(icons)
    if not any(len(curve.best_gflops) > 1 and curve.best_gflops[-1] for curve in info.curves):
        return legend
    charts = [_draw_history(info, TRIALS_UNIT, [range(1, len(curve.best_gflops) + 1) for curve in info.curves])]
    if all(curve.elapsed for curve in info.curves):
        charts.append(_draw_history(info, "seconds of tuning", [curve.elapsed for curve in info.curves]))
    return join_markup([legend, make_element("div", *charts, class_="grids")])


def _draw_history(info: HistoryInfo, unit: str, positions_by_curve: Sequence[Sequence[float]]) -> Markup:
    """Draw the best throughput so far over trials or over time, as a step function."""
    first_position, last_position = min(map(min, positions_by_curve)), max(map(max, positions_by_curve))
    best_rate = max(curve.best_gflops[-1] for curve in info.curves)
    x = svg.AxisScale(min(first_position, 1.0), last_position, LEFT, WIDTH - RIGHT, is_integer=unit == TRIALS_UNIT)
    y = svg.AxisScale(0, best_rate * 1.08, HEIGHT - BOTTOM, TOP)
    fragments = [svg.make_axes(x, y, unit, "GFLOP/s of the best trial so far")]
    styles = svg.choose_styles({curve.name: False for curve in info.curves})
    for curve, positions in zip(info.curves, positions_by_curve, strict=True):
        points: list[tuple[float, float]] = []
        for position, rate in zip(positions, curve.best_gflops, strict=True):
            if rate and (not points or y(rate) != points[-1][1]):
                points += [(x(position), points[-1][1])] if points else []
                points.append((x(position), y(rate)))
        if points:
            points.append((x(positions[-1]), points[-1][1]))
            fragments.append(svg.make_path(points, f"curve {styles[curve.name].class_}", curve.summary))
            fragments.append(svg.make_mark(styles[curve.name], *points[-1], "", 3.5))
    return svg.make_chart(f"Best throughput so far over {unit}", WIDTH, HEIGHT, *fragments)


def _render_parallel_coordinates(records: Sequence[Record]) -> Markup:
    """Render one axis per knob and one line per trial; knobs with one value in all trials are listed below."""
    shown_records = select_representative_trials(records)
    values = {
        knob: sorted({record.config.get(knob, "") for record in records}, key=_make_sort_key)
        for knob in shown_records[0].config
    }
    axes = {knob: knob_values for knob, knob_values in values.items() if len(knob_values) > 1}
    if not axes:
        return make_paragraph("All trials have the same config.", "soft")
    lines = []
    for position, record in reversed(list(enumerate(shown_records))):  # the fastest are drawn last, on top
        indices = [knob_values.index(record.config.get(knob, "")) for knob, knob_values in axes.items()]
        points = [
            (_compute_x(axis_index), _compute_y(index, len(knob_values)))
            for axis_index, (index, knob_values) in enumerate(zip(indices, axes.values(), strict=True))
        ]
        color = next(i for i, share in enumerate(COLOR_FRACTIONS) if position <= share * (len(shown_records) - 1))
        title = svg.format_microseconds(record.cost)
        lines.append(svg.make_path(points, f"trial c{color}", title, data_values=" ".join(map(str, indices))))
    axis_elements = [_render_axis(axis_index, knob, axes) for axis_index, knob in enumerate(axes)]
    label = f"{len(shown_records)} of {len(records)} trials over {len(axes)} knobs"
    note = f"{label}, the fastest on top and in the strongest color. Select values to filter trials."
    fragments = [make_paragraph(note, "soft")]
    if fixed_knobs := [f"{knob}={format_value(values[knob][0])}" for knob in values if knob not in axes]:
        fragments.append(make_paragraph(f"The same in all: {', '.join(fixed_knobs)}.", "soft"))
    elements = [make_element("g", *lines), *axis_elements]
    fragments.append(svg.make_chart(label, AXIS_GAP * len(axes) + 60, AXES_HEIGHT, *elements, has_buttons=True))
    return join_markup(fragments)


def _compute_x(axis_index: int) -> float:
    return AXIS_LEFT + AXIS_GAP * axis_index


def _compute_y(index: int, count: int) -> float:
    return AXIS_BOTTOM - (AXIS_BOTTOM - AXIS_TOP) * (index + 0.5) / count


def _make_sort_key(value: Value) -> tuple[Any, ...]:
    """Return a key that sorts numbers by size, then splits by their factors, then words by the alphabet."""
    if isinstance(value, tuple):
        return (1, value)
    return (0, value) if isinstance(value, (int, float)) else (2, value)


def _render_axis(axis_index: int, knob: str, axes: Mapping[str, Sequence[Value]]) -> Markup:
    x, values = _compute_x(axis_index), axes[knob]
    fragments = [
        svg.make_line(x, AXIS_TOP, x, AXIS_BOTTOM, "axis"),
        svg.make_text(x, (20, 34)[axis_index % 2], knob, "middle"),  # alternates, because names exceed the gap
    ]
    for index in range(0, len(values), ceil_div(len(values), MAX_AXIS_LABELS)):
        y, name = _compute_y(index, len(values)), format_value(values[index])
        short_name = name if len(name) <= MAX_LABEL_CHARACTERS else f"{name[: MAX_LABEL_CHARACTERS - 1]}…"
        fragments.append(
            make_element(
                "g",
                make_element("title", f"{knob}={name}"),
                svg.make_rect(x + 2, y - 9, LETTER_WIDTH * len(short_name) + 6, 18, rx=3),
                svg.make_text(x + 5, y + 4, short_name),
                class_="value",
                data_axis=str(axis_index),
                data_value=str(index),
                aria_label=f"{knob}={name}",
            )
        )
    return join_markup(fragments)


def _render_importances(timed_records: Sequence[Record]) -> Markup:
    """Render the importance of each knob as bars."""
    importances = compute_knob_importances(timed_records)
    if not importances:
        text = f"The importance of knobs needs {MIN_TRIALS} trials with times, and several of each value."
        return make_paragraph(text, "soft")
    lines = []
    for importance in importances:
        percent = f"{importance.explained_fraction:.0%}"
        header = (importance.knob, " ", make_soft(f"{importance.num_values} values"))
        bar = svg.make_bar(0, importance.explained_fraction, "s2", f"{importance.knob}: {percent}")
        lines.append(make_bar_row(header, (percent,), bar))
    note = (
        "The fraction of the differences in time that each knob explains alone (variance of the logarithms, "
        "minus what as many values would explain by chance). It is only a hint, because a search tries good "
        "values more often."
    )
    return join_markup([make_paragraph(note, "soft"), make_bar_table(lines)])


def _render_failures(trials: Sequence[Record]) -> Markup:
    failure_groups = group_failures(trials)
    if not failure_groups:
        return make_paragraph(f"None of {len(trials):,} trials failed.")
    columns = {
        "failed": lambda failure: failure.kind,
        "trials": lambda failure: f"{failure.count:,}",
        "the first one's message": lambda failure: failure.message,
    }
    return render_table(make_table(failure_groups, columns, {"failed", "the first one's message"}), "Failures by kind")
