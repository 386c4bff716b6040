"""Why a kernel takes what it takes, as text: how full it makes the GPU, what its accesses cost, and what bounds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvmconv.analysis.asked import asked_by
from tvmconv.analysis.bounds import Bound, bounds, text_only
from tvmconv.analysis.estimate import estimated_seconds
from tvmconv.analysis.machine_code.linked import Linked, begin, linked
from tvmconv.analysis.memory.footprint import dram_bytes
from tvmconv.analysis.memory.swizzles import tiles
from tvmconv.analysis.occupancy import Occupancy, occupancy_of, waves
from tvmconv.analysis.predicted_time import QUARTILES, PredictedTime, predicted_time
from tvmconv.analysis.steps import steps
from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.lowered import LoweredStep
from tvmconv.errors import AnalysisError, CompileError
from tvmconv.gpu import WARP
from tvmconv.kernel import Kernel
from tvmconv.knobs import format_value
from tvmconv.knowledge.features import Machine
from tvmconv.reports.accesses import Governing, costs, costs_text
from tvmconv.reports.instructions import instructions
from tvmconv.reports.swizzles import tiles_text
from tvmconv.reports.tables import NOTHING, Table, significant


def explanation(kernel: Kernel, machine: Machine | None) -> str:
    """A page on one kernel.

    Args:
        kernel: for an NVIDIA architecture.
        machine: the GPU's numbers; without them nothing is said of times.

    Raises:
        AnalysisError: what the kernel does cannot be counted, or its architecture is not known.
        CompileError: it does not compile.
    """
    config = " ".join(f"{name}={format_value(value)}" for name, value in kernel.config.items())
    begin(kernel)
    of_tma = [each for step in kernel.steps if (each := tiles(kernel, step))]
    if machine:
        dram_bytes(kernel)  # of the text alone, while the compiler is at work
    lines = [f"{kernel.workload} by {kernel.schedule.name} on {kernel.device.text}", config or "no knobs"]
    found, failure = _linked(kernel)
    for place, step in enumerate(kernel.steps):
        code = instructions(found[place].listing) if found else f"instructions  {failure}"
        told = [_of_step(kernel, step, machine), code]
        if step not in kernel.timed_steps:
            told.insert(0, "prepares      a weight, once for all calls: it is in no time below")
        lines += ["", kernel.titled(step, "\n".join(told))]
    lines += ["", costs_text(kernel, costs(kernel, found))]
    if reason := text_only(kernel):
        lines.append(f"These are the accesses of the text, of which the compiler merges and drops some: {reason}.")
    lines += [text for each in of_tma for text in ("", tiles_text(each))]
    if machine:
        time = prediction(kernel, machine)
        lines += ["", _bounds(kernel, machine, time), "", _prediction(kernel, time)]
    return "\n".join(lines)


def _linked(kernel: Kernel) -> tuple[list[Linked] | None, str]:
    """The kernel's statements and instructions, or why they are not known."""
    try:
        return linked(kernel), ""
    except CompileError as error:  # there is no disassembler
        return None, str(error)


def knob_steps(kernel: Kernel, machine: Machine, told: Callable[[str], None] = lambda text: None) -> str:
    """What one step of each knob would change, as a table; the kernel itself is its first line.

    Args:
        kernel: for an NVIDIA architecture.
        machine: the GPU's numbers.
        told: is called with what is being built.

    Raises:
        AnalysisError: what a kernel does cannot be counted, or its architecture is not known.
    """
    predicting = isinstance(prediction(kernel, machine), PredictedTime)
    now = _Outlook.of(kernel, machine, predicting)
    found = [(1.0, ("as it is", "", *now.cells(1.0)))]
    governing = Governing(kernel)
    for step in steps(kernel):
        told(f"{step.knob}={format_value(step.value)}")
        try:
            then = _Outlook.of(step.kernel, machine, predicting)
            governing.look(f"{step.knob}={format_value(step.value)}", step.kernel)
        except (AnalysisError, CompileError):  # what the compiler does not take is no step
            continue
        times = then.seconds / now.seconds
        found.append((times, (step.knob, format_value(step.value), *then.cells(times))))
    rows = [found[0][1], *(row for _, row in sorted(found[1:], key=lambda each: each[0]))]
    time, of = ("predicted [µs]", "predicted") if predicting else ("estimate [µs]", "estimated")
    headers = ("knob", "to", "most by", time, "×", "occupancy", "registers", "conflicts", "sectors")
    table = Table(headers, rows, left=frozenset({"knob", "to", "most by"}))
    title = f"One step of a knob (× of the {of} time, conflicts and sectors of the whole kernel):"
    return "\n".join([title, table.text(), *governing.lines()])


@dataclass(frozen=True)
class _Outlook:
    """What is told of a kernel beside others.

    Attributes:
        kernel: the kernel.
        seconds: the predicted time, or the longest estimate of a unit, where no time is predicted.
        most: the part or the unit that takes most of it.
    """

    kernel: Kernel
    seconds: float
    most: str

    @staticmethod
    def of(kernel: Kernel, machine: Machine, predicting: bool) -> _Outlook:
        """Of a kernel; raises AnalysisError where that cannot be counted."""
        if predicting:
            time = predicted_time(kernel, machine)
            return _Outlook(kernel, time.seconds, time.parts[0].name)
        longest = bounds(kernel, machine)[0]
        return _Outlook(kernel, longest.seconds, longest.unit)

    def cells(self, times: float) -> tuple[str, ...]:
        """Of a table; so many times as long as the kernel as it is."""
        told = quantities(self.kernel, None)
        counts = (told["occupancy"], told["registers a thread"], told["bank conflicts"], told["global sectors"])
        return (self.most, significant(self.seconds * 1e6), significant(times), *counts)


def _of_step(kernel: Kernel, step: LoweredStep, machine: Machine | None) -> str:
    found = occupancy_of(kernel, step)
    resources = kernel.cubin.kernels[step.name]
    shared = resources.shared_bytes + step.dynamic_shared_bytes
    lines = [
        f"launch     {step.launch}",
        f"resources  {resources.registers} registers a thread, {resources.spills} bytes of spills, "
        f"{shared:,} bytes of shared memory a block",
        f"occupancy  {_occupancy(found)}",
    ]
    if machine and found.blocks:
        dealt = waves(found, math.prod(step.launch.grid), machine.multiprocessors)
        lines.append(
            f"waves      {dealt.blocks:,} blocks, {dealt.at_a_time:,} at a time: {significant(dealt.count)} waves, "
            f"{dealt.busy:.0%} of {dealt.multiprocessors} multiprocessors have one"
        )
    return "\n".join(lines)


def _occupancy(found: Occupancy) -> str:
    others = ", ".join(f"{name} {blocks}" for name, blocks in found.limits.items())
    warps = ceil_div(found.threads, WARP)
    return (
        f"{found.blocks} blocks of {warps} warps, {found.share:.0%} of {found.most_warps} warps; "
        f"decided by {' and '.join(found.binding)} (blocks by each: {others})"
    )


def _bounds(kernel: Kernel, machine: Machine, time: PredictedTime | str) -> str:
    found = bounds(kernel, machine)
    rows = [(each.unit, each.amount, _at_least(each), significant(each.seconds * 1e6)) for each in found]
    table = Table(("unit", "has to do", "at least [µs]", "estimate [µs]"), rows, left=frozenset({"unit"}))
    return "\n".join([f"On {machine.name}, bound by {bound_by(kernel, time, found)}:", table.text()])


def _at_least(bound: Bound) -> str:
    return NOTHING if bound.at_least is None else significant(bound.at_least * 1e6)


def bound_by(kernel: Kernel, time: PredictedTime | str, found: Sequence[Bound]) -> str:
    """Return what a kernel's time goes to most.

    Args:
        kernel: the kernel.
        time: as `prediction` tells it: the part that adds most to it, where there is a predicted time.
        found: the times of the units: else the unit with the longest estimate.
    """
    if isinstance(time, PredictedTime):
        return time.parts[0].name
    return f"{found[0].unit}, by an estimate from the text" if text_only(kernel) else found[0].unit


def _prediction(kernel: Kernel, time: PredictedTime | str) -> str:
    if isinstance(time, str):
        estimate = estimated_seconds(kernel)
        why = f"No time is predicted: {time}"
        if estimate is None:
            return f"{why}."
        return f"{why}; {kernel.schedule.name} itself estimates {significant(estimate * 1e6)} µs, from its tiles."
    low, high = (significant(time.seconds * share * 1e6) for share in QUARTILES)
    rows = [
        (part.name, significant(part.seconds * 1e6), significant(part.adds * 1e6), part.formula)
        for part in time.parts
        if part.seconds
    ]
    table = Table(("part", "alone [µs]", "adds [µs]", "of"), rows, left=frozenset({"part", "of"}))
    told = (
        f"predicted {significant(time.seconds * 1e6)} µs (of kernels of direct with this prediction, half took between "
        f"{low} and {high}):"
    )
    return "\n".join([told, table.text()])


def prediction(kernel: Kernel, machine: Machine) -> PredictedTime | str:
    """Return a kernel's predicted time, or why none is predicted."""
    try:
        return predicted_time(kernel, machine)
    except (AnalysisError, CompileError) as error:
        return str(error)


def quantities(kernel: Kernel, machine: Machine | None) -> dict[str, str]:
    """What is compared of kernels, of their timed steps."""
    found: dict[str, list[float]] = {}
    for step in kernel.timed_steps:
        blocks = math.prod(step.launch.grid)
        done = asked_by(kernel, step)
        own, touched = done.shared, done.touched
        for name, value in (
            ("blocks", blocks),
            ("global sectors", blocks * sum(each.sectors for each in touched)),
            ("global sectors at least", blocks * sum(each.least for each in touched)),
            ("shared wavefronts", blocks * sum(each.wavefronts for each in own)),
            ("bank conflicts", blocks * sum(each.conflicts for each in own)),
        ):
            found.setdefault(name, []).append(value)
    of_steps = [occupancy_of(kernel, step) for step in kernel.timed_steps]
    told = {
        "threads a block": ", ".join(str(each.threads) for each in of_steps),
        "registers a thread": ", ".join(str(kernel.cubin.kernels[step.name].registers) for step in kernel.timed_steps),
        "occupancy": ", ".join(f"{each.share:.0%}" for each in of_steps),
        "decided by": ", ".join(" and ".join(each.binding) for each in of_steps),
        **{name: f"{int(sum(values)):,}" for name, values in found.items()},
    }
    if machine:
        units, time = bounds(kernel, machine), prediction(kernel, machine)
        told["bound by"] = bound_by(kernel, time, units)
        for each in sorted(units, key=lambda bound: bound.unit):
            told[f"{each.unit}, estimate [µs]"] = significant(each.seconds * 1e6)
        told["predicted [µs]"] = NOTHING if isinstance(time, str) else significant(time.seconds * 1e6)
        if estimate := estimated_seconds(kernel):
            told["estimated by the schedule [µs]"] = significant(estimate * 1e6)
    return told
