"""Section 1: how long schedules and libraries take, as bars; of a network each layer, and all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.reports.measured import Timed, Together
from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, element, folded, joined, paragraph
from tvmconv.reports.tables import significant, total_seconds
from tvmconv.workloads import Layer, Workload

COMPUTED = "Nobody measured this here: what follows is computed, and no time that a kernel took."


def workload_results(groups: Sequence[Together]) -> Markup:
    """The times of one workload, those that were taken together side by side.

    Args:
        groups: of it; all bars have the same scale.
    """
    if not groups:
        return paragraph("There is no time of this workload, and nothing to compute one from.")
    longest = svg.full_width([each.seconds for group in groups for each in group.times])
    return joined(_group(group, longest) for group in groups)


def _group(group: Together, longest: float) -> Markup:
    where = f"{group.source}, on {group.device}" if group.device else group.source
    heading = element("h3", f"From {where}")
    parts = [heading, *([paragraph(COMPUTED, "soft")] if group.computed else [])]
    if group.times:
        parts.append(_bars(group.times, longest))
    if group.failed:
        told = joined(element("li", f"{name}: {why}") for name, why in group.failed)
        parts.append(folded(f"{len(group.failed)} without a time", element("ul", told)))
    return joined(parts)


def _bars(times: Sequence[Timed], longest: float) -> Markup:
    best = times[0].seconds
    lines = []
    for each in times:
        kind = "s1" if each.library else "s0"
        label = f"{each.name}: {svg.microseconds(each.seconds)}"
        name = joined([each.name, *([" ", element("span", each.note, class_="soft")] if each.note else [])])
        lines.append(
            element(
                "tr",
                element("th", name, scope="row"),
                element("td", svg.microseconds(each.seconds)),
                element("td", f"{significant(each.seconds / best)} ×"),
                element("td", svg.bar(0, each.seconds / longest, kind, label), class_="bar-cell"),
            )
        )
    return _table(("", "time", "× of the fastest", ""), lines)


def _table(headers: Sequence[str], lines: Sequence[Markup]) -> Markup:
    first, *others = headers
    head = joined([element("td", first), *(element("th", each, scope="col") for each in others)])
    return element("table", element("thead", element("tr", head)), element("tbody", joined(lines)), class_="bars")


def network_results(layers: Sequence[Layer], groups: Mapping[Workload, Sequence[Together]]) -> Markup:
    """A network's layers, each as often as it is there, by each source that has all or some of them.

    Args:
        layers: of the network, in its order.
        groups: the times of each.
    """
    sources = dict.fromkeys((each.source, each.device) for layer in layers for each in groups[layer.workload])
    if not sources:
        return paragraph("There is no time of any of these layers, and nothing to compute one from.")
    return joined(_network(layers, groups, *source) for source in sources)


def _network(
    layers: Sequence[Layer], groups: Mapping[Workload, Sequence[Together]], source: str, device: str
) -> Markup:
    """The layers' times from one source: of the log the fastest schedule of each, of a comparison every row of it."""
    found = {
        layer: group
        for layer in layers
        for group in groups[layer.workload]
        if (group.source, group.device) == (source, device)
    }
    several = any(len(group.times) > 1 for group in found.values())
    there = [{each.name: each.seconds for each in group.times} for group in found.values()]
    names = [name for name in dict.fromkeys(n for each in there for n in each) if all(name in each for each in there)]
    series = names if several and names else [""]  # "" for the fastest
    shown = [
        (layer, place, next(each for each in group.times if name in ("", each.name)))
        for layer, group in found.items()
        for place, name in enumerate(series)
    ]
    longest = max(layer.count * each.seconds for layer, _, each in shown)
    lines = [_total(found, layers, name) for name in series]
    lines += [_layer(layer, place, each, longest) for layer, place, each in shown]
    where = f"{source}, on {device}" if device else source
    parts = [element("h3", f"From {where}")]
    if not device:
        parts.append(paragraph(COMPUTED, "soft"))
    if len(found) < len(layers):
        parts.append(paragraph(f"Of {len(layers)} layers it has {len(found)}.", "soft"))
    parts.append(_table(("layer", "all of them", "one", ""), lines))
    return joined(parts)


def _total(found: Mapping[Layer, Together], layers: Sequence[Layer], name: str) -> Markup:
    seconds = [
        next((t.seconds for t in found[layer].times if not name or t.name == name), None) if layer in found else None
        for layer in layers
    ]
    total = total_seconds(seconds, [layer.count for layer in layers])
    told = svg.microseconds(total) if total else "not of all"
    label = f"all layers by {name}" if name else "all layers, the fastest of each"
    cells = element("td", element("strong", told)), element("td", ""), element("td", "", class_="bar-cell")
    return element("tr", element("th", label, scope="row"), *cells)


def _layer(layer: Layer, place: int, each: Timed, longest: float) -> Markup:
    seconds = layer.count * each.seconds
    name = joined([layer.name, " ", element("span", f"{layer.count} × by {each.name}", class_="soft")])
    return element(
        "tr",
        element("th", name, scope="row"),
        element("td", svg.microseconds(seconds)),
        element("td", svg.microseconds(each.seconds)),
        element(
            "td",
            svg.bar(0, seconds / longest, f"s{place % svg.MARKS}", f"{layer.name} by {each.name}"),
            class_="bar-cell",
        ),
    )
