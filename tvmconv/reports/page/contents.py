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
from tvmconv.reports import counter_comparison
from tvmconv.reports.explanation import compare_kernels, explain_kernel
from tvmconv.reports.page.code import render_code
from tvmconv.reports.page.markup import (
    Markup,
    Section,
    join_markup,
    make_details,
    make_element,
    make_paragraph,
    make_soft,
    render_document,
    render_table,
)
from tvmconv.reports.page.memory import LEVELS, MEMORY_LEGEND, TILES_LEGEND, render_memory, render_tiles
from tvmconv.reports.page.results import (
    make_bar_row,
    make_bar_table,
    render_network_results,
    render_roofline,
    render_workload_results,
)
from tvmconv.reports.page.search import render_search
from tvmconv.reports.page.svg import format_microseconds, format_palette, make_bar, make_legend, make_rect
from tvmconv.reports.tables import format_significant
from tvmconv.reports.timing_groups import TimingGroup
from tvmconv.reports.waterfall import LEGEND as WATERFALL_LEGEND
from tvmconv.reports.waterfall import format_changes, make_waterfall_table
from tvmconv.target import Target
from tvmconv.workloads import Layer, Workload


@dataclass(frozen=True)
class Contents:
    """The contents of the page of a workload, or of a network, whose most expensive layer is analyzed in detail."""

    name: str  # text of the workload, or name of the network
    layers: Sequence[Layer]  # of the network, or the one workload
    target_text: str  # sentence about the target for which kernels were compiled
    device_spec: Target | None
    timing_groups: Mapping[Workload, Sequence[TimingGroup]]
    focus_workload: Workload  # the analyzed one
    kernels: Sequence[Kernel]  # of the focus workload, as all below, the fastest first
    searches: Sequence[tuple[str, Sequence[Record]]]  # name and records of each log, in its order
    waterfall: Sequence[WaterfallStep]
    no_waterfall_reason: str
    counters: Sequence[CounterComparison]
    invalid_lines: Sequence[str]  # one text per log with lines that are not records
    provenance: Sequence[tuple[str, str]]  # sources of the numbers with their origins


NO_KERNEL = "No kernel of this workload can be built here."
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
    groups = contents.timing_groups
    if len(contents.layers) == 1:
        results = render_workload_results(groups[contents.focus_workload])
    else:
        results = render_network_results(contents.layers, groups)
    bodies = {
        "Results": join_markup([results, render_roofline(contents.layers, groups, contents.device_spec)]),
        "Analysis of the kernels": _render_kernels(contents),
        "The code": _render_code(contents.kernels),
        "Memory and tiles": _render_memory(contents.kernels),
        "The search": _render_searches(contents),
        "The knob waterfall": _render_waterfall(contents),
        "Comparison with the profiler": _render_agreement(contents.counters),
        "Provenance": _render_provenance(contents.provenance),
    }
    sections = [
        Section(name, title, join_markup([make_paragraph(hint, "soft"), body]))
        for (name, hint), (title, body) in zip(SECTION_HINTS.items(), bodies.items(), strict=True)
    ]
    return render_document(contents.name, _render_lead(contents), sections, format_palette())


def _render_lead(contents: Contents) -> Markup:
    layers = contents.layers
    flops = sum(layer.count * layer.workload.flops for layer in layers)
    min_bytes = sum(layer.count * layer.workload.min_bytes for layer in layers)
    amounts = f"{format_significant(flops / 1e9)} GFLOP, at least {format_significant(min_bytes / 1e6)} MB to move."
    if len(layers) == 1:
        return make_paragraph(f"{amounts} {contents.target_text}")
    counts = f"{sum(layer.count for layer in layers)} convolutions, {len(layers)} of them distinct"
    focus = next(layer for layer in layers if layer.workload == contents.focus_workload)
    focus_text = f"Analyzed below: {focus.name}, {contents.focus_workload}, {focus.count} such layers."
    return join_markup([make_paragraph(f"{counts}: {amounts} {contents.target_text}"), make_paragraph(focus_text)])


def _render_kernels(contents: Contents) -> Markup:
    kernels, device_spec = contents.kernels, contents.device_spec
    if not kernels:
        return make_paragraph(NO_KERNEL, "soft")
    is_single = len(kernels) == 1
    fragments = [] if is_single else [_render_text(functools.partial(compare_kernels, kernels, device_spec))]
    for kernel in kernels:
        full_explanation = _render_text(functools.partial(explain_kernel, kernel, device_spec))
        fragments.append(make_details(f"{kernel.schedule.name} in full", full_explanation, is_open=is_single))
    return join_markup(fragments)


def _render_code(kernels: Sequence[Kernel]) -> Markup:
    """Render the code of each kernel; that of the fastest is unfolded. The script adds controls that put two kernels
    side by side.
    """
    return make_element(
        "div",
        *(
            make_element(
                "div",
                make_details(kernel.schedule.name, Markup(render_code(kernel, number)), is_open=number == 0),
                class_="kernel",
                data_name=kernel.schedule.name,
            )
            for number, kernel in enumerate(kernels)
        ),
        class_="kernels",
    )


def _render_memory(kernels: Sequence[Kernel]) -> Markup:
    """Render the pictures of each kernel, side by side if the screen is wide enough."""
    if not kernels:
        return make_paragraph(NO_KERNEL, "soft")
    pictures = [
        make_element(
            "div", make_element("h3", kernel.schedule.name), render_tiles(kernel), render_memory(kernel, number)
        )
        for number, kernel in enumerate(kernels)
    ]
    return join_markup(
        [
            make_paragraph(TILES_LEGEND, "soft"),
            make_legend({level: make_rect(1, 1, 14, 14, f"tile {level}") for level in LEVELS}),
            make_paragraph(MEMORY_LEGEND, "soft"),
            make_element("div", *pictures, class_="columns pictures"),
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
    """Render a chart whose bars span the estimated times before and after a change of a knob."""
    steps = contents.waterfall
    if not steps:
        return make_paragraph(contents.no_waterfall_reason, "soft")
    full_seconds = max(max(step.seconds, step.measured_seconds or 0.0) for step in steps)
    lines = []
    for previous, step in zip([None, *steps], steps, strict=False):
        start_seconds, time = (previous.seconds if previous else 0.0), format_microseconds(step.seconds)
        kind = "level" if previous is None else "gain" if step.seconds < start_seconds else "loss"
        ratio = f"{start_seconds / step.seconds:.2f} ×" if previous else ""
        measured_text = f", measured {format_microseconds(step.measured_seconds)}" if step.measured_seconds else ""
        start, end = sorted((start_seconds / full_seconds, step.seconds / full_seconds))
        tick = step.measured_seconds and step.measured_seconds / full_seconds
        bar = make_bar(start, end, kind, f"{format_changes(step)}: {time}", tick)
        lines.append(make_bar_row((format_changes(step), make_soft(measured_text)), (time, ratio), bar))
    seconds, name = steps[-1].seconds, "the best config"
    cells = (format_microseconds(seconds), f"{steps[0].seconds / seconds:.2f} × the default config")
    lines.append(make_bar_row((name,), cells, make_bar(0, seconds / full_seconds, "level", name)))
    table = render_table(make_waterfall_table(steps))
    return join_markup(
        [
            make_bar_table(lines),
            make_paragraph(f"{WATERFALL_LEGEND} A line across a bar marks the measured time.", "soft"),
            make_details("Table with occupancy, registers, wavefronts and sectors", table),
        ]
    )


def _render_agreement(rows: Sequence[CounterComparison]) -> Markup:
    """Render a table of predicted and measured counters, with one row per profiled device function."""
    if not rows:
        text = "No counters were given; --counters FILE takes a file that tvmconv counters has written."
        return make_paragraph(text, "soft")
    table = render_table(counter_comparison.make_table(rows), "Counted over measured")
    return join_markup([table, make_paragraph(counter_comparison.LEGEND, "soft")])


def _render_provenance(lines: Sequence[tuple[str, str]]) -> Markup:
    return make_element(
        "dl", *(make_element(*item) for label, origin in lines for item in (("dt", label), ("dd", origin)))
    )
