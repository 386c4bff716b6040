"""What is on the page, and in which order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvmconv.analysis.waterfall import Fall
from tvmconv.errors import Error
from tvmconv.experiments.beside import Beside
from tvmconv.kernel import Kernel
from tvmconv.knowledge.features import Machine
from tvmconv.logs.record import Record
from tvmconv.reports.comparison import comparison
from tvmconv.reports.explain import explanation
from tvmconv.reports.measured import Together
from tvmconv.reports.page.agreement import agreement, provenance
from tvmconv.reports.page.code import code
from tvmconv.reports.page.document import Section, document
from tvmconv.reports.page.markup import Markup, element, folded, joined, paragraph
from tvmconv.reports.page.memory import LEGEND as MEMORY_LEGEND
from tvmconv.reports.page.memory import memory
from tvmconv.reports.page.network import network_results
from tvmconv.reports.page.results import workload_results
from tvmconv.reports.page.roofline import roofline
from tvmconv.reports.page.search import search
from tvmconv.reports.page.svg import legend
from tvmconv.reports.page.tiles import LEGEND as TILES_LEGEND
from tvmconv.reports.page.tiles import LEVELS, tiles
from tvmconv.reports.page.waterfall import waterfall
from tvmconv.reports.tables import significant
from tvmconv.workloads import Layer, Workload


@dataclass(frozen=True)
class Contents:
    """All that is shown.

    Attributes:
        name: the workload's text, or the network's name.
        layers: what it is about; of one workload, that one.
        place: what kernels were compiled for, in words.
        machine: the GPU's numbers; None where they are not known.
        groups: the times of each workload.
        leading: the workload that is looked into: of a network, the layers that take the most time.
        kernels: of it, the fastest first.
        searches: of it, the records of each log with its name, in the order in which they came in.
        way: its waterfall; empty where there is none.
        no_way: why there is none.
        counters: what was profiled, beside what is counted.
        bad: lines of logs that are no records, of each log that has some.
        provenance: what came from where.
    """

    name: str
    layers: Sequence[Layer]
    place: str
    machine: Machine | None
    groups: Mapping[Workload, Sequence[Together]]
    leading: Workload
    kernels: Sequence[Kernel]
    searches: Sequence[tuple[str, Sequence[Record]]]
    way: Sequence[Fall]
    no_way: str
    counters: Sequence[Beside]
    bad: Sequence[str]
    provenance: Sequence[tuple[str, str]]


HINTS = {
    "results": "The shorter the bar, the faster. Only times that were taken together are compared: a list is one run.",
    "kernels": "What the code says, without running it: how full a kernel makes the GPU, and what its accesses cost.",
    "code": "A line of one column, and what came of it in the others: choose one to light them, and its accesses.",
    "memory": "Which outputs a block, a warp and a thread compute, and where the bytes lie that a warp asks for.",
    "search": "What was tried on the way to the fastest config, and what that tells of the knobs.",
    "waterfall": "From the default config to the best one, a knob at a time, and what each knob buys on the way.",
    "agreement": "What is counted from the code, and what Nsight Compute counted when the kernel ran.",
    "provenance": "Where the numbers are from.",
}


def page(told: Contents) -> str:
    """The file's text; the same for the same contents."""
    alone = len(told.layers) == 1
    results = workload_results(told.groups[told.leading]) if alone else network_results(told.layers, told.groups)
    sections = [
        _section("results", "Results", results, roofline(told.layers, told.groups, told.machine)),
        _section("kernels", "The kernels, counted", _kernels(told)),
        _section("code", "The code", _code(told.kernels)),
        _section("memory", "Memory and tiles", _memory(told.kernels)),
        _section("search", "The search", _searches(told)),
        _section("waterfall", "The knob waterfall", _waterfall(told)),
        _section("agreement", "Beside the profiler", agreement(told.counters)),
        _section("provenance", "Provenance", provenance(told.provenance)),
    ]
    return document(told.name, _lead(told), sections)


def _section(name: str, title: str, *body: Markup) -> Section:
    return Section(name, title, joined([paragraph(HINTS[name], "soft"), *body]))


def _lead(told: Contents) -> Markup:
    flops = sum(layer.count * layer.workload.flops for layer in told.layers)
    least = sum(layer.count * layer.workload.min_bytes for layer in told.layers)
    convolutions = sum(layer.count for layer in told.layers)
    of = "" if len(told.layers) == 1 else f"{convolutions} convolutions, {len(told.layers)} of them distinct: "
    text = f"{of}{significant(flops / 1e9)} GFLOP, at least {significant(least / 1e6)} MB to move. {told.place}"
    parts = [paragraph(text)]
    if len(told.layers) > 1:
        looked = next(layer for layer in told.layers if layer.workload == told.leading)
        parts.append(paragraph(f"Looked into is {looked.name}, {told.leading}, {looked.count} of them."))
    return joined(parts)


def _kernels(told: Contents) -> Markup:
    parts = []
    if len(told.kernels) > 1:
        parts.append(_text(functools.partial(comparison, told.kernels, told.machine)))
    for kernel in told.kernels:
        whole = _text(functools.partial(explanation, kernel, told.machine))
        parts.append(folded(f"{kernel.schedule.name} in full", whole, open_=len(told.kernels) == 1))
    return joined(parts) if parts else paragraph("No kernel of this workload can be built here.", "soft")


def _code(kernels: Sequence[Kernel]) -> Markup:
    """The columns of each kernel, those of the fastest unfolded."""
    return joined(
        folded(kernel.schedule.name, Markup(code(kernel, number)), open_=number == 0)
        for number, kernel in enumerate(kernels)
    )


def _memory(kernels: Sequence[Kernel]) -> Markup:
    """The pictures of each kernel, side by side where there is room."""
    parts = [
        element("div", element("h3", kernel.schedule.name), tiles(kernel), memory(kernel, number))
        for number, kernel in enumerate(kernels)
    ]
    if not parts:
        return paragraph("No kernel of this workload can be built here.", "soft")
    square = {"x": 1, "y": 1, "width": 14, "height": 14}
    swatches = {level: element("rect", **square, class_=f"tile {level}") for level in LEVELS}
    return joined(
        [
            paragraph(TILES_LEGEND, "soft"),
            legend(swatches),
            paragraph(MEMORY_LEGEND, "soft"),
            element("div", *parts, class_="columns pictures"),
        ]
    )


def _text(make: Callable[[], str]) -> Markup:
    """A page of text; where something cannot be counted, why."""
    try:
        return element("pre", make(), tabindex="0")
    except Error as error:
        return paragraph(f"This cannot be counted: {error}")


def _searches(told: Contents) -> Markup:
    if not told.searches:
        return paragraph("No log has a record of it.", "soft")
    return joined(search(source, told.leading, records) for source, records in told.searches)


def _waterfall(told: Contents) -> Markup:
    if not told.way:
        return paragraph(told.no_way, "soft")
    return waterfall(told.way)
