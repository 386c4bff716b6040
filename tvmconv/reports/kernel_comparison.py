"""The comparison of a workload's kernels: their counts, and the components by which their times differ."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.analysis.predicted_time import PredictedTime
from tvmconv.analysis.sass.linked_sources import prefetch_listings
from tvmconv.analysis.speed_of_light import explain_text_counts
from tvmconv.kernel import Kernel
from tvmconv.reports.explanation import collect_quantities, try_predict_time
from tvmconv.reports.tables import EMPTY_CELL, Table, format_micros, format_significant
from tvmconv.space import format_value
from tvmconv.target import Target

MAX_CAUSES = 3  # per difference
MIN_CAUSE_FRACTION = 0.1  # of the largest cause; smaller ones are left out


def compare_kernels(kernels: Sequence[Kernel], device_spec: Target | None, names: Sequence[str] | None = None) -> str:
    """Return a text that compares several kernels for one NVIDIA architecture, by default named by their schedules.

    It has times if the specification of the GPU is given.

    Raises:
        AnalysisError: A kernel's operations cannot be counted, or its architecture is unknown.
        CompileError: A kernel cannot be compiled.
    """
    names = names or [kernel.schedule.name for kernel in kernels]
    for kernel in kernels:
        prefetch_listings(kernel)
    columns = [collect_quantities(kernel, device_spec) for kernel in kernels]
    headers = ("of the whole kernel", *names)
    quantity_names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, EMPTY_CELL) for column in columns)) for name in quantity_names]
    lines = [f"{kernels[0].workload} on {kernels[0].device.text}", *_format_configs(kernels, names), ""]
    lines.append(Table(headers, rows, left_aligned=frozenset(headers[:1])).format_text())
    if device_spec is None:
        return "\n".join(lines)
    predictions = [try_predict_time(kernel, device_spec) for kernel in kernels]
    times = [time for time in predictions if isinstance(time, PredictedTime)]
    if len(times) == len(kernels):
        lines += ["", _make_component_table(times, names).format_text(), ""]
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
    """Return one line: the ratio of another kernel's time to the first one's, and the main causes."""
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
    ratio = format_significant(other_time.seconds / first.seconds)
    return f"{name} is predicted to take {ratio} × the time of {first_name}: {causes or 'nothing differs'}"
