"""Section 1 of a network: the time of all layers together, and of each layer times its count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, join_markup, make_details, make_element, make_paragraph
from tvmconv.reports.page.results import COMPUTED_NOTE, make_bar_table, render_bars
from tvmconv.reports.tables import sum_seconds
from tvmconv.reports.timing_groups import NamedTiming, TimingGroup
from tvmconv.workloads import Layer, Workload

OUTLIER_RATIO = 4  # of the longest unbroken bar to the longest layer of the fastest series

TimingGroups = Mapping[Workload, Sequence[TimingGroup]]


def name_series(group: TimingGroup, timing: NamedTiming) -> str:
    """Return the series of a time; times of a source with one time per layer form one series."""
    return timing.name if len(group.timings) > 1 else group.source


def number_series(layers: Sequence[Layer], groups: TimingGroups) -> dict[str, int]:
    """Return the series of a network with the numbers of their colors and marks."""
    names = (
        name_series(group, timing) for layer in layers for group in groups[layer.workload] for timing in group.timings
    )
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def render_network_results(layers: Sequence[Layer], groups: TimingGroups) -> Markup:
    """Render the times of a network by each source that has all or some of its layers.

    Args:
        layers: Layers of the network, in its order.
        groups: Times of each layer.
    """
    groups_with_times = (group for layer in layers for group in groups[layer.workload] if group.timings)
    sources = dict.fromkeys((group.source, group.device) for group in groups_with_times)
    if not sources:
        return make_paragraph("There is no time of any of these layers, and none can be computed.")
    series_numbers = number_series(layers, groups)
    return join_markup(_render_source(layers, groups, source, device, series_numbers) for source, device in sources)


def _render_source(
    layers: Sequence[Layer], groups: TimingGroups, source: str, device: str, series_numbers: Mapping[str, int]
) -> Markup:
    group_by_layer = {
        layer: group
        for layer in layers
        for group in groups[layer.workload]
        if (group.source, group.device) == (source, device) and group.timings
    }
    seconds_by_name = [
        {name_series(group, timing): timing.seconds for timing in group.timings} for group in group_by_layer.values()
    ]
    names = list(dict.fromkeys(name for timing in seconds_by_name for name in timing))
    totals = []
    for name in names:
        seconds_by_layer = {
            layer: layer_seconds.get(name) for layer, layer_seconds in zip(group_by_layer, seconds_by_name, strict=True)
        }
        total = sum_seconds([seconds_by_layer.get(layer) for layer in layers], [layer.count for layer in layers])
        if total:
            totals.append(NamedTiming(name, total))
    totals.sort(key=lambda timing: timing.seconds)
    style_by_name = {name: f"s{series_numbers[name] % svg.NUM_MARKS}" for name in names}
    fragments = [make_element("h3", f"From {source}, on {device}" if device else f"From {source}")]
    if not device:
        fragments.append(make_paragraph(COMPUTED_NOTE, "soft"))
    if totals:
        num_convolutions = sum(layer.count for layer in layers)
        fragments.append(make_paragraph(f"All {num_convolutions} layers:"))
        fragments.append(
            render_bars(totals, svg.compute_full_width([timing.seconds for timing in totals]), style_by_name)
        )
    if len(group_by_layer) < len(layers):
        fragments.append(make_paragraph(f"This source has {len(group_by_layer)} of {len(layers)} layers.", "soft"))
    fragments.append(
        make_details(
            "Each layer times its count",
            _render_layers(group_by_layer, style_by_name),
            is_open=len(names) == 1,
        )
    )
    return join_markup(fragments)


def _render_layers(group_by_layer: Mapping[Layer, TimingGroup], style_by_name: Mapping[str, str]) -> Markup:
    """Render one row per time of each layer."""
    fastest = max(
        layer.count * min(timing.seconds for timing in group.timings) for layer, group in group_by_layer.items()
    )
    slowest = max(
        layer.count * max(timing.seconds for timing in group.timings) for layer, group in group_by_layer.items()
    )
    full_seconds = min(slowest, OUTLIER_RATIO * fastest)
    lines = []
    for layer, group in group_by_layer.items():
        for index, timing in enumerate(group.timings):
            schedule_note = make_element("span", f"{layer.count} × by {timing.name}", class_="soft")
            seconds = layer.count * timing.seconds
            label = f"{layer.name} by {timing.name}: {svg.format_microseconds(seconds)}"
            bar = svg.make_bar(0, seconds / full_seconds, style_by_name[name_series(group, timing)], label)
            lines.append(
                make_element(
                    "tr",
                    make_element(
                        "th", *((layer.name, " ", schedule_note) if index == 0 else (schedule_note,)), scope="row"
                    ),
                    make_element("td", svg.format_microseconds(seconds)),
                    make_element("td", svg.format_microseconds(timing.seconds)),
                    make_element("td", bar, class_="bar-cell"),
                    class_=None if index == 0 else "more",
                )
            )
    return make_bar_table(("layer", "all of them", "one", ""), lines)
