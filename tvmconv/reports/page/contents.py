"""What is on the page, and in which order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvmconv.analysis.waterfall import WaterfallStep
from tvmconv.cost_model.features import DeviceSpec
from tvmconv.errors import Error
from tvmconv.experiments.counter_comparison import CounterComparison
from tvmconv.kernel import Kernel
from tvmconv.logs.record import Record
from tvmconv.reports.explanation import explain_kernel
from tvmconv.reports.kernel_comparison import compare_kernels
from tvmconv.reports.page.agreement import render_agreement, render_provenance
from tvmconv.reports.page.code import render_code
from tvmconv.reports.page.document import Section, render_document
from tvmconv.reports.page.markup import Markup, join_markup, make_details, make_element, make_paragraph
from tvmconv.reports.page.memory import LEGEND as MEMORY_LEGEND
from tvmconv.reports.page.memory import render_memory
from tvmconv.reports.page.network import render_network_results
from tvmconv.reports.page.results import render_workload_results
from tvmconv.reports.page.roofline import render_roofline
from tvmconv.reports.page.search import render_search
from tvmconv.reports.page.svg import make_legend
from tvmconv.reports.page.tiles import LEGEND as TILES_LEGEND
from tvmconv.reports.page.tiles import LEVELS, render_tiles
from tvmconv.reports.page.waterfall import render_waterfall
from tvmconv.reports.tables import format_significant
from tvmconv.reports.timing_groups import TimingGroup
from tvmconv.workloads import Layer, Workload


@dataclass(frozen=True)
class Contents:
    """All that is shown.

    Attributes:
        name: the workload's text, or the network's name.
        layers: what it is about; of one workload, that one.
        target_text: what kernels were compiled for, in words.
        device_spec: the GPU's numbers; None where they are not known.
        timing_groups: the times of each workload.
        focus_workload: the workload that is looked into: of a network, the layers that take the most time.
        kernels: of it, the fastest first.
        searches: of it, the records of each log with its name, in the order in which they came in.
        waterfall: its waterfall; empty where there is none.
        no_waterfall_reason: why there is none.
        counters: what was profiled, beside what is counted.
        invalid_lines: lines of logs that are no records, of each log that has some.
        provenance: what came from where.
    """

    name: str
    layers: Sequence[Layer]
    target_text: str
    device_spec: DeviceSpec | None
    timing_groups: Mapping[Workload, Sequence[TimingGroup]]
    focus_workload: Workload
    kernels: Sequence[Kernel]
    searches: Sequence[tuple[str, Sequence[Record]]]
    waterfall: Sequence[WaterfallStep]
    no_waterfall_reason: str
    counters: Sequence[CounterComparison]
    invalid_lines: Sequence[str]
    provenance: Sequence[tuple[str, str]]


SECTION_HINTS = {
    "results": "The shorter the bar, the faster. Only times that were taken together are compared: a list is one run.",
    "kernels": "What the code says, without running it: how full a kernel makes the GPU, and what its accesses cost.",
    "code": "A line of one column, and what came of it in the others: choose one to light them, and its accesses.",
    "memory": "Which outputs a block, a warp and a thread compute, and where the bytes lie that a warp asks for.",
    "search": "What was tried on the way to the fastest config, and what that tells of the knobs.",
    "waterfall": "From the default config to the best one, a knob at a time, and what each knob buys on the way.",
    "agreement": "What is counted from the code, and what Nsight Compute counted when the kernel ran.",
    "provenance": "Where the numbers are from.",
}


def render_page(contents: Contents) -> str:
    """The file's text; the same for the same contents."""
    is_single = len(contents.layers) == 1
    results = (
        render_workload_results(contents.timing_groups[contents.focus_workload])
        if is_single
        else render_network_results(contents.layers, contents.timing_groups)
    )
    sections = [
        _make_section(
            "results",
            "Results",
            results,
            render_roofline(contents.layers, contents.timing_groups, contents.device_spec),
        ),
        _make_section("kernels", "The kernels, counted", _render_kernels(contents)),
        _make_section("code", "The code", _render_code(contents.kernels)),
        _make_section("memory", "Memory and tiles", _render_memory(contents.kernels)),
        _make_section("search", "The search", _render_searches(contents)),
        _make_section("waterfall", "The knob waterfall", _render_waterfall(contents)),
        _make_section("agreement", "Beside the profiler", render_agreement(contents.counters)),
        _make_section("provenance", "Provenance", render_provenance(contents.provenance)),
    ]
    return render_document(contents.name, _render_lead(contents), sections)


def _make_section(name: str, title: str, *body: Markup) -> Section:
    return Section(name, title, join_markup([make_paragraph(SECTION_HINTS[name], "soft"), *body]))


def _render_lead(contents: Contents) -> Markup:
    flops = sum(layer.count * layer.workload.flops for layer in contents.layers)
    min_bytes = sum(layer.count * layer.workload.min_bytes for layer in contents.layers)
    convolutions = sum(layer.count for layer in contents.layers)
    layer_text = (
        "" if len(contents.layers) == 1 else f"{convolutions} convolutions, {len(contents.layers)} of them distinct: "
    )
    text = (
        f"{layer_text}{format_significant(flops / 1e9)} GFLOP, at least "
        f"{format_significant(min_bytes / 1e6)} MB to move. {contents.target_text}"
    )
    fragments = [make_paragraph(text)]
    if len(contents.layers) > 1:
        focus_layer = next(layer for layer in contents.layers if layer.workload == contents.focus_workload)
        fragments.append(
            make_paragraph(
                f"Looked into is {focus_layer.name}, {contents.focus_workload}, {focus_layer.count} of them."
            )
        )
    return join_markup(fragments)


def _render_kernels(contents: Contents) -> Markup:
    fragments = []
    if len(contents.kernels) > 1:
        fragments.append(_render_text(functools.partial(compare_kernels, contents.kernels, contents.device_spec)))
    for kernel in contents.kernels:
        full_explanation = _render_text(functools.partial(explain_kernel, kernel, contents.device_spec))
        fragments.append(
            make_details(f"{kernel.schedule.name} in full", full_explanation, is_open=len(contents.kernels) == 1)
        )
    return (
        join_markup(fragments) if fragments else make_paragraph("No kernel of this workload can be built here.", "soft")
    )


def _render_code(kernels: Sequence[Kernel]) -> Markup:
    """The columns of each kernel, those of the fastest unfolded."""
    return join_markup(
        make_details(kernel.schedule.name, Markup(render_code(kernel, number)), is_open=number == 0)
        for number, kernel in enumerate(kernels)
    )


def _render_memory(kernels: Sequence[Kernel]) -> Markup:
    """The pictures of each kernel, side by side where there is room."""
    fragments = [
        make_element(
            "div", make_element("h3", kernel.schedule.name), render_tiles(kernel), render_memory(kernel, number)
        )
        for number, kernel in enumerate(kernels)
    ]
    if not fragments:
        return make_paragraph("No kernel of this workload can be built here.", "soft")
    swatch_attributes = {"x": 1, "y": 1, "width": 14, "height": 14}
    swatches = {level: make_element("rect", **swatch_attributes, class_=f"tile {level}") for level in LEVELS}
    return join_markup(
        [
            make_paragraph(TILES_LEGEND, "soft"),
            make_legend(swatches),
            make_paragraph(MEMORY_LEGEND, "soft"),
            make_element("div", *fragments, class_="columns pictures"),
        ]
    )


def _render_text(make_text: Callable[[], str]) -> Markup:
    """A page of text; where something cannot be counted, why."""
    try:
        return make_element("pre", make_text(), tabindex="0")
    except Error as error:
        return make_paragraph(f"This cannot be counted: {error}")


def _render_searches(contents: Contents) -> Markup:
    if not contents.searches:
        return make_paragraph("No log has a record of it.", "soft")
    return join_markup(render_search(source, contents.focus_workload, records) for source, records in contents.searches)


def _render_waterfall(contents: Contents) -> Markup:
    if not contents.waterfall:
        return make_paragraph(contents.no_waterfall_reason, "soft")
    return render_waterfall(contents.waterfall)
