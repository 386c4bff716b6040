"""One search: propose configs, measure them, put the records on disk, learn from them, until enough is known."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tvmconv import library
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.logs.lines import in_one_line
from tvmconv.logs.log import Log
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.measuring.measurer import Measurer
from tvmconv.measuring.outcome import FINAL_ROUNDS, FINALISTS, Measurement, together
from tvmconv.measuring.pipeline import Trial
from tvmconv.searching.contest import Contest
from tvmconv.searching.opening import Ahead, Field
from tvmconv.searching.request import Request
from tvmconv.searching.status import Status
from tvmconv.workloads import Workload

TRIALS = 512  # where neither their number nor the time is limited
DESCENT = 0.8  # of the search, after which the neighbours of the fastest configs come first
FINAL_SECONDS, FINAL_SHARE = 2.0, 0.15  # what is kept of the time for the last timings, at most: seconds, and a share
LONG_SECONDS = 0.15  # that a last timing takes, its warm-up included
KEPT = 8 * FINALISTS  # of the fastest records, should the first be of configs that nobody can build


@dataclass(frozen=True)
class Tuned:
    """What came of a tuning.

    Attributes:
        status: at its end; its best record is what was fastest during the search.
        final: the best record, measured once more on fresh inputs, and verified again (if that was wanted); None if
            nothing succeeded.
        phases: mean milliseconds a trial by phase, of this session; empty if it measured nothing.
        seconds: how long this session measured, from its first config to its last record.
    """

    status: Status
    final: Record | None
    phases: dict[str, float]
    seconds: float

    def __repr__(self) -> str:
        found = self.final or self.status.best
        if not found:
            return f"<Tuned nothing succeeded: {self.status}>"
        return f"<Tuned {found.workload} by {found.schedule}: {found.cost * 1e6:.4g} µs, {self.status}>"

    @property
    def stages(self) -> dict[str, float]:
        """`phases`, under the name that it had in version 0.1."""
        return self.phases

    @property
    def cost(self) -> float:
        """Seconds a launch of the best record, as measured last; `math.inf` if nothing succeeded."""
        found = self.final or self.status.best
        return found.cost if found else math.inf


def search(
    workload: Workload,
    field: Field,
    places: Sequence[Device],
    request: Request,
    progress: Callable[[Status], None],
    ahead: Ahead | None = None,
    then: Callable[[], None] | None = None,
) -> Tuned:
    """Search for the fastest config of several schedules.

    Args:
        workload: what to compute.
        field: how; the schedules' knobs make the spaces, and the device's limits bound them.
        places: devices of one architecture, to measure on.
        request: how to search, and how long.
        progress: called with the status about ten times a second.
        ahead: what an earlier search has prepared for this one.
        then: is called once, when there is time to prepare the next one.

    Raises:
        TunerError: there is no such tuner.
        TuningError: the tuner does not learn from other workloads.
        ScheduleError: a schedule is not for devices of this kind.
        DeviceError: a device is lost, or has no such dtype.
        Error: the log cannot be read or written.
        KeyboardInterrupt: the user's; the log is whole.
    """
    begun = time.monotonic() if request.begun is None else request.begun
    device = places[0]
    for schedule in field.first:
        schedule.check_runs_on(device.kind, device.arch, device.text)
    device.check_dtypes(workload.argument_dtypes)
    request.check()
    _check_writable(Path(request.log))
    under_way = _Search(workload, field, places, request, ahead or Ahead(), then)
    under_way.recall()
    seconds, phases, built = under_way.run(begun, progress)
    final = under_way.confirm(built, phases) if request.confirm else under_way.status.best
    return Tuned(under_way.status, final, phases, seconds)


def _check_writable(log: Path) -> None:
    """Raise Error if records cannot be appended, before anything is measured for nothing."""
    with in_one_line(log, "write"):
        if log.exists() and not log.is_file():  # records that a pipe or /dev/null swallows would never be counted
            raise Error(f"cannot write {log}: expected a regular file")
        log.open("ab").close()


class _Search:
    """One search: what it consists of, and how far it is."""

    def __init__(
        self,
        workload: Workload,
        field: Field,
        places: Sequence[Device],
        request: Request,
        ahead: Ahead,
        then: Callable[[], None] | None,
    ):
        trials = TRIALS if request.trials is None and request.seconds is None else request.trials
        self.status = Status(trials, request.seconds)
        self._request = request
        self._workload = workload
        self._field = field
        self._schedules = {schedule.name: schedule for schedule in (*field.first, *field.reserve)}
        self._ahead = ahead
        self._then = then
        naive = library.naive(workload)
        self._naive = None if naive and naive.name in self._schedules else naive
        self._contest: Contest | None = None
        self._unlearnt: list[Record] = []  # what came in before there was a contest
        self._log = Log(request.log)
        self._places = places
        self._known: set[tuple[str, str, str, str]] = set()  # identities of the records that were counted
        self._best_first: list[Record] = []
        self._finals: dict[tuple[str, str, str, str], Record] = {}

    def recall(self) -> None:
        """Count and learn what the log has of this search."""
        self._take(self._log.new_records(self._workload), earlier=True)

    def run(self, begun: float, progress: Callable[[Status], None]) -> tuple[float, dict[str, float], list[Trial]]:
        """Search until the end; seconds of measuring, mean milliseconds a trial by phase, the fastest as built."""
        status = self.status
        start = begun - status.elapsed
        referring = self._request.compare and self._naive is not None and status.reference is None
        if self._ended() and not referring:
            return 0.0, {}, []
        builders = list(self._schedules.values())
        with contextlib.ExitStack() as stack:
            measurer = Measurer(  # whose builders start while the spaces are made
                self._workload,
                [*builders, self._naive] if self._naive else builders,
                self._places,
                workers=self._request.workers,
                problem=self._ahead.problems.take(self._workload),
            )
            stack.enter_context(measurer)
            if referring and self._naive:
                measurer.submit([{}], self._naive.name)
            if not self._ended():
                self._contest = self._ahead.contest(self._workload, self._field, self._places[0], self._request)
                self._contest.learn(self._unlearnt)
            status.elapsed = time.monotonic() - start
            first = time.monotonic()
            self._measure(measurer, start, progress)
            return time.monotonic() - first, measurer.phases, measurer.fastest

    def _measure(self, measurer: Measurer, start: float, progress: Callable[[Status], None]) -> None:
        """Propose, measure, keep and learn until the end; `start` is when the clock of the search began to run."""
        status, exhausted = self.status, False
        while not (self._ended() or (exhausted and not measurer.pending)) or self._refers(measurer):
            if not self._ended():
                exhausted = not self._submit(measurer)
            measured = measurer.results(timeout=0.1)
            status.elapsed = time.monotonic() - start
            for measurement in measured:
                self._log.append(Record.of(measurement, status.elapsed))
            if measured:
                self._take(self._log.new_records(self._workload))
                self._prepare()
            progress(status)

    def _prepare(self) -> None:
        """Have inputs computed for the last timings, and in the end what the next search needs."""
        if self._request.confirm:
            self._ahead.problems.prepare(self._workload)
        if self._then and self._share() >= DESCENT:
            then, self._then = self._then, None
            with contextlib.suppress(Error):  # which the next search will tell
                then()

    def _refers(self, measurer: Measurer) -> bool:
        """Whether the naive schedule is still being measured, which everything is compared with."""
        return bool(self._request.compare and self._naive and not self.status.reference and measurer.pending)

    def _submit(self, measurer: Measurer) -> bool:
        """Keep the measurer busy; False if the spaces are exhausted.

        Few large requests rather than many small ones: each has the tuners train anew.
        """
        assert self._contest
        ahead = max(2 * measurer.workers, self._contest.batch)
        room = 2 * ahead - measurer.pending
        if self.status.asked is not None:
            room = min(room, self.status.asked - self.status.done - measurer.pending)
        if measurer.pending >= ahead or room < 1:
            return True
        proposals = self._contest.propose(room, last=self._share() >= DESCENT)
        measurer.submit_trials([Trial(name, config) for name, config in proposals])
        return bool(proposals)

    def _take(self, records: Iterable[Record], *, earlier: bool = False) -> None:
        """Count and learn those records that belong to this search and are new to it."""
        new = []
        for record in records:
            if record.device != self._places[0].name or record.workload != self._workload:
                continue
            if record.final:
                if record.schedule in self._schedules and (record.ok or record.error is ErrorKind.WRONG_ANSWER):
                    self._finals[record.identity] = record  # what failed for another reason is timed again
            elif self._naive and record.schedule == self._naive.name and not record.config:
                self.status.reference = record
            elif record.schedule in self._schedules and record.identity not in self._known:
                self._known.add(record.identity)
                self.status.count(record, earlier=earlier)
                new.append(record)
        self._best_first = sorted([*self._best_first, *(r for r in new if r.ok)], key=lambda r: r.cost)[:KEPT]
        if self._contest:
            self._contest.learn(new)
        else:
            self._unlearnt += new

    @property
    def _seconds(self) -> float | None:
        """How long to search, so that there is time for the last timings."""
        seconds = self._request.seconds
        if seconds is None or not self._request.confirm:
            return seconds
        return seconds - self._final_seconds

    @property
    def _final_seconds(self) -> float:
        """How long the last timings may take, about."""
        seconds = self._request.seconds
        return FINAL_SECONDS if seconds is None else min(FINAL_SECONDS, FINAL_SHARE * seconds)

    def _share(self) -> float:
        """How much of the search is done."""
        status = self.status
        by_time = status.elapsed / self._seconds if self._seconds else 0.0
        by_count = status.done / status.asked if status.asked else 0.0
        return max(by_time, by_count)

    def _ended(self) -> bool:
        status, patience = self.status, self._request.patience
        return (
            (status.asked is not None and status.done >= status.asked)
            or (self._seconds is not None and status.elapsed >= self._seconds and status.done > 0 and self._may_end())
            or (patience is not None and status.best is not None and status.since_best >= patience)
        )

    def _may_end(self) -> bool:
        """Whether the first configs, which promise most, were measured."""
        return not self._contest or self._contest.may_end

    def confirm(self, built: Sequence[Trial], phases: Mapping[str, float]) -> Record | None:
        """The fastest configs once more, in turn, on fresh inputs, with nothing else going on: the best that is right.

        Args:
            built: what this session built of them.
            phases: mean milliseconds a trial by phase: there are as many finalists as there is time for.
        """
        if self._best_first and self._best_first[0].identity in self._finals:  # nothing faster was found since
            return _fastest(self._finals.values())
        there = {_spelt(trial): trial for trial in built}
        each = LONG_SECONDS + sum(phases.get(phase, 0.0) for phase in ("load", "verify", "time")) / 1e3
        count = min(FINALISTS, max(1, int(self._final_seconds / FINAL_ROUNDS / each)))
        left = iter([Trial(record.schedule, record.config) for record in self._best_first])
        wanted = [*itertools.islice(left, count)]
        if not wanted:
            return None
        schedules = [self._schedules[name] for name in dict.fromkeys(record.schedule for record in self._best_first)]
        absent = sum(_spelt(trial) not in there for trial in wanted)
        fresh = self._ahead.problems.take(self._workload)
        finalists: list[Trial] = []
        with Measurer(self._workload, schedules, self._places[:1], workers=absent, problem=fresh) as measurer:
            while wanted:  # what a log has may be of another version, whose configs nobody can build
                missing = [trial for trial in wanted if _spelt(trial) not in there]
                if missing:
                    _measure_all(measurer, missing)
                    there |= {_spelt(trial): trial for trial in measurer.fastest}
                finalists += [there[_spelt(trial)] for trial in wanted if _spelt(trial) in there]
                wanted = [*itertools.islice(left, count - len(finalists))]
            rounds = [_measure_all(measurer, finalists) for _ in range(FINAL_ROUNDS)]
        records = []
        for measurements in zip(*rounds, strict=True):
            outcome = together([measurement.outcome for measurement in measurements])
            records.append(Record.of(replace(measurements[-1], outcome=outcome)))
            self._log.append(records[-1])
        return _fastest(records)


def _fastest(records: Iterable[Record]) -> Record | None:
    """The fastest of those that are right; None if none is."""
    return min((record for record in records if record.ok), key=lambda record: record.cost, default=None)


def _spelt(which: Trial | Measurement) -> str:
    """The same for the same config of a schedule."""
    return f"{which.schedule} {sorted(which.config.items())}"


def _measure_all(measurer: Measurer, trials: Sequence[Trial]) -> list[Measurement]:
    """What came of some trials, all of them, in their order."""
    measurer.submit_trials(trials)
    found: dict[str, Measurement] = {}
    while measurer.pending:
        for measurement in measurer.results(timeout=1.0):
            found[_spelt(measurement)] = measurement
    return [found[_spelt(trial)] for trial in trials]
