"""What a search begins with: the schedules' spaces and tuners, what is known to be good, inputs and a reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvmconv import library
from tvmconv.devices import Device
from tvmconv.errors import KnobError, ScheduleError
from tvmconv.knobs.space import Space
from tvmconv.knowledge.choose import guess_of, promising
from tvmconv.logs.best import log_files
from tvmconv.logs.lines import BadLines
from tvmconv.logs.log import read
from tvmconv.logs.record import Record
from tvmconv.logs.shipped import shipped_logs
from tvmconv.measuring.problems import Problems
from tvmconv.searching import tuners
from tvmconv.searching.contest import RESERVE, Contest, Entrant, Proposal
from tvmconv.searching.known import nearest
from tvmconv.searching.request import Request
from tvmconv.searching.tuners.xgb import XGBTuner
from tvmconv.workloads import Workload

NEAREST = 4  # workloads whose best configs are tried first, for each schedule
PREDICTED = 16  # configs that the model thinks most of, before these
LEADING = 3  # of them, before the defaults: one that the model knows nothing of may be faster than all that it names
WITHOUT_KNOWLEDGE = ("random", "grid")  # tuners that begin with nothing: the yardsticks


@dataclass(frozen=True)
class Field:
    """The schedules that take part in a search.

    Attributes:
        first: those that promise most.
        reserve: those that seldom win: their defaults are measured, and they are searched if these are fast.
        named: whether the caller named them; then no other schedule of the log is the result of the search.
    """

    first: Sequence[library.Schedule]
    reserve: Sequence[library.Schedule] = ()
    named: bool = False

    @classmethod
    def of(cls, workload: Workload, named: Sequence[str | library.Schedule], device: Device) -> Field:
        """Those that were named, by name or as found by the library; if none was, all that can win.

        Raises:
            ScheduleError: there is no such schedule for the workload, or none at all for the device.
        """
        chosen = [library.as_schedule(workload, each) for each in named]
        if chosen:
            return cls(chosen, named=True)
        first = library.to_tune(workload, device.kind, device.arch)
        return cls(first, library.in_reserve(workload, device.kind, device.arch))


def open_contest(workload: Workload, field: Field, device: Device, request: Request) -> Contest:
    """The spaces and tuners of all schedules, and what is known to be good.

    A schedule that fails with its default config is left out, with a line in the log.

    Raises:
        ScheduleError: all schedules fail.
        Error: a log cannot be read.
    """
    others = log_files(request.transfer)
    entrants, failures = [], []
    for schedule in (*field.first, *field.reserve):
        try:
            tuner = tuners.make(request.tuner, schedule.space(workload, device.limits), request.seed)
            tuner.space.usage(tuner.space.nearest({})[None])
        except ScheduleError as failure:
            library.report_left_out(failure)
            failures.append(failure)
            continue
        if isinstance(tuner, XGBTuner):
            for space, records in _of_others(schedule, workload, others, device):
                tuner.transfer(space, records)
            if guess := guess_of(workload, schedule.name, tuner.space, device):
                tuner.guide(guess)
        entrants.append(Entrant(schedule, tuner, RESERVE if schedule in field.reserve else 1.0))
    if failures and not entrants:
        raise failures[0]
    if request.tuner in WITHOUT_KNOWLEDGE:
        return Contest(entrants)
    return Contest(entrants, _known(workload, field, device, request, entrants))


def _known(
    workload: Workload, field: Field, device: Device, request: Request, entrants: Sequence[Entrant]
) -> Iterator[list[Proposal]]:
    """What is known to be good, in portions; the first is there at once, and the logs are read only for the others."""
    spaces = {entrant.schedule.name: entrant.tuner.space for entrant in entrants}
    defaults = [(name, space.default) for name, space in spaces.items()]
    first = sum(entrant.schedule in field.first for entrant in entrants)
    predicted = promising(workload, device, PREDICTED, spaces)[:PREDICTED]
    expected = [(prediction.schedule, prediction.config) for prediction in predicted]
    yield [*expected[:LEADING], *defaults[:first]]
    own = Path(request.log)
    logs = [*log_files(request.transfer), *([own] if own.exists() else []), *shipped_logs()]
    yield [*expected[LEADING:], *nearest(logs, workload, list(spaces), device.kind, NEAREST), *defaults[first:]]


def _of_others(
    schedule: library.Schedule, workload: Workload, logs: Iterable[Path], device: Device
) -> Iterator[tuple[Space, list[Record]]]:
    """Trials of a schedule that logs have of other workloads: of each, and of each device, with their space.

    Devices of another kind are left out, and so is what the schedule does not compute, or not any more.
    """
    found: dict[tuple[Workload, str], list[Record]] = {}
    for log in logs:
        for record in read(log, BadLines()):
            alike = record.schedule == schedule.name and record.target.split(maxsplit=1)[:1] == [device.kind]
            if alike and record.workload != workload and not record.final:
                found.setdefault((record.workload, record.device), []).append(record)
    for (other, _), records in found.items():
        with contextlib.suppress(ScheduleError, KnobError):
            if schedule.applies(other):
                yield schedule.space(other, device.limits), records


class Ahead:
    """Problems and contests for workloads that will be searched, made while another search waits for its trials.

    Attributes:
        problems: inputs and references.
    """

    def __init__(self) -> None:
        self.problems = Problems()
        self._contests: dict[Workload, Contest] = {}

    def prepare(self, workload: Workload, field: Field, device: Device, request: Request) -> None:
        """Make what the search of a workload will need. Raises as `open_contest` does."""
        self.problems.prepare(workload, request.verify)
        self._contests[workload] = open_contest(workload, field, device, request)

    def contest(self, workload: Workload, field: Field, device: Device, request: Request) -> Contest:
        """The contest that was prepared for a workload, for one search alone; else a new one."""
        return self._contests.pop(workload, None) or open_contest(workload, field, device, request)
