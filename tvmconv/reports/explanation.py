"""The explanation of a kernel's time as text: occupancy, costs of its accesses, and its bottleneck."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvmconv.analysis.block_accesses import count_block_accesses
from tvmconv.analysis.memory.footprint import count_dram_bytes
from tvmconv.analysis.memory.swizzles import inspect_tiles
from tvmconv.analysis.occupancy import Occupancy, compute_kernel_occupancy, compute_waves
from tvmconv.analysis.predicted_time import QUARTILES, PredictedTime, estimate_schedule_seconds, predict_kernel_time
from tvmconv.analysis.sass.linked_sources import LinkedSources, link_sources, prefetch_listings
from tvmconv.analysis.sensitivity import iterate_knob_neighbors
from tvmconv.analysis.speed_of_light import UnitLowerBound, compute_unit_times, explain_text_counts
from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.errors import AnalysisError, CompileError
from tvmconv.kernel import Kernel
from tvmconv.reports.accesses import DominantKnob, compute_access_costs, format_access_costs
from tvmconv.reports.instructions import format_instructions
from tvmconv.reports.swizzles import format_tiles
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant
from tvmconv.space import format_value
from tvmconv.target import WARP_SIZE, Target


def explain_kernel(kernel: Kernel, device_spec: Target | None) -> str:
    """Return a text that explains one kernel.

    Args:
        kernel: Kernel for an NVIDIA architecture.
        device_spec: Specification of the GPU; without it the text has no times.

    Raises:
        AnalysisError: The kernel's operations cannot be counted, or its architecture is unknown.
        CompileError: The kernel cannot be compiled.
    """
    config = " ".join(f"{name}={format_value(value)}" for name, value in kernel.config.items())
    prefetch_listings(kernel)
    tma_tiles = [
        kernel_tiles for lowered_kernel in kernel.kernels if (kernel_tiles := inspect_tiles(kernel, lowered_kernel))
    ]
    if device_spec:
        count_dram_bytes(kernel)  # needs no machine code and runs while the compiler works
    lines = [f"{kernel.workload} by {kernel.schedule.name} on {kernel.device.text}", config or "no knobs"]
    linked_sources, failure = _try_link_sources(kernel)
    for kernel_index, lowered_kernel in enumerate(kernel.kernels):
        code = (
            format_instructions(linked_sources[kernel_index].listing) if linked_sources else f"instructions  {failure}"
        )
        sections = [_explain_lowered_kernel(kernel, lowered_kernel, device_spec), code]
        if lowered_kernel not in kernel.timed_kernels:
            sections.insert(0, "prepack    transforms a weight once for all calls; the times below exclude it")
        lines += ["", kernel.add_kernel_title(lowered_kernel, "\n".join(sections))]
    lines += ["", format_access_costs(kernel, compute_access_costs(kernel, linked_sources))]
    if reason := explain_text_counts(kernel):
        lines.append(f"These are the accesses of the TIR; the compiler merges and drops some of them: {reason}.")
    lines += [text for kernel_tiles in tma_tiles for text in ("", format_tiles(kernel_tiles))]
    if device_spec:
        predicted = try_predict_time(kernel, device_spec)
        lines += ["", _make_unit_table(kernel, device_spec, predicted), "", _format_prediction(kernel, predicted)]
    return "\n".join(lines)


def _try_link_sources(kernel: Kernel) -> tuple[list[LinkedSources] | None, str]:
    """Return the kernel's statements and instructions, or the reason why they are unavailable."""
    try:
        return link_sources(kernel), ""
    except CompileError as error:  # no disassembler is installed
        return None, str(error)


def make_sensitivity_report(
    kernel: Kernel, device_spec: Target, on_progress: Callable[[str], None] = lambda text: None
) -> str:
    """Return a table of the effect of changing each knob by one step; the kernel itself is the first row.

    Args:
        kernel: Kernel for an NVIDIA architecture.
        device_spec: Specification of the GPU.
        on_progress: Callback that receives the name and value of the changed knob.

    Raises:
        AnalysisError: A kernel's operations cannot be counted, or its architecture is unknown.
    """
    has_prediction = isinstance(try_predict_time(kernel, device_spec), PredictedTime)
    current_summary = _KernelSummary.from_kernel(kernel, device_spec, has_prediction)
    ratios_and_rows = [(1.0, ("unchanged", "", *current_summary.format_cells(1.0)))]
    dominant_knob = DominantKnob(kernel)
    for neighbor in iterate_knob_neighbors(kernel):
        on_progress(f"{neighbor.knob}={format_value(neighbor.value)}")
        try:
            neighbor_summary = _KernelSummary.from_kernel(neighbor.kernel, device_spec, has_prediction)
            dominant_knob.add_neighbor(f"{neighbor.knob}={format_value(neighbor.value)}", neighbor.kernel)
        except (AnalysisError, CompileError):  # configs that do not compile are skipped
            continue
        time_ratio = neighbor_summary.seconds / current_summary.seconds
        ratios_and_rows.append(
            (time_ratio, (neighbor.knob, format_value(neighbor.value), *neighbor_summary.format_cells(time_ratio)))
        )
    rows = [ratios_and_rows[0][1], *(row for _, row in sorted(ratios_and_rows[1:], key=lambda item: item[0]))]
    time_header, time_kind = ("predicted [µs]", "predicted") if has_prediction else ("estimate [µs]", "estimated")
    headers = ("knob", "to", "bottleneck", time_header, "×", "occupancy", "registers", "conflicts", "sectors")
    table = Table(headers, rows, left_aligned=frozenset({"knob", "to", "bottleneck"}))
    title = f"One step of a knob (× of the {time_kind} time, conflicts and sectors of the whole kernel):"
    return "\n".join([title, table.format_text(), *dominant_knob.format_lines()])


@dataclass(frozen=True)
class _KernelSummary:
    """The numbers of a kernel that are compared with those of others.

    Attributes:
        kernel: The kernel.
        seconds: Predicted time, or the longest estimate of a unit if no time is predicted.
        bottleneck: Name of the time component, or of the unit, that takes most of it.
    """

    kernel: Kernel
    seconds: float
    bottleneck: str

    @staticmethod
    def from_kernel(kernel: Kernel, device_spec: Target, has_prediction: bool) -> _KernelSummary:
        """Return the summary of a kernel; raise AnalysisError if its operations cannot be counted."""
        if has_prediction:
            time = predict_kernel_time(kernel, device_spec)
            return _KernelSummary(kernel, time.seconds, time.components[0].name)
        longest = compute_unit_times(kernel, device_spec)[0]
        return _KernelSummary(kernel, longest.seconds, longest.unit)

    def format_cells(self, time_ratio: float) -> tuple[str, ...]:
        """Return the cells of a table's row, with the ratio of its time to that of the unchanged kernel."""
        values = collect_quantities(self.kernel, None)
        counts = (
            values["occupancy"],
            values["registers per thread"],
            values["bank conflicts"],
            values["global sectors"],
        )
        return (self.bottleneck, format_significant(self.seconds * 1e6), format_significant(time_ratio), *counts)


def _explain_lowered_kernel(kernel: Kernel, lowered_kernel: LoweredKernel, device_spec: Target | None) -> str:
    kernel_occupancy = compute_kernel_occupancy(kernel, lowered_kernel)
    resources = kernel.cubin.kernels[lowered_kernel.name]
    shared_bytes = resources.shared_bytes + lowered_kernel.dynamic_shared_bytes
    lines = [
        f"launch     {lowered_kernel.launch}",
        f"resources  {resources.registers} registers per thread, {resources.spills} bytes of spills, "
        f"{shared_bytes:,} bytes of shared memory per block",
        f"occupancy  {_format_occupancy(kernel_occupancy)}",
    ]
    if device_spec and kernel_occupancy.resident_blocks:
        launch_waves = compute_waves(
            kernel_occupancy, math.prod(lowered_kernel.launch.grid), device_spec.multiprocessors
        )
        lines.append(
            f"waves      {launch_waves.num_blocks:,} blocks, {launch_waves.max_active_blocks:,} at a "
            f"time: {format_significant(launch_waves.num_waves)} waves, "
            f"{launch_waves.busy_multiprocessor_fraction:.0%} of {launch_waves.num_multiprocessors} "
            "multiprocessors have one"
        )
    return "\n".join(lines)


def _format_occupancy(kernel_occupancy: Occupancy) -> str:
    limit_texts = ", ".join(f"{name} {blocks}" for name, blocks in kernel_occupancy.block_limits.items())
    warps = ceil_div(kernel_occupancy.threads_per_block, WARP_SIZE)
    return (
        f"{kernel_occupancy.resident_blocks} blocks of {warps} warps, "
        f"{kernel_occupancy.warp_fraction:.0%} of {kernel_occupancy.max_warps} warps; "
        f"decided by {' and '.join(kernel_occupancy.limiting_resources)} (blocks per resource limit: {limit_texts})"
    )


def _make_unit_table(kernel: Kernel, device_spec: Target, predicted: PredictedTime | str) -> str:
    unit_times = compute_unit_times(kernel, device_spec)
    rows = [
        (unit_time.unit, unit_time.amount, _format_lower_bound(unit_time), format_significant(unit_time.seconds * 1e6))
        for unit_time in unit_times
    ]
    table = Table(("unit", "has to do", "at least [µs]", "estimate [µs]"), rows, left_aligned=frozenset({"unit"}))
    return "\n".join(
        [f"On {device_spec.name}, bound by {find_bottleneck(kernel, predicted, unit_times)}:", table.format_text()]
    )


def _format_lower_bound(bound: UnitLowerBound) -> str:
    return EMPTY_CELL if bound.min_seconds is None else format_significant(bound.min_seconds * 1e6)


def find_bottleneck(kernel: Kernel, predicted: PredictedTime | str, unit_times: Sequence[UnitLowerBound]) -> str:
    """Return the name of what takes most of a kernel's time.

    Args:
        kernel: The kernel.
        predicted: Result of `try_predict_time`; with a time, its largest component is the bottleneck.
        unit_times: Times of the units; without a predicted time, the unit with the longest estimate is the bottleneck.
    """
    if isinstance(predicted, PredictedTime):
        return predicted.components[0].name
    return f"{unit_times[0].unit}, by an estimate from the TIR" if explain_text_counts(kernel) else unit_times[0].unit


def _format_prediction(kernel: Kernel, predicted: PredictedTime | str) -> str:
    if isinstance(predicted, str):
        estimate = estimate_schedule_seconds(kernel)
        reason = f"No time is predicted: {predicted}"
        if estimate is None:
            return f"{reason}."
        return (
            f"{reason}; {kernel.schedule.name} itself estimates "
            f"{format_significant(estimate * 1e6)} µs, from its tiles."
        )
    lower_quartile, upper_quartile = (format_significant(predicted.seconds * quartile * 1e6) for quartile in QUARTILES)
    rows = [
        (
            component.name,
            format_significant(component.seconds * 1e6),
            format_significant(component.added_seconds * 1e6),
            component.formula,
        )
        for component in predicted.components
        if component.seconds
    ]
    table = Table(("part", "alone [µs]", "adds [µs]", "of"), rows, left_aligned=frozenset({"part", "of"}))
    heading = (
        f"predicted {format_significant(predicted.seconds * 1e6)} µs (half of the kernels of direct with this "
        f"prediction took between {lower_quartile} and {upper_quartile}):"
    )
    return "\n".join([heading, table.format_text()])


def try_predict_time(kernel: Kernel, device_spec: Target) -> PredictedTime | str:
    """Return a kernel's predicted time, or the reason why none is predicted."""
    try:
        return predict_kernel_time(kernel, device_spec)
    except (AnalysisError, CompileError) as error:
        return str(error)


def collect_quantities(kernel: Kernel, device_spec: Target | None) -> dict[str, str]:
    """Return the quantities by which kernels are compared, summed over their timed device functions."""
    values_by_name: dict[str, list[float]] = {}
    for lowered_kernel in kernel.timed_kernels:
        blocks = math.prod(lowered_kernel.launch.grid)
        access_counts = count_block_accesses(kernel, lowered_kernel)
        shared_accesses, global_accesses = access_counts.shared_accesses, access_counts.global_accesses
        for name, value in (
            ("blocks", blocks),
            ("global sectors", blocks * sum(item.sectors for item in global_accesses)),
            ("global sectors at least", blocks * sum(item.min_sectors for item in global_accesses)),
            ("shared wavefronts", blocks * sum(item.wavefronts for item in shared_accesses)),
            ("bank conflicts", blocks * sum(item.num_conflicts for item in shared_accesses)),
        ):
            values_by_name.setdefault(name, []).append(value)
    occupancies = [compute_kernel_occupancy(kernel, lowered_kernel) for lowered_kernel in kernel.timed_kernels]
    texts = {
        "threads per block": ", ".join(str(item.threads_per_block) for item in occupancies),
        "registers per thread": ", ".join(
            str(kernel.cubin.kernels[lowered_kernel.name].registers) for lowered_kernel in kernel.timed_kernels
        ),
        "occupancy": ", ".join(f"{item.warp_fraction:.0%}" for item in occupancies),
        "decided by": ", ".join(" and ".join(item.limiting_resources) for item in occupancies),
        **{name: f"{int(sum(values)):,}" for name, values in values_by_name.items()},
    }
    if device_spec:
        unit_times, predicted = compute_unit_times(kernel, device_spec), try_predict_time(kernel, device_spec)
        texts["bound by"] = find_bottleneck(kernel, predicted, unit_times)
        for item in sorted(unit_times, key=lambda bound: bound.unit):
            texts[f"{item.unit}, estimate [µs]"] = format_significant(item.seconds * 1e6)
        texts["predicted [µs]"] = (
            EMPTY_CELL if isinstance(predicted, str) else format_significant(predicted.seconds * 1e6)
        )
        if estimate := estimate_schedule_seconds(kernel):
            texts["estimated by the schedule [µs]"] = format_significant(estimate * 1e6)
    return texts
