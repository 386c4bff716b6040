"""The comparison of a workload's kernels: their counts, and the components by which their times differ."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.analysis.predicted_time import PredictedTime
from tvmconv.analysis.sass.linked_sources import prefetch_listings
from tvmconv.analysis.speed_of_light import explain_text_counts
from tvmconv.kernel import Kernel
from tvmconv.reports.explanation import collect_quantities, try_predict_time
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant
from tvmconv.space import format_value
from tvmconv.target import Target

MAX_CAUSES = 3  # per difference
MIN_CAUSE_FRACTION = 0.1  # of the largest cause; smaller ones are left out


def compare_kernels(kernels: Sequence[Kernel], device_spec: Target | None, names: Sequence[str] | None = None) -> str:
    """Return a text that compares several kernels.

    Args:
        kernels: Kernels for one NVIDIA architecture.
        device_spec: Specification of the GPU; without it the text has no times.
        names: Names of the kernels; by default those of their schedules.

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
    text_counted_names = ", ".join(
        name for name, kernel in zip(names, kernels, strict=True) if explain_text_counts(kernel)
    )
    if text_counted_names:
        lines.append(
            f"The counts of {text_counted_names} are those of the TIR; the compiler merges and drops some accesses."
        )
    return "\n".join(lines)


def _format_configs(kernels: Sequence[Kernel], names: Sequence[str]) -> list[str]:
    """Return the knobs of each kernel; of kernels by one schedule only those that differ."""
    lines = []
    for name, kernel in zip(names, kernels, strict=True):
        same_schedule_configs = [
            other_kernel.config for other_kernel in kernels if other_kernel.schedule.name == kernel.schedule.name
        ]
        knobs = [
            f"{knob}={format_value(value)}"
            for knob, value in kernel.config.items()
            if len(same_schedule_configs) == 1 or any(config[knob] != value for config in same_schedule_configs)
        ]
        knob_text = " ".join([kernel.schedule.name] * (name != kernel.schedule.name) + knobs)
        lines += [f"{name}: {knob_text}"] if knob_text else []
    return lines


def _make_component_table(times: Sequence[PredictedTime], names: Sequence[str]) -> Table:
    """Return a table of the components of each predicted time, the largest differences first."""
    components = {component.name: component for component in times[0].components}
    seconds_by_component = {name: [time.get_added_seconds(name) for time in times] for name in components}
    order = sorted(
        seconds_by_component, key=lambda name: min(seconds_by_component[name]) - max(seconds_by_component[name])
    )
    rows = [
        (name, *_format_microseconds(seconds_by_component[name]), components[name].formula)
        for name in order
        if any(seconds_by_component[name])
    ]
    rows.append(("launches", *_format_microseconds([time.launch_seconds for time in times]), "one a step"))
    headers = ("part of the predicted time [µs]", *names, "of")
    return Table(headers, rows, left_aligned=frozenset({headers[0], "of"}))


def _explain_difference(first: PredictedTime, other_time: PredictedTime, first_name: str, name: str) -> str:
    """Return one line: the ratio of another kernel's time to the first one's, and the main causes."""
    changes = {
        component.name: other_time.get_added_seconds(component.name) - component.added_seconds
        for component in first.components
    }
    changes["launches"] = other_time.launch_seconds - first.launch_seconds
    component_names = sorted(changes, key=lambda component: -abs(changes[component]))[:MAX_CAUSES]
    main_components = [
        component
        for component in component_names
        if abs(changes[component]) > MIN_CAUSE_FRACTION * abs(changes[component_names[0]])
    ]
    causes = ", ".join(f"{component} {changes[component] * 1e6:+.3g} µs" for component in main_components)
    ratio = format_significant(other_time.seconds / first.seconds)
    return f"{name} is predicted to take {ratio} × the time of {first_name}: {causes or 'nothing differs'}"


def _format_microseconds(seconds: Sequence[float]) -> list[str]:
    return [format_significant(duration * 1e6) for duration in seconds]
