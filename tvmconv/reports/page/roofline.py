"""Section 1, the roofline: what each kernel reaches below the ceilings of the GPU (Williams, Waterman and Patterson,
"Roofline", CACM 2009).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvmconv.knowledge.features import TENSOR_CORES, Machine
from tvmconv.reports.measured import Together
from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, element, joined, paragraph
from tvmconv.reports.page.network import named, series
from tvmconv.reports.tables import significant
from tvmconv.workloads import Layer, Workload

WIDTH, HEIGHT = 680, 400
LEFT, RIGHT, TOP, BOTTOM = 62, 110, 28, 44
LEGEND = (
    "Across: operations for each byte that has to be moved at least; up: operations a second. The slanted ceiling is "
    "the memory's bandwidth, the level one the multipliers'."
)


def roofline(layers: Sequence[Layer], groups: Mapping[Workload, Sequence[Together]], machine: Machine | None) -> Markup:
    """Every time on the page below the ceilings of the device.

    Args:
        layers: one or several.
        groups: the times of each; those of other devices than the machine are left out.
        machine: the GPU; None where its numbers are not known.
    """
    if machine is None:
        return paragraph("Of this architecture the ceilings are not known: there is no roofline.", "soft")
    alone = len(layers) == 1
    places = series(layers, groups)
    points = []
    for layer in layers:
        for group in groups[layer.workload]:
            if group.device in ("", machine.name):
                for each in group.times:
                    name = each.name if alone else named(group, each)
                    points.append(_Point(name, layer, each.seconds, int(each.library) if alone else places[name]))
    if not points:
        return paragraph(f"None of the times is of {machine.name}, whose ceilings are known.", "soft")
    marks = {"schedules": 0, "libraries": 1} if alone else {each.name: each.series for each in points}
    return joined(
        [
            element("h3", f"Below the ceilings of {machine.name}"),
            svg.legend({name: svg.mark(place, 8, 8, name) for name, place in marks.items()}),
            _draw(layers, points, machine),
            paragraph(LEGEND, "soft"),
        ]
    )


@dataclass(frozen=True)
class _Point:
    """A time, as it is drawn: by the mark of its series."""

    name: str
    layer: Layer
    seconds: float
    series: int

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.layer.workload.flops / self.seconds


def _draw(layers: Sequence[Layer], points: Sequence[_Point], machine: Machine) -> Markup:
    peak = machine.flops * max(TENSOR_CORES.get(layer.workload.dtype, 1) for layer in layers)
    rates = [each.rate for each in points]
    intensities = [layer.workload.arithmetic_intensity for layer in layers]
    ridge = peak / machine.bandwidth
    low, high = min(*intensities, ridge) / 3, max(*intensities, ridge) * 3
    x = svg.Scale(low, high, LEFT, WIDTH - RIGHT, log=True)
    y = svg.Scale(min(*rates, peak) / 3 / 1e9, peak * 2 / 1e9, HEIGHT - BOTTOM, TOP, log=True)
    start = max(low, y.low * 1e9 / machine.bandwidth)
    roof = [(x(start), y(start * machine.bandwidth / 1e9)), (x(ridge), y(peak / 1e9)), (x(high), y(peak / 1e9))]
    what = "float32" if peak == machine.flops else "tensor cores, about"
    middle, bandwidth = x(_between(start, ridge)), f"{significant(machine.bandwidth / 1e12)} TB/s"
    parts = [
        svg.axes(x, y, "FLOP for each byte that has to be moved", "GFLOP/s"),
        svg.path(roof, "roof"),
        svg.text(x(high) + 6, y(peak / 1e9) + 4, f"{significant(peak / 1e12)} TFLOP/s"),
        svg.text(x(high) + 6, y(peak / 1e9) + 18, what, class_="soft"),
        svg.text(middle + 14, y(_between(start, ridge) * machine.bandwidth / 1e9) + 14, bandwidth),
    ]
    marks: list[tuple[float, float, str]] = []
    for each in points:
        intensity = each.layer.workload.arithmetic_intensity
        share = each.rate / min(peak, intensity * machine.bandwidth)
        told = f"{each.name}: {significant(each.rate / 1e9)} GFLOP/s, {_percent(share)} of the ceiling"
        at = x(intensity), y(each.rate / 1e9)
        parts.append(svg.mark(each.series, *at, told if len(layers) == 1 else f"{each.layer.name}, {told}"))
        marks.append((*at, f"{each.name} {_percent(share)}"))
    if len(layers) == 1:
        parts.append(_labels([(*at, name) for name, at in {name: (a, b) for a, b, name in marks}.items()], y))
    label = f"Roofline of {machine.name} with {len(rates)} kernels below it"
    return svg.chart(label, WIDTH, HEIGHT, *parts)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


def _between(low: float, high: float) -> float:
    return math.sqrt(low * high)


def _labels(marks: Sequence[tuple[float, float, str]], y: svg.Scale) -> Markup:
    """A name and the share of the ceiling beside each mark, apart from one another."""
    places = svg.apart([at for _, at, _ in marks], 14, TOP + 40, y.begin - 6)
    parts = []
    for (x, at, name), place in zip(marks, places, strict=True):
        parts.append(svg.line(x + 6, at, x + 22, place, "leader"))
        parts.append(svg.text(x + 25, place + 4, name))
    return element("g", *parts, class_="lines")
