"""The contents of the page and their order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvmconv.analysis.waterfall import WaterfallStep
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
from tvmconv.target import Target
from tvmconv.workloads import Layer, Workload


@dataclass(frozen=True)
class Contents:
    """The contents of the page.

    Attributes:
        name: Text of the workload, or name of the network.
        layers: Layers of the network, or the one workload.
        target_text: Sentence about the target for which kernels were compiled.
        device_spec: Specification of the GPU; None if unknown.
        timing_groups: Times of each workload.
        focus_workload: Workload that is analyzed in detail; in a network, that of the layers that take most time.
        kernels: Kernels of the focus workload, the fastest first.
        searches: Name and records of each log for the focus workload, in the order of the log.
        waterfall: Knob waterfall of the focus workload; empty if there is none.
        no_waterfall_reason: Reason why there is none.
        counters: Measured counters with those predicted from the code.
        invalid_lines: One text per log with lines that are not records.
        provenance: Sources of the numbers with their origins.
    """

    name: str
    layers: Sequence[Layer]
    target_text: str
    device_spec: Target | None
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
    "results": "Shorter bars are faster. Times are comparable within a list, which comes from one run.",
    "kernels": "An analysis of the code without running it: occupancy, and the cost of memory accesses.",
    "code": "The kernel at each IR level. Select a line to highlight the corresponding lines and accesses.",
    "memory": "The outputs of a block, a warp and a thread, and the addresses of a warp's memory requests.",
    "search": "The trials of the search, and the importance of each knob.",
    "waterfall": "The effect of each knob, changed one at a time from the default config to the best one.",
    "agreement": "Counters predicted from the code, compared with those that Nsight Compute measured.",
    "provenance": "The sources of the numbers.",
}


def render_page(contents: Contents) -> str:
    """Return the text of the HTML file, which is equal for equal contents."""
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
        _make_section("kernels", "Analysis of the kernels", _render_kernels(contents)),
        _make_section("code", "The code", _render_code(contents.kernels)),
        _make_section("memory", "Memory and tiles", _render_memory(contents.kernels)),
        _make_section("search", "The search", _render_searches(contents)),
        _make_section("waterfall", "The knob waterfall", _render_waterfall(contents)),
        _make_section("agreement", "Comparison with the profiler", render_agreement(contents.counters)),
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
                f"Analyzed below: {focus_layer.name}, {contents.focus_workload}, {focus_layer.count} such layers."
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
    """Render the code of each kernel; that of the fastest is unfolded."""
    return join_markup(
        make_details(kernel.schedule.name, Markup(render_code(kernel, number)), is_open=number == 0)
        for number, kernel in enumerate(kernels)
    )


def _render_memory(kernels: Sequence[Kernel]) -> Markup:
    """Render the pictures of each kernel, side by side if the screen is wide enough."""
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
    """Render a preformatted text, or the reason why the kernel cannot be analyzed."""
    try:
        return make_element("pre", make_text(), tabindex="0")
    except Error as error:
        return make_paragraph(f"This cannot be analyzed: {error}")


def _render_searches(contents: Contents) -> Markup:
    if not contents.searches:
        return make_paragraph("No log has a record of this workload.", "soft")
    return join_markup(render_search(source, contents.focus_workload, records) for source, records in contents.searches)


def _render_waterfall(contents: Contents) -> Markup:
    if not contents.waterfall:
        return make_paragraph(contents.no_waterfall_reason, "soft")
    return render_waterfall(contents.waterfall)
