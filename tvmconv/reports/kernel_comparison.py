"""Kernels of a workload side by side: what is counted of them, and where the time goes by which they differ."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.analysis.predicted_time import PredictedTime
from tvmconv.analysis.sass.linked_sources import prefetch_listings
from tvmconv.analysis.speed_of_light import explain_text_counts
from tvmconv.cost_model.features import DeviceSpec
from tvmconv.kernel import Kernel
from tvmconv.reports.explanation import collect_quantities, try_predict_time
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant
from tvmconv.space import format_value

MAX_CAUSES = 3  # that are told of a difference, at most
MIN_CAUSE_FRACTION = 0.1  # of the largest, for another to be told, too


def compare_kernels(
    kernels: Sequence[Kernel], device_spec: DeviceSpec | None, names: Sequence[str] | None = None
) -> str:
    """A page on several kernels.

    Args:
        kernels: for one NVIDIA architecture.
        device_spec: the GPU's numbers; without them nothing is said of times.
        names: what the kernels are called; by default by their schedules.

    Raises:
        AnalysisError: what a kernel does cannot be counted, or its architecture is not known.
        CompileError: one does not compile.
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
    lines += ["", *(f"No time is predicted of {name}: {reason}." for name, reason in reasons)]
    text_counted_names = ", ".join(
        name for name, kernel in zip(names, kernels, strict=True) if explain_text_counts(kernel)
    )
    if text_counted_names:
        lines.append(
            f"The counts of {text_counted_names} are those of the text, of which the compiler merges and drops some."
        )
    return "\n".join(lines)


def _format_configs(kernels: Sequence[Kernel], names: Sequence[str]) -> list[str]:
    """The knobs of each kernel; of several by one schedule, those in which they differ."""
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
    """What each predicted time is made of, what differs most first."""
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
    headers = ("share of the predicted time [µs]", *names, "of")
    return Table(headers, rows, left_aligned=frozenset({headers[0], "of"}))


def _explain_difference(first: PredictedTime, other_time: PredictedTime, first_name: str, name: str) -> str:
    """One line: how much longer another kernel takes than the first, and most of why."""
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
