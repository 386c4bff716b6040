"""The explanation of a kernel's time as text: occupancy, instructions, costs of accesses, and its bottleneck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from tvmconv.analysis.block_accesses import count_block_accesses
from tvmconv.analysis.memory.footprint import count_dram_bytes
from tvmconv.analysis.memory.swizzles import SwizzledSmemTile, inspect_tiles
from tvmconv.analysis.occupancy import compute_kernel_occupancy, compute_waves
from tvmconv.analysis.predicted_time import QUARTILES, PredictedTime, estimate_schedule_seconds, predict_kernel_time
from tvmconv.analysis.sass.instruction_mix import analyze_mix
from tvmconv.analysis.sass.linked_sources import link_sources, prefetch_listings
from tvmconv.analysis.sensitivity import iterate_knob_neighbors
from tvmconv.analysis.speed_of_light import (
    UnitLowerBound,
    compute_unit_times,
    count_unit_blocks,
    explain_text_counts,
)
from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.compiler.sass_listing import Listing
from tvmconv.errors import AnalysisError, CompileError
from tvmconv.kernel import Kernel
from tvmconv.reports.accesses import compute_access_costs, format_access_costs, select_worst, sum_kernel_costs
from tvmconv.reports.tables import (
    EMPTY_CELL,
    Columns,
    Table,
    TableFormatter,
    format_micros,
    format_optional,
    format_significant,
    make_table,
)
from tvmconv.space import format_value
from tvmconv.target import WARP_SIZE, Target

MAX_CAUSES = 3  # per difference
MIN_CAUSE_FRACTION = 0.1  # of the largest cause; smaller ones are left out


def explain_kernel(kernel: Kernel, device_spec: Target | None, formatter: TableFormatter = Table.format_text) -> str:
    """Return a text that explains one kernel; it has times if the specification of the GPU is given. `formatter`
    returns a table as text.

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
    try:
        linked_sources, failure = link_sources(kernel), ""
        if device_spec:
            count_unit_blocks(kernel, with_bounds=True)
    except CompileError as error:  # no disassembler is installed
        linked_sources, failure = None, f"instructions  {error}"
    for kernel_index, lowered_kernel in enumerate(kernel.kernels):
        code = format_instructions(linked_sources[kernel_index].listing) if linked_sources else failure
        sections = [_explain_lowered_kernel(kernel, lowered_kernel, device_spec), code]
        if lowered_kernel not in kernel.timed_kernels:
            sections.insert(0, "prepack    transforms a weight once for all calls; the times below exclude it")
        lines += ["", kernel.add_kernel_title(lowered_kernel, "\n".join(sections))]
    lines += ["", format_access_costs(kernel, compute_access_costs(kernel, linked_sources), formatter)]
    if reason := explain_text_counts(kernel):
        lines.append(f"These are the accesses of the TIR; the compiler merges and drops some of them: {reason}.")
    lines += [text for kernel_tiles in tma_tiles for text in ("", format_tiles(kernel_tiles, formatter))]
    if device_spec:
        predicted = try_predict_time(kernel, device_spec)
        lines += ["", _format_units(kernel, device_spec, predicted, formatter)]
        lines += ["", _format_prediction(kernel, predicted, formatter)]
    return "\n".join(lines)


def _explain_lowered_kernel(kernel: Kernel, lowered_kernel: LoweredKernel, device_spec: Target | None) -> str:
    occupancy = compute_kernel_occupancy(kernel, lowered_kernel)
    resources = kernel.cubin.kernels[lowered_kernel.name]
    shared_bytes = resources.shared_bytes + lowered_kernel.dynamic_shared_bytes
    limit_texts = ", ".join(f"{name} {blocks}" for name, blocks in occupancy.block_limits.items())
    lines = [
        f"launch     {lowered_kernel.launch}",
        f"resources  {resources.registers} registers per thread, {resources.spills} bytes of spills, "
        f"{shared_bytes:,} bytes of shared memory per block",
        f"occupancy  {occupancy.resident_blocks} blocks of {ceil_div(occupancy.threads_per_block, WARP_SIZE)} warps, "
        f"{occupancy.warp_fraction:.0%} of {occupancy.max_warps} warps; "
        f"decided by {' and '.join(occupancy.limiting_resources)} (blocks per resource limit: {limit_texts})",
    ]
    if device_spec and occupancy.resident_blocks:
        waves = compute_waves(occupancy, lowered_kernel.launch.num_blocks, device_spec.multiprocessors)
        lines.append(
            f"waves      {waves.num_blocks:,} blocks, {waves.max_active_blocks:,} at a time: "
            f"{format_significant(waves.num_waves)} waves, {waves.busy_multiprocessor_fraction:.0%} of "
            f"{waves.num_multiprocessors} multiprocessors have one"
        )
    return "\n".join(lines)


def format_instructions(listing: Listing) -> str:
    """Return the instruction mix of one device function, its innermost loop, and its synchronization."""
    mix = analyze_mix(listing)
    lines = [f"instructions  {mix.num_instructions:,}: {_format_class_counts(mix.class_counts)}"]
    if loop := mix.inner_loop:
        nested_note = ", without the loops inside it" if loop.has_loops else ""
        lines += [
            f"inner loop    {loop.num_issue_slots:,} issue slots per iteration{nested_note}, "
            f"{loop.num_work_slots:,} of them multiply-adds "
            f"({loop.work_fraction:.0%}); addresses {loop.first_address:04x} to {loop.last_address:04x}",
            f"              {_format_class_counts(loop.class_counts)}",
        ]
    else:
        lines.append("inner loop    none: all arithmetic is unrolled")
    waits = [f"{mix.num_barriers} barriers in the code"]
    if mix.max_pending_groups is not None:
        waits.append(f"up to {mix.max_pending_groups} groups of asynchronous copies pending after a wait")
    if mix.num_mbarriers:
        waits.append(f"{mix.num_mbarriers} mbarriers")
    return "\n".join([*lines, f"waits         {', '.join(waits)}"])


def _format_class_counts(classes: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in classes.items())


def format_tiles(tiles: Sequence[SwizzledSmemTile], formatter: TableFormatter = Table.format_text) -> str:
    """Return a table with one row per tile: its TMA and wgmma swizzles, and its wavefronts per 8 rows of 16 bytes."""
    columns: Columns = {
        "tile of": lambda tile: tile.array,
        "TMA": lambda tile: f"{tile.kind}s it",
        "swizzle": lambda tile: _format_swizzle(tile.tma_swizzle),
        "wgmma reads it as": _format_reader,
        "wavefronts of 8 rows": lambda tile: format_optional(
            tile.num_wavefronts / tile.num_core_matrices if tile.num_core_matrices else None
        ),
    }
    table = make_table(tiles, columns, {"tile of", "TMA", "swizzle", "wgmma reads it as"})
    return f"Tiles in shared memory, by TMA and wgmma:\n{formatter(table)}"


def _format_swizzle(nbytes: int) -> str:
    return f"{nbytes} bytes" if nbytes else "none"


def _format_reader(tile: SwizzledSmemTile) -> str | None:
    if not tile.wgmma_swizzles:
        return None
    swizzle_text = " and ".join(map(_format_swizzle, sorted(tile.wgmma_swizzles)))
    return swizzle_text if tile.is_consistent else f"{swizzle_text}: this does not match TMA"


def _format_units(
    kernel: Kernel, device_spec: Target, predicted: PredictedTime | str, formatter: TableFormatter
) -> str:
    unit_times = compute_unit_times(kernel, device_spec, with_bounds=True)
    columns: Columns = {
        "unit": lambda bound: bound.unit,
        "has to do": lambda bound: bound.amount,
        "at least [µs]": lambda bound: format_micros(bound.min_seconds),
        "estimate [µs]": lambda bound: format_micros(bound.seconds),
    }
    heading = f"On {device_spec.name}, bound by {_find_bottleneck(kernel, predicted, unit_times)}:"
    return f"{heading}\n{formatter(make_table(unit_times, columns, {'unit'}))}"


def _find_bottleneck(kernel: Kernel, predicted: PredictedTime | str, unit_times: Sequence[UnitLowerBound]) -> str:
    """Return the largest component of a predicted time, or else the unit with the longest estimate."""
    if isinstance(predicted, PredictedTime):
        return predicted.components[0].name
    return f"{unit_times[0].unit}, by an estimate from the TIR" if explain_text_counts(kernel) else unit_times[0].unit


def _format_prediction(kernel: Kernel, predicted: PredictedTime | str, formatter: TableFormatter) -> str:
    if isinstance(predicted, str):
        estimate = estimate_schedule_seconds(kernel)
        reason = f"No time is predicted: {predicted}"
        if estimate is None:
            return f"{reason}."
        return f"{reason}; {kernel.schedule.name} itself estimates {format_micros(estimate)} µs, from its tiles."
    lower_quartile, upper_quartile = (format_micros(predicted.seconds * quartile) for quartile in QUARTILES)
    columns: Columns = {
        "part": lambda component: component.name,
        "alone [µs]": lambda component: format_micros(component.seconds),
        "adds [µs]": lambda component: format_micros(component.added_seconds),
        "of": lambda component: component.formula,
    }
    table = make_table([each for each in predicted.components if each.seconds], columns, {"part", "of"})
    heading = (
        f"predicted {format_micros(predicted.seconds)} µs (half of the kernels of direct with this "
        f"prediction took between {lower_quartile} and {upper_quartile}):"
    )
    return f"{heading}\n{formatter(table)}"


def try_predict_time(kernel: Kernel, device_spec: Target) -> PredictedTime | str:
    """Return a kernel's predicted time, or the reason why none is predicted."""
    try:
        return predict_kernel_time(kernel, device_spec)
    except (AnalysisError, CompileError) as error:
        return str(error)


def collect_quantities(kernel: Kernel, device_spec: Target | None) -> dict[str, str]:
    """Return the quantities by which kernels are compared, summed over their timed device functions."""
    sums: Counter[str] = Counter()
    for lowered_kernel in kernel.timed_kernels:
        blocks = lowered_kernel.launch.num_blocks
        counts = count_block_accesses(kernel, lowered_kernel)
        sums["blocks"] += blocks
        sums["global sectors"] += blocks * sum(access.sectors for access in counts.global_accesses)
        sums["global sectors at least"] += blocks * sum(access.min_sectors for access in counts.global_accesses)
        sums["shared wavefronts"] += blocks * sum(access.wavefronts for access in counts.shared_accesses)
        sums["bank conflicts"] += blocks * sum(access.num_conflicts for access in counts.shared_accesses)
    occupancies = [compute_kernel_occupancy(kernel, lowered_kernel) for lowered_kernel in kernel.timed_kernels]
    registers = [kernel.cubin.kernels[lowered_kernel.name].registers for lowered_kernel in kernel.timed_kernels]
    texts = {
        "threads per block": ", ".join(str(occupancy.threads_per_block) for occupancy in occupancies),
        "registers per thread": ", ".join(map(str, registers)),
        "occupancy": ", ".join(f"{occupancy.warp_fraction:.0%}" for occupancy in occupancies),
        "decided by": ", ".join(" and ".join(occupancy.limiting_resources) for occupancy in occupancies),
        **{name: f"{value:,}" for name, value in sums.items()},
    }
    if device_spec:
        unit_times, predicted = compute_unit_times(kernel, device_spec), try_predict_time(kernel, device_spec)
        texts["bound by"] = _find_bottleneck(kernel, predicted, unit_times)
        for bound in sorted(unit_times, key=lambda bound: bound.unit):
            texts[f"{bound.unit}, estimate [µs]"] = format_micros(bound.seconds)
        texts["predicted [µs]"] = format_micros(predicted.seconds if isinstance(predicted, PredictedTime) else None)
        if estimate := estimate_schedule_seconds(kernel):
            texts["estimated by the schedule [µs]"] = format_micros(estimate)
    return texts


def make_quantities_table(
    kernels: Sequence[Kernel], device_spec: Target | None, names: Sequence[str] | None = None
) -> Table:
    """Return a table of the quantities by which kernels are compared, with one column per kernel; see
    `compare_kernels`.
    """
    names = names or [kernel.schedule.name for kernel in kernels]
    for kernel in kernels:
        prefetch_listings(kernel)
    columns = [collect_quantities(kernel, device_spec) for kernel in kernels]
    headers = ("of the whole kernel", *names)
    quantity_names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, EMPTY_CELL) for column in columns)) for name in quantity_names]
    return Table(headers, rows, left_aligned=frozenset(headers[:1]))


def explanation_to_json(kernel: Kernel, device_spec: Target | None, name: str) -> dict[str, Any]:
    """Return the explanation of a kernel as JSON values; quantities are as the text has them, times are in seconds."""
    predicted = try_predict_time(kernel, device_spec) if device_spec else None
    data: dict[str, Any] = {
        "name": name,
        "workload": kernel.workload.text,
        "device": kernel.device.text,
        "schedule": kernel.schedule.name,
        "config": kernel.config,
        "quantities": collect_quantities(kernel, device_spec),
        "predicted_seconds": predicted.seconds if isinstance(predicted, PredictedTime) else None,
        "components": [],
    }
    if isinstance(predicted, PredictedTime):
        data["components"] = [asdict(component) for component in predicted.components if component.seconds]
    return data


def compare_kernels(
    kernels: Sequence[Kernel],
    device_spec: Target | None,
    names: Sequence[str] | None = None,
    formatter: TableFormatter = Table.format_text,
) -> str:
    """Return a text that compares several kernels for one NVIDIA architecture, by default named by their schedules.

    It has times if the specification of the GPU is given. `formatter` returns a table as text.

    Raises:
        AnalysisError: A kernel's operations cannot be counted, or its architecture is unknown.
        CompileError: A kernel cannot be compiled.
    """
    names = names or [kernel.schedule.name for kernel in kernels]
    table = make_quantities_table(kernels, device_spec, names)
    times_for = f", with times for {device_spec.name}" if device_spec else ""
    lines = [f"{kernels[0].workload} on {kernels[0].device.text}{times_for}", *_format_configs(kernels, names), ""]
    lines.append(formatter(table))
    if device_spec is None:
        return "\n".join(lines)
    predictions = [try_predict_time(kernel, device_spec) for kernel in kernels]
    times = [time for time in predictions if isinstance(time, PredictedTime)]
    if len(times) == len(kernels):
        lines += ["", formatter(_make_component_table(times, names)), ""]
        lines += [
            _explain_difference(times[0], other_time, names[0], name)
            for name, other_time in zip(names[1:], times[1:], strict=True)
        ]
        return "\n".join(lines)
    reasons = [(name, time) for name, time in zip(names, predictions, strict=True) if isinstance(time, str)]
    lines += ["", *(f"No time is predicted for {name}: {reason}." for name, reason in reasons)]
    if text_counted := [name for name, kernel in zip(names, kernels, strict=True) if explain_text_counts(kernel)]:
        counts = f"The counts of {', '.join(text_counted)} are those of the TIR"
        lines.append(f"{counts}; the compiler merges and drops some accesses.")
    return "\n".join(lines)


def _format_configs(kernels: Sequence[Kernel], names: Sequence[str]) -> list[str]:
    """Return the knobs of each kernel; of kernels by one schedule only those that differ."""
    lines = []
    for name, kernel in zip(names, kernels, strict=True):
        configs = [other.config for other in kernels if other.schedule.name == kernel.schedule.name]
        knobs = [
            f"{knob}={format_value(value)}"
            for knob, value in kernel.config.items()
            if len(configs) == 1 or any(config[knob] != value for config in configs)
        ]
        knob_text = " ".join([kernel.schedule.name] * (name != kernel.schedule.name) + knobs)
        lines += [f"{name}: {knob_text}"] if knob_text else []
    return lines


def _make_component_table(times: Sequence[PredictedTime], names: Sequence[str]) -> Table:
    """Return a table of the components of each predicted time, the largest differences first."""
    rows = [
        (component.name, [time.get_added_seconds(component.name) for time in times], component.formula)
        for component in times[0].components
    ]
    rows = sorted(filter(lambda row: any(row[1]), rows), key=lambda row: min(row[1]) - max(row[1]))
    rows.append(("launches", [time.launch_seconds for time in times], "one a step"))
    headers = ("part of the predicted time [µs]", *names, "of")
    lines = [(name, *map(format_micros, seconds), formula) for name, seconds, formula in rows]
    return Table(headers, lines, {headers[0], "of"})


def _explain_difference(first: PredictedTime, other_time: PredictedTime, first_name: str, name: str) -> str:
    """Return one line: another kernel's speed-up over the first one, and the main causes."""
    changes = {
        component.name: other_time.get_added_seconds(component.name) - component.added_seconds
        for component in first.components
    }
    changes["launches"] = other_time.launch_seconds - first.launch_seconds
    largest = sorted(changes.items(), key=lambda change: -abs(change[1]))[:MAX_CAUSES]
    causes = ", ".join(
        f"{component} {seconds * 1e6:+.3g} µs"
        for component, seconds in largest
        if abs(seconds) > MIN_CAUSE_FRACTION * abs(largest[0][1])
    )
    speedup = format_significant(first.seconds / other_time.seconds)
    return f"{name} is predicted to be {speedup} × as fast as {first_name}: {causes or 'nothing differs'}"


def make_sensitivity_report(
    kernel: Kernel,
    device_spec: Target,
    on_progress: Callable[[str], None] = lambda text: None,
    formatter: TableFormatter = Table.format_text,
) -> str:
    """Return a table of the effect of changing each knob by one step; the kernel itself is the first row. `on_progress`
    receives the name and value of the changed knob. If the kernel's operations cannot be counted, AnalysisError is
    raised.
    """
    has_prediction = isinstance(try_predict_time(kernel, device_spec), PredictedTime)
    seconds, bottleneck = _estimate_time(kernel, device_spec, has_prediction)
    unchanged_row = ("unchanged", "", bottleneck, *_format_cells(kernel, seconds, 1.0))
    seconds_and_rows = []
    neighbor_costs = []
    for neighbor in iterate_knob_neighbors(kernel):
        value = format_value(neighbor.value)
        on_progress(f"{neighbor.knob}={value}")
        try:
            neighbor_seconds, bottleneck = _estimate_time(neighbor.kernel, device_spec, has_prediction)
            neighbor_costs.append((f"{neighbor.knob}={value}", sum_kernel_costs(neighbor.kernel)))
        except (AnalysisError, CompileError):  # configs that do not compile are skipped
            continue
        cells = _format_cells(neighbor.kernel, neighbor_seconds, seconds / neighbor_seconds)
        seconds_and_rows.append((neighbor_seconds, (neighbor.knob, value, bottleneck, *cells)))
    rows = [unchanged_row, *(row for _, row in sorted(seconds_and_rows, key=lambda item: item[0]))]
    time_header, time_kind = ("predicted [µs]", "predicted") if has_prediction else ("estimate [µs]", "estimated")
    headers = ("knob", "to", "bottleneck", time_header, "× unchanged", "occupancy", "registers", "conflicts", "sectors")
    table = Table(headers, rows, {"knob", "to", "bottleneck"})
    title = f"One step of a knob (speed-up by the {time_kind} time, conflicts and sectors of the whole kernel):"
    return "\n".join([title, formatter(table), *_list_dominant_knobs(kernel, neighbor_costs)])


def _estimate_time(kernel: Kernel, device_spec: Target, has_prediction: bool) -> tuple[float, str]:
    """Return the predicted seconds, or else the longest estimate of a unit, and the name of what takes most of it."""
    if has_prediction:
        time = predict_kernel_time(kernel, device_spec)
        return time.seconds, time.components[0].name
    longest = compute_unit_times(kernel, device_spec)[0]
    return longest.seconds, longest.unit


def _format_cells(kernel: Kernel, seconds: float, speedup: float) -> list[str]:
    quantities = collect_quantities(kernel, None)
    names = ("occupancy", "registers per thread", "bank conflicts", "global sectors")
    return [format_micros(seconds), format_significant(speedup), *(quantities[name] for name in names)]


def _list_dominant_knobs(
    kernel: Kernel, neighbor_costs: Sequence[tuple[str, Counter[tuple[str, str, str]]]]
) -> list[str]:
    """Return one line per expensive access with the change of a knob that affects it most; others are left out."""
    lines = []
    current_costs = sum_kernel_costs(kernel)
    for access in select_worst(compute_access_costs(kernel, None)):
        key = access.memory, access.array, access.kind
        changes = [
            (abs(costs[key] - current_costs[key]), name, costs[key]) for name, costs in neighbor_costs if costs[key]
        ]
        change, name, cost = max(changes, default=(0, "", 0))
        if change:
            lines.append(
                f"  {access.kind} of {access.array}, {access.memory} memory: {name} makes {cost:,} "
                f"{access.unit} of {current_costs[key]:,}"
            )
    return ["Knobs with the largest effect on the most expensive accesses:", *lines] if lines else []
