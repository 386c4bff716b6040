"""Kernels of a workload side by side: what is counted of them, and where the time goes by which they differ."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.analysis.bounds import text_only
from tvmconv.analysis.machine_code.linked import begin
from tvmconv.analysis.predicted_time import PredictedTime
from tvmconv.kernel import Kernel
from tvmconv.knobs import format_value
from tvmconv.knowledge.features import Machine
from tvmconv.reports.explain import prediction, quantities
from tvmconv.reports.tables import NOTHING, Table, significant

CAUSES = 3  # that are told of a difference, at most
MATTERS = 0.1  # of the largest, for another to be told, too


def comparison(kernels: Sequence[Kernel], machine: Machine | None, names: Sequence[str] | None = None) -> str:
    """A page on several kernels.

    Args:
        kernels: for one NVIDIA architecture.
        machine: the GPU's numbers; without them nothing is said of times.
        names: what the kernels are called; by default by their schedules.

    Raises:
        AnalysisError: what a kernel does cannot be counted, or its architecture is not known.
        CompileError: one does not compile.
    """
    names = names or [kernel.schedule.name for kernel in kernels]
    for kernel in kernels:
        begin(kernel)
    columns = [quantities(kernel, machine) for kernel in kernels]
    headers = ("of the whole kernel", *names)
    asked = dict.fromkeys(name for own in columns for name in own)
    rows = [(name, *(own.get(name, NOTHING) for own in columns)) for name in asked]
    lines = [f"{kernels[0].workload} on {kernels[0].device.text}", *_configs(kernels, names), ""]
    lines.append(Table(headers, rows, left=frozenset(headers[:1])).text())
    if machine is None:
        return "\n".join(lines)
    predicted = [prediction(kernel, machine) for kernel in kernels]
    times = [time for time in predicted if isinstance(time, PredictedTime)]
    if len(times) == len(kernels):
        lines += ["", _shares(times, names).text(), ""]
        lines += [_because(times[0], other, names[0], name) for name, other in zip(names[1:], times[1:], strict=True)]
        return "\n".join(lines)
    reasons = [(name, time) for name, time in zip(names, predicted, strict=True) if isinstance(time, str)]
    lines += ["", *(f"No time is predicted of {name}: {reason}." for name, reason in reasons)]
    texts = ", ".join(name for name, kernel in zip(names, kernels, strict=True) if text_only(kernel))
    if texts:
        lines.append(f"The counts of {texts} are those of the text, of which the compiler merges and drops some.")
    return "\n".join(lines)


def _configs(kernels: Sequence[Kernel], names: Sequence[str]) -> list[str]:
    """The knobs of each kernel; of several by one schedule, those in which they differ."""
    lines = []
    for name, kernel in zip(names, kernels, strict=True):
        alike = [other.config for other in kernels if other.schedule.name == kernel.schedule.name]
        knobs = [
            f"{knob}={format_value(value)}"
            for knob, value in kernel.config.items()
            if len(alike) == 1 or any(config[knob] != value for config in alike)
        ]
        told = " ".join([kernel.schedule.name] * (name != kernel.schedule.name) + knobs)
        lines += [f"{name}: {told}"] if told else []
    return lines


def _shares(times: Sequence[PredictedTime], names: Sequence[str]) -> Table:
    """What each predicted time is made of, what differs most first."""
    parts = {part.name: part for part in times[0].parts}
    shares = {name: [time.share(name) for time in times] for name in parts}
    order = sorted(shares, key=lambda name: min(shares[name]) - max(shares[name]))
    rows = [(name, *_microseconds(shares[name]), parts[name].formula) for name in order if any(shares[name])]
    rows.append(("launches", *_microseconds([time.launches for time in times]), "one a step"))
    headers = ("share of the predicted time [µs]", *names, "of")
    return Table(headers, rows, left=frozenset({headers[0], "of"}))


def _because(first: PredictedTime, other: PredictedTime, first_name: str, name: str) -> str:
    """One line: how much longer another kernel takes than the first, and most of why."""
    changes = {part.name: other.share(part.name) - part.adds for part in first.parts}
    changes["launches"] = other.launches - first.launches
    order = sorted(changes, key=lambda part: -abs(changes[part]))[:CAUSES]
    told = [part for part in order if abs(changes[part]) > MATTERS * abs(changes[order[0]])]
    causes = ", ".join(f"{part} {changes[part] * 1e6:+.3g} µs" for part in told)
    ratio = significant(other.seconds / first.seconds)
    return f"{name} is predicted to take {ratio} × the time of {first_name}: {causes or 'nothing differs'}"


def _microseconds(seconds: Sequence[float]) -> list[str]:
    return [significant(each * 1e6) for each in seconds]
