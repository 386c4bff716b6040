"""Section 1 of a network: how long all layers take together, and each of them as often as it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.reports.measured import Timed, Together
from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, element, folded, joined, paragraph
from tvmconv.reports.page.results import COMPUTED, bar_table, bars
from tvmconv.reports.tables import total_seconds
from tvmconv.workloads import Layer, Workload

OUTLIER = 4  # times the longest layer of the fastest: longer bars are broken

Groups = Mapping[Workload, Sequence[Together]]


def named(group: Together, each: Timed) -> str:
    """The series that a time belongs to: of a source that has one a layer, all belong to the source."""
    return each.name if len(group.times) > 1 else group.source


def series(layers: Sequence[Layer], groups: Groups) -> dict[str, int]:
    """The series of a network, with the number of the colour and the mark of each."""
    names = (named(group, each) for layer in layers for group in groups[layer.workload] for each in group.times)
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def network_results(layers: Sequence[Layer], groups: Groups) -> Markup:
    """The times of a network by each source that has all or some of its layers.

    Args:
        layers: of the network, in its order.
        groups: the times of each.
    """
    timed = (each for layer in layers for each in groups[layer.workload] if each.times)
    sources = dict.fromkeys((each.source, each.device) for each in timed)
    if not sources:
        return paragraph("There is no time of any of these layers, and nothing to compute one from.")
    places = series(layers, groups)
    return joined(_source(layers, groups, source, device, places) for source, device in sources)


def _source(layers: Sequence[Layer], groups: Groups, source: str, device: str, places: Mapping[str, int]) -> Markup:
    found = {
        layer: group
        for layer in layers
        for group in groups[layer.workload]
        if (group.source, group.device) == (source, device) and group.times
    }
    there = [{named(group, each): each.seconds for each in group.times} for group in found.values()]
    names = list(dict.fromkeys(name for each in there for name in each))
    totals = []
    for name in names:
        known = {layer: times.get(name) for layer, times in zip(found, there, strict=True)}
        total = total_seconds([known.get(layer) for layer in layers], [layer.count for layer in layers])
        if total:
            totals.append(Timed(name, total))
    totals.sort(key=lambda each: each.seconds)
    kinds = {name: f"s{places[name] % svg.MARKS}" for name in names}
    parts = [element("h3", f"From {source}, on {device}" if device else f"From {source}")]
    if not device:
        parts.append(paragraph(COMPUTED, "soft"))
    if totals:
        counted = sum(layer.count for layer in layers)
        parts.append(paragraph(f"All {counted} together:"))
        parts.append(bars(totals, svg.full_width([each.seconds for each in totals]), kinds))
    if len(found) < len(layers):
        parts.append(paragraph(f"Of {len(layers)} layers it has {len(found)}.", "soft"))
    parts.append(folded("Each layer, as often as it is there", _layers(found, kinds), open_=len(names) == 1))
    return joined(parts)


def _layers(found: Mapping[Layer, Together], kinds: Mapping[str, str]) -> Markup:
    """A line a layer, or one for each that has a time of it."""
    fastest = max(layer.count * min(each.seconds for each in group.times) for layer, group in found.items())
    slowest = max(layer.count * max(each.seconds for each in group.times) for layer, group in found.items())
    longest = min(slowest, OUTLIER * fastest)
    lines = []
    for layer, group in found.items():
        for place, each in enumerate(group.times):
            by = element("span", f"{layer.count} × by {each.name}", class_="soft")
            seconds = layer.count * each.seconds
            label = f"{layer.name} by {each.name}: {svg.microseconds(seconds)}"
            drawn = svg.bar(0, seconds / longest, kinds[named(group, each)], label)
            lines.append(
                element(
                    "tr",
                    element("th", *((layer.name, " ", by) if place == 0 else (by,)), scope="row"),
                    element("td", svg.microseconds(seconds)),
                    element("td", svg.microseconds(each.seconds)),
                    element("td", drawn, class_="bar-cell"),
                    class_=None if place == 0 else "more",
                )
            )
    return bar_table(("layer", "all of them", "one", ""), lines)
