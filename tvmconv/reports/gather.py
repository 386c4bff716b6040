"""Gathering what the page shows: from logs, comparisons and counters, and from kernels that are built for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import cast

from tvmconv import library
from tvmconv.analysis.nsight.counted import counted
from tvmconv.analysis.waterfall import Fall, waterfall
from tvmconv.devices import Device
from tvmconv.errors import Error, ScheduleError
from tvmconv.experiments.beside import Beside, CountedStep
from tvmconv.experiments.counters import Counters
from tvmconv.experiments.readings import Readings
from tvmconv.experiments.sweep import Sweep
from tvmconv.kernel import Kernel, build_on
from tvmconv.knowledge.features import Machine
from tvmconv.logs.best import Rankings
from tvmconv.logs.build import build
from tvmconv.logs.lines import BadLines
from tvmconv.logs.log import read
from tvmconv.logs.record import Record
from tvmconv.reports import measured
from tvmconv.reports.measured import Together
from tvmconv.reports.page.contents import Contents
from tvmconv.reports.waterfall import known_times
from tvmconv.version import VERSION
from tvmconv.workloads import Layer, Workload

BESIDE = "conflict_free"  # that the fastest is looked at beside, where it applies


@dataclass(frozen=True)
class Sources:
    """Where the page's numbers come from.

    Attributes:
        logs: the files.
        called: what they are called on the page.
        asked: whether somebody named them, so that they should have something of what the page is about.
        sweeps: comparisons, each of which should, too.
        counters: files of what a profiler counted.
        schedules: names of those to look into; None for the fastest and one beside it.
    """

    logs: Sequence[Path]
    called: str
    asked: bool = False
    sweeps: Sequence[Sweep] = ()
    counters: Sequence[Path] = ()
    schedules: Sequence[str] | None = None


@dataclass
class Found:
    """What the logs have, of one device.

    Attributes:
        device: its name.
        records: of each workload, in the order of the files.
        files: that have any.
        bad: lines of each file that are no records.
    """

    device: str = ""
    records: dict[Workload, list[Record]] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    bad: dict[Path, BadLines] = field(default_factory=dict)


def gather(
    name: str,
    layers: Sequence[Layer],
    place: Device,
    machine: Machine | None,
    sources: Sources,
    command: str,
    told: Callable[[str], None] = lambda text: None,
) -> Contents:
    """All that the page shows.

    Args:
        name: the workload's text, or the network's name.
        layers: of the network; of one workload, that one.
        place: what to compile for.
        machine: its numbers; None where they are not known.
        sources: where measured numbers come from.
        command: what was typed, for the provenance.
        told: is called with what is being done.

    Raises:
        Error: a file cannot be read, a schedule is not there, or counters are of other workloads.
    """
    told("reading")
    found = read_logs(sources.logs, [layer.workload for layer in layers], place)
    if sources.asked and not found.records:
        raise Error(f"no record of {name} in {sources.called}")
    for sweep in sources.sweeps:
        if not any(measured.of_sweep(sweep, layer.workload) for layer in layers):
            raise Error(f"no result of {name} in {sweep.name}")
    counters, counted_by = _counters(layers, sources.counters, place, told)
    alone = len(layers) == 1
    groups = {layer.workload: _groups(layer.workload, found, sources, place, alone=alone) for layer in layers}
    leading = max(layers, key=lambda layer: layer.count * _seconds(layer.workload, groups)).workload
    if alone and not groups[leading] and machine:
        told("computing bounds")
        computed = measured.of_code(leading, place, machine)
        groups[leading] = [_named(computed, leading, sources.schedules)] if computed else []
    kernels = _kernels(leading, found, sources, place, told)
    records = found.records.get(leading, [])
    way, no_way = _way(kernels, machine, records, told)
    return Contents(
        name=name,
        layers=layers,
        place=f"Compiled for {place.name if place.arch == place.text else f'{place.text}, {place.name}'}.",
        machine=machine,
        groups=groups,
        leading=leading,
        kernels=kernels,
        searches=[(sources.called, records)] if records else [],
        way=way,
        no_way=no_way,
        counters=counters,
        bad=[f"{file}: {bad}" for file, bad in found.bad.items() if bad.count],
        provenance=[
            ("this page", f"tvmconv {VERSION}, TVM {metadata.version('apache-tvm')}; {command}"),
            *_of_log(found, sources),
            *((sweep.name, sweep.provenance) for sweep in sources.sweeps),
            *counted_by,
        ],
    )


def read_logs(logs: Sequence[Path], workloads: Sequence[Workload], place: Device) -> Found:
    """The records of these workloads on the device that is nearest to the place."""
    found = Found()
    wanted, only = set(workloads), workloads[0] if len(workloads) == 1 else None
    everything: list[tuple[Path, Record]] = []
    for file in logs:
        found.bad[file] = BadLines()
        everything += ((file, each) for each in read(file, found.bad[file], only) if each.workload in wanted)
    if not everything:
        return found
    files = list(dict.fromkeys(file for file, _ in everything))
    rankings = Rankings(files)
    nearest = (each.device for w in workloads for _, each in rankings.nearest_first(w, place))
    found.device = next(nearest, everything[0][1].device)
    for file, record in everything:
        if record.device == found.device:
            found.records.setdefault(record.workload, []).append(record)
            if file not in found.files:
                found.files.append(file)
    return found


def _groups(w: Workload, found: Found, sources: Sources, place: Device, *, alone: bool) -> list[Together]:
    """Return the times of a workload, of the schedules that were named; of a network's, from the log only the best."""
    logged = measured.of_log(sources.called, found.records.get(w, []))
    if logged and not alone:
        logged = replace(logged, times=logged.times[:1])
    compared = (measured.of_sweep(sweep, w) for sweep in sources.sweeps)
    groups = [each for each in (logged, *compared) if each]
    if alone:
        return [each for each in (_named(group, w, sources.schedules) for group in groups) if each.times or each.failed]
    if not groups:
        predicted = measured.of_model(w, place)
        return [predicted] if predicted else []
    return groups


def _named(group: Together, w: Workload, schedules: Sequence[str] | None) -> Together:
    """Return a group without the schedules of a workload that were not named, if any were; libraries stay."""
    if schedules is None:
        return group
    others = {schedule.name for schedule in library.schedules(w)} - {*schedules}
    times = tuple(each for each in group.times if not others & {each.name, each.note})
    return replace(group, times=times, failed=tuple(each for each in group.failed if each[0] not in others))


def _seconds(w: Workload, groups: Mapping[Workload, Sequence[Together]]) -> float:
    """How long a workload takes, for finding the one that takes the longest; a guess where nothing is known."""
    return next((group.times[0].seconds for group in groups[w] if group.times), w.flops * 1e-15)


def _kernels(w: Workload, found: Found, sources: Sources, place: Device, told: Callable[[str], None]) -> list[Kernel]:
    """The kernels to look into, the fastest first."""
    if sources.schedules:
        kernels, failures = [], []
        for name in sources.schedules:
            told(f"building {name}")
            try:
                kernels.append(fastest(w, name, found, place))
            except ScheduleError as failure:
                library.report_left_out(failure, "the page")
                failures.append(failure)
        if not kernels:
            raise failures[0]
        return kernels
    told("building the fastest")
    best = fastest(w, None, found, place)
    there = {schedule.name: schedule for schedule in library.schedules(w) if schedule.runs_on(place.kind, place.arch)}
    naive = library.naive(w)
    for name in (BESIDE, naive.name if naive else ""):
        if name in there and name != best.schedule.name:
            told(f"building {name}")
            return [best, build_on(w, there[name], place, None)]
    return [best]


def fastest(w: Workload, name: str | None, found: Found, place: Device) -> Kernel:
    """The fastest kernel that the log has, of a schedule if one is named; else that with the default knobs."""
    logged = any(record.ok and name in (None, record.schedule) for record in found.records.get(w, []))
    return build(w, name, device=place, log=found.files if logged else None)


def _way(
    kernels: Sequence[Kernel], machine: Machine | None, records: Sequence[Record], told: Callable[[str], None]
) -> tuple[list[Fall], str]:
    """The waterfall of the first kernel that is not its schedule's default, or why there is none."""
    if not machine:
        return [], "Of this architecture's GPUs no numbers are known: there is no bound to compute."
    try:
        best = next((kernel for kernel in kernels if not _is_default(kernel)), kernels[0])
        if not best.config:
            return [], f"{best.schedule.name} has no knobs."
        known = known_times(records, best.schedule.name)
        way = waterfall(best, machine, known, lambda knob: told(f"waterfall: {knob}"))
    except Error as error:
        return [], f"The way to this kernel cannot be counted: {error}"
    return (way, "") if len(way) > 1 else ([], f"{best.schedule.name} has its default config.")


def _is_default(kernel: Kernel) -> bool:
    space = kernel.schedule.space(kernel.workload, kernel.device.limits)
    return space.point(kernel.config).tolist() == space.point({}).tolist()


def _counters(
    layers: Sequence[Layer], files: Sequence[Path], place: Device, told: Callable[[str], None]
) -> tuple[list[Beside], list[tuple[str, str]]]:
    """What was profiled of the workloads beside what is counted; and the provenance of each file."""
    rows, whence = [], []
    there = {layer.workload.text: layer.workload for layer in layers}
    for file in files:
        readings = _readings(file, there, place, told)
        whence.append((file.name, readings.provenance))
        own = [each for each in readings.kernels if each.workload in there]
        if not own:
            raise Error(f"{file}: no counters of {', '.join(there) if len(there) == 1 else 'any of these layers'}")
        rows += own
    return rows, whence


def _readings(
    file: Path, there: Mapping[str, Workload], place: Device, told: Callable[[str], None]
) -> Readings[Beside]:
    """A file of `tvmconv counters`, or one of its --stalls, whose kernels are counted here."""
    try:
        return Readings.read(file, Beside)
    except Error:
        read = Readings.read(file, Counters)
    rows = []
    for each in read.kernels:
        if each.workload in there:
            told(f"counting {each.schedule}")
            w = there[each.workload]
            kernel = build_on(w, library.find(w, each.schedule), place, None)
            found = cast(CountedStep, counted(kernel, kernel.steps[0]).plain())
            rows.append(Beside(each.workload, each.schedule, dict(kernel.config), 0, found, dict(each.metrics)))
    return Readings(read.name, read.provenance, rows)


def _of_log(found: Found, sources: Sources) -> list[tuple[str, str]]:
    """What the logs are: their records, when and by what they were made."""
    records = [record for own in found.records.values() for record in own]
    if not records:
        return []
    versions = Counter(" ".join(pair) for record in records for pair in sorted(record.versions.items()))
    names = ", ".join(file.name for file in found.files)
    parts = [
        f"{names}: {len(records):,} records on {found.device}",
        measured.dates(records),
        ", ".join(sorted(versions)),
    ]
    return [(sources.called, "; ".join(filter(None, parts)))]
