"""Section 1: the times of a workload or of the layers of a network, by schedules and libraries, as bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, join_markup, make_details, make_element, make_paragraph, make_soft
from tvmconv.reports.tables import format_significant, sum_seconds
from tvmconv.reports.timing_groups import NamedTiming, TimingGroup
from tvmconv.target import Target
from tvmconv.workloads import Layer, Workload

WIDTH, HEIGHT = 680, 400
LEFT, RIGHT, TOP, BOTTOM = 62, 110, 28, 44
LEGEND = (
    "x axis: arithmetic intensity, FLOP per byte of minimum memory traffic; y axis: FLOP per second. The slanted "
    "ceiling is the memory's bandwidth, the horizontal one the peak arithmetic throughput."
)
COMPUTED_NOTE = "No log has a time of this workload: these are estimates, computed and not measured."
OUTLIER_RATIO = 4  # of the longest unbroken bar to the longest layer of the fastest series

TimingGroups = Mapping[Workload, Sequence[TimingGroup]]


def render_workload_results(groups: Sequence[TimingGroup]) -> Markup:
    """Render the times of one workload, grouped by what was measured together; all bars have the same scale."""
    if not groups:
        return make_paragraph("There is no time of this workload, and none can be computed.")
    full_seconds = svg.compute_full_width([timing.seconds for group in groups for timing in group.timings])
    styles = svg.choose_styles({timing.name: timing.is_library for group in groups for timing in group.timings})
    fragments = []
    for group in groups:
        fragments += _render_heading(group.source, group.device)
        if group.timings:
            fragments.append(_render_bars(group.timings, full_seconds, styles))
        if group.failures:
            failure_items = join_markup(make_element("li", f"{name}: {reason}") for name, reason in group.failures)
            fragments.append(make_details(f"{len(group.failures)} without a time", make_element("ul", failure_items)))
    return join_markup(fragments)


def _render_heading(source: str, device: str) -> list[Markup]:
    """Return the heading of a group of times, with a note if they were computed instead of measured."""
    if device:
        return [make_element("h3", f"From {source}, on {device}")]
    return [make_element("h3", f"From {source}"), make_paragraph(COMPUTED_NOTE, "soft")]


def _render_bars(
    timings: Sequence[NamedTiming], full_seconds: float, style_by_name: Mapping[str, svg.DrawnStyle]
) -> Markup:
    """Render one row per time, the fastest first."""
    lines = []
    for timing in timings:
        style = style_by_name[timing.name].class_
        time = svg.format_microseconds(timing.seconds)
        lines.append(
            make_bar_row(
                (timing.name, *([" ", make_soft(timing.note)] if timing.note else [])),
                (time, f"{format_significant(timings[0].seconds / timing.seconds)} ×"),
                svg.make_bar(0, timing.seconds / full_seconds, style, f"{timing.name}: {time}"),
            )
        )
    return make_bar_table(lines, ("", "time", "× the fastest", ""))


def make_bar_row(header: Sequence[str], cells: Sequence[str], bar: Markup, class_: str | None = None) -> Markup:
    """Return a row of `make_bar_table`."""
    return make_element(
        "tr",
        make_element("th", *header, scope="row"),
        *(make_element("td", cell) for cell in cells),
        make_element("td", bar, class_="bar-cell"),
        class_=class_,
    )


def make_bar_table(lines: Sequence[Markup], headers: Sequence[str] = (), class_: str = "bars") -> Markup:
    """Return a table whose last column contains bars. With the class "bars layers", the page can search its rows."""
    head = [make_element("td", header) for header in headers[:1]]
    head += [make_element("th", header, scope="col") if header else make_element("td") for header in headers[1:]]
    thead = [make_element("thead", make_element("tr", *head))] if head else []
    return make_element("table", *thead, make_element("tbody", *lines), class_=class_)


def name_series(group: TimingGroup, timing: NamedTiming) -> str:
    """Return the series of a time; times of a source with one time per layer form one series."""
    return timing.name if len(group.timings) > 1 else group.source


def choose_series_styles(layers: Sequence[Layer], groups: TimingGroups) -> dict[str, svg.DrawnStyle]:
    """Return the series of a network with their styles."""
    all_groups = [group for layer in layers for group in groups[layer.workload]]
    return svg.choose_styles(
        {name_series(group, timing): timing.is_library for group in all_groups for timing in group.timings}
    )


def render_network_results(layers: Sequence[Layer], groups: TimingGroups) -> Markup:
    """Render the times of a network, whose layers have an order, by each source that has all or some of its layers."""
    groups_with_times = (group for layer in layers for group in groups[layer.workload] if group.timings)
    sources = dict.fromkeys((group.source, group.device) for group in groups_with_times)
    if not sources:
        return make_paragraph("There is no time of any of these layers, and none can be computed.")
    styles = choose_series_styles(layers, groups)
    return join_markup(_render_source(layers, groups, source, device, styles) for source, device in sources)


def _render_source(
    layers: Sequence[Layer], groups: TimingGroups, source: str, device: str, styles: Mapping[str, svg.DrawnStyle]
) -> Markup:
    group_by_layer = {
        layer: group
        for layer in layers
        for group in groups[layer.workload]
        if (group.source, group.device) == (source, device) and group.timings
    }
    seconds_by_layer = {
        layer: {name_series(group, timing): timing.seconds for timing in group.timings}
        for layer, group in group_by_layer.items()
    }
    names = list(dict.fromkeys(name for seconds in seconds_by_layer.values() for name in seconds))
    totals = []
    for name in names:
        seconds = [seconds_by_layer.get(layer, {}).get(name) for layer in layers]
        if total := sum_seconds(seconds, [layer.count for layer in layers]):
            totals.append(NamedTiming(name, total))
    totals.sort(key=lambda timing: timing.seconds)
    fragments = _render_heading(source, device)
    if totals:
        full_seconds = svg.compute_full_width([timing.seconds for timing in totals])
        fragments.append(make_paragraph(f"All {sum(layer.count for layer in layers)} layers:"))
        fragments.append(_render_bars(totals, full_seconds, styles))
    if len(group_by_layer) < len(layers):
        fragments.append(make_paragraph(f"This source has {len(group_by_layer)} of {len(layers)} layers.", "soft"))
    layer_table = _render_layers(group_by_layer, styles)
    fragments.append(make_details("Each layer times its count", layer_table, is_open=len(names) == 1))
    return join_markup(fragments)


def _render_layers(group_by_layer: Mapping[Layer, TimingGroup], styles: Mapping[str, svg.DrawnStyle]) -> Markup:
    """Render one row per time of each layer."""
    times = [[layer.count * timing.seconds for timing in group.timings] for layer, group in group_by_layer.items()]
    full_seconds = min(max(map(max, times)), OUTLIER_RATIO * max(map(min, times)))
    lines = []
    for layer, group in group_by_layer.items():
        for index, timing in enumerate(group.timings):
            note = make_soft(f"{layer.count} × by {timing.name}")
            seconds = layer.count * timing.seconds
            time = svg.format_microseconds(seconds)
            label = f"{layer.name} by {timing.name}: {time}"
            bar = svg.make_bar(0, seconds / full_seconds, styles[name_series(group, timing)].class_, label)
            header = (layer.name, " ", note) if index == 0 else (note,)
            cells = (time, svg.format_microseconds(timing.seconds))
            lines.append(make_bar_row(header, cells, bar, None if index == 0 else "more"))
    return make_bar_table(lines, ("layer", "all of them", "one", ""), "bars layers")


def render_roofline(
    layers: Sequence[Layer], groups: Mapping[Workload, Sequence[TimingGroup]], device_spec: Target | None
) -> Markup:
    """Render all times of the page below the roofline of the device; those of other devices are left out."""
    if device_spec is None:
        return make_paragraph("The peak rates of this architecture are unknown, so that there is no roofline.", "soft")
    is_single = len(layers) == 1
    points: list[tuple[str, bool, Layer, float]] = []
    for layer in layers:
        for group in groups[layer.workload]:
            for timing in group.timings if group.device in ("", device_spec.name) else ():
                name = timing.name if is_single else name_series(group, timing)
                points.append((name, timing.is_library, layer, layer.workload.flops / timing.seconds))
    if not points:
        return make_paragraph(f"No time was measured on {device_spec.name}, the GPU of this roofline.", "soft")
    styles = svg.choose_styles({name: is_library for name, is_library, *_ in points})
    drawn_points = [_RooflinePoint(name, layer, rate, styles[name]) for name, _, layer, rate in points]
    return join_markup(
        [
            make_element("h3", f"Roofline of {device_spec.name}"),
            svg.make_legend({name: svg.make_mark(style, 8, 8, name) for name, style in styles.items()}),
            _draw_chart(layers, drawn_points, device_spec),
            make_paragraph(LEGEND, "soft"),
        ]
    )


@dataclass(frozen=True)
class _RooflinePoint:
    """A time in the chart, with the mark of its series."""

    name: str
    layer: Layer
    flops_per_second: float
    style: svg.DrawnStyle


def _draw_chart(layers: Sequence[Layer], points: Sequence[_RooflinePoint], device_spec: Target) -> Markup:
    peak = max(device_spec.get_peak_flops(layer.workload.dtype) for layer in layers)
    intensities = [layer.workload.arithmetic_intensity for layer in layers]
    ridge = peak / device_spec.bandwidth
    min_intensity, max_intensity = min(*intensities, ridge) / 3, max(*intensities, ridge) * 3
    min_rate = min(*(point.flops_per_second for point in points), peak) / 3
    x = svg.AxisScale(min_intensity, max_intensity, LEFT, WIDTH - RIGHT, is_log=True)
    y = svg.AxisScale(min_rate / 1e9, peak * 2 / 1e9, HEIGHT - BOTTOM, TOP, is_log=True)
    start = max(min_intensity, y.min_value * 1e9 / device_spec.bandwidth)
    middle, right = math.sqrt(start * ridge), x(max_intensity)
    roof = [(x(start), y(start * device_spec.bandwidth / 1e9)), (x(ridge), y(peak / 1e9)), (right, y(peak / 1e9))]
    peak_note = "float32" if peak == device_spec.flops else "tensor cores, about"
    bandwidth_text = f"{format_significant(device_spec.bandwidth / 1e12)} TB/s"
    fragments = [
        svg.make_axes(x, y, "FLOP per byte of minimum memory traffic", "GFLOP/s"),
        svg.make_path(roof, "roof"),
        svg.make_text(right + 6, y(peak / 1e9) + 4, f"{format_significant(peak / 1e12)} TFLOP/s"),
        svg.make_text(right + 6, y(peak / 1e9) + 18, peak_note, class_="soft"),
        svg.make_text(x(middle) + 14, y(middle * device_spec.bandwidth / 1e9) + 14, bandwidth_text),
    ]
    positions_by_label: dict[str, tuple[float, float]] = {}
    for point in points:
        intensity = point.layer.workload.arithmetic_intensity
        percent = _format_percent(point.flops_per_second / min(peak, intensity * device_spec.bandwidth))
        layer_text = "" if len(layers) == 1 else f"{point.layer.name}, "
        rate = format_significant(point.flops_per_second / 1e9)
        description = f"{layer_text}{point.name}: {rate} GFLOP/s, {percent} of the ceiling"
        position = x(intensity), y(point.flops_per_second / 1e9)
        fragments.append(svg.make_mark(point.style, *position, description))
        positions_by_label[f"{point.name} {percent}"] = position
    if len(layers) == 1:
        fragments.append(_render_labels(positions_by_label, y))
    label = f"Roofline of {device_spec.name} with {len(points)} kernels below it"
    return svg.make_chart(label, WIDTH, HEIGHT, *fragments)


def _format_percent(fraction: float) -> str:
    return f"{fraction:.0%}" if fraction >= 0.01 else f"{fraction:.1%}"


def _render_labels(positions_by_label: Mapping[str, tuple[float, float]], y: svg.AxisScale) -> Markup:
    """Render a label next to each mark, without overlaps."""
    mark_heights = [mark_y for _, mark_y in positions_by_label.values()]
    label_heights = svg.spread_labels(mark_heights, 14, TOP + 40, y.start_coordinate - 6)
    fragments = []
    for (label, (x, mark_y)), label_y in zip(positions_by_label.items(), label_heights, strict=True):
        fragments.append(svg.make_line(x + 6, mark_y, x + 22, label_y, "leader"))
        fragments.append(svg.make_text(x + 25, label_y + 4, label))
    return make_element("g", *fragments, class_="lines")
