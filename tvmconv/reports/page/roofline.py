"""Section 1: the roofline with each kernel (Williams, Waterman and Patterson, "Roofline", CACM 2009)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, join_markup, make_element, make_paragraph
from tvmconv.reports.page.results import name_series, number_series
from tvmconv.reports.tables import format_significant
from tvmconv.reports.timing_groups import TimingGroup
from tvmconv.target import Target
from tvmconv.workloads import Layer, Workload

WIDTH, HEIGHT = 680, 400
LEFT, RIGHT, TOP, BOTTOM = 62, 110, 28, 44
LEGEND = (
    "x axis: arithmetic intensity, FLOP per byte of minimum memory traffic; y axis: FLOP per second. The slanted "
    "ceiling is the memory's bandwidth, the horizontal one the peak arithmetic throughput."
)


def render_roofline(
    layers: Sequence[Layer], groups: Mapping[Workload, Sequence[TimingGroup]], device_spec: Target | None
) -> Markup:
    """Render all times of the page below the roofline of the device; those of other devices are left out."""
    if device_spec is None:
        return make_paragraph("The peak rates of this architecture are unknown, so that there is no roofline.", "soft")
    is_single = len(layers) == 1
    series_numbers = number_series(layers, groups)
    points = []
    for layer in layers:
        for group in groups[layer.workload]:
            for timing in group.timings if group.device in ("", device_spec.name) else ():
                name = timing.name if is_single else name_series(group, timing)
                number = int(timing.is_library) if is_single else series_numbers[name]
                points.append(_RooflinePoint(name, layer, layer.workload.flops / timing.seconds, number))
    if not points:
        return make_paragraph(f"No time was measured on {device_spec.name}, the GPU of this roofline.", "soft")
    marks = {"schedules": 0, "libraries": 1} if is_single else {point.name: point.series_number for point in points}
    return join_markup(
        [
            make_element("h3", f"Roofline of {device_spec.name}"),
            svg.make_legend({name: svg.make_mark(number, 8, 8, name) for name, number in marks.items()}),
            _draw_chart(layers, points, device_spec),
            make_paragraph(LEGEND, "soft"),
        ]
    )


@dataclass(frozen=True)
class _RooflinePoint:
    """A time in the chart, with the mark of its series."""

    name: str
    layer: Layer
    flops_per_second: float
    series_number: int


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
        fragments.append(svg.make_mark(point.series_number, *position, description))
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
