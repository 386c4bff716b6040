"""The sensitivity of a kernel to its knobs: what changing each by one step does to the time and to the accesses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from tvmconv.analysis.predicted_time import PredictedTime, predict_kernel_time
from tvmconv.analysis.sensitivity import iterate_knob_neighbors
from tvmconv.analysis.speed_of_light import compute_unit_times
from tvmconv.errors import AnalysisError, CompileError
from tvmconv.kernel import Kernel
from tvmconv.reports.accesses import compute_access_costs, select_worst, sum_kernel_costs
from tvmconv.reports.explanation import collect_quantities, try_predict_time
from tvmconv.reports.tables import Table, format_micros, format_significant
from tvmconv.space import format_value
from tvmconv.target import Target


def make_sensitivity_report(
    kernel: Kernel, device_spec: Target, on_progress: Callable[[str], None] = lambda text: None
) -> str:
    """Return a table of the effect of changing each knob by one step; the kernel itself is the first row. `on_progress`
    receives the name and value of the changed knob. If the kernel's operations cannot be counted, AnalysisError is
    raised.
    """
    has_prediction = isinstance(try_predict_time(kernel, device_spec), PredictedTime)
    seconds, bottleneck = _estimate_time(kernel, device_spec, has_prediction)
    unchanged_row = ("unchanged", "", bottleneck, *_format_cells(kernel, seconds, 1.0))
    ratios_and_rows = []
    neighbor_costs = []
    for neighbor in iterate_knob_neighbors(kernel):
        value = format_value(neighbor.value)
        on_progress(f"{neighbor.knob}={value}")
        try:
            neighbor_seconds, bottleneck = _estimate_time(neighbor.kernel, device_spec, has_prediction)
            neighbor_costs.append((f"{neighbor.knob}={value}", sum_kernel_costs(neighbor.kernel)))
        except (AnalysisError, CompileError):  # configs that do not compile are skipped
            continue
        ratio = neighbor_seconds / seconds
        cells = _format_cells(neighbor.kernel, neighbor_seconds, ratio)
        ratios_and_rows.append((ratio, (neighbor.knob, value, bottleneck, *cells)))
    rows = [unchanged_row, *(row for _, row in sorted(ratios_and_rows, key=lambda item: item[0]))]
    time_header, time_kind = ("predicted [µs]", "predicted") if has_prediction else ("estimate [µs]", "estimated")
    headers = ("knob", "to", "bottleneck", time_header, "×", "occupancy", "registers", "conflicts", "sectors")
    table = Table(headers, rows, {"knob", "to", "bottleneck"})
    title = f"One step of a knob (× of the {time_kind} time, conflicts and sectors of the whole kernel):"
    return "\n".join([title, table.format_text(), *_list_dominant_knobs(kernel, neighbor_costs)])


def _estimate_time(kernel: Kernel, device_spec: Target, has_prediction: bool) -> tuple[float, str]:
    """Return the predicted seconds, or else the longest estimate of a unit, and the name of what takes most of it."""
    if has_prediction:
        time = predict_kernel_time(kernel, device_spec)
        return time.seconds, time.components[0].name
    longest = compute_unit_times(kernel, device_spec)[0]
    return longest.seconds, longest.unit


def _format_cells(kernel: Kernel, seconds: float, ratio: float) -> list[str]:
    quantities = collect_quantities(kernel, None)
    names = ("occupancy", "registers per thread", "bank conflicts", "global sectors")
    return [format_micros(seconds), format_significant(ratio), *(quantities[name] for name in names)]


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
