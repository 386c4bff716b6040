"""One search: propose configs, measure them, put the records on disk, learn from them, until enough is known."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from tvmconv import library, naive
from tvmconv.deadline import Deadline, earliest
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.logs.best import best
from tvmconv.logs.lines import in_one_line
from tvmconv.logs.log import Log
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.measuring.measurer import Measurer
from tvmconv.measuring.outcome import FINAL_REPEATED, FINAL_ROUNDS, FINALISTS, Measurement, together
from tvmconv.measuring.pipeline import Trial
from tvmconv.measuring.rounds import measure_rounds
from tvmconv.searching.contest import Contest
from tvmconv.searching.opening import Ahead, Field
from tvmconv.searching.recalled import without_faults
from tvmconv.searching.request import Request
from tvmconv.searching.status import Status
from tvmconv.workloads import Workload

TRIALS = 512  # where neither their number nor the time is limited
DESCENT = 0.8  # of the search, after which the neighbours of the fastest configs come first
FINAL_SECONDS, FINAL_SHARE = 2.0, 0.2  # what is kept of the time for the last timings, at most: seconds, and a share
LOADING_SECONDS = 3.0  # that have to be left for trials where libraries of a cost model are to be loaded
NAIVE_SECONDS = 0.03  # a launch of the naive schedule, above which it is not timed again beside the finalists
LONG_SECONDS = 0.11  # that a last timing takes, its warm-up included
KEPT = 8 * FINALISTS  # of the fastest records, should the first be of configs that nobody can build


class Omitted(Enum):
    """What a search left out, as there was no time left for it."""

    SEARCH = "search"
    COMPARISON = "comparison with the naive schedule"
    LAST_TIMINGS = "last timings"


@dataclass(frozen=True)
class Tuned:
    """What came of a tuning.

    Attributes:
        status: at its end; its best record is what was fastest during the search.
        final: the best record of the log by the rule of `tvmconv.logs.best`: a final timing on fresh inputs where there
            is one, else the median trial; None if nothing succeeded. Where schedules were named, only theirs count.
        phases: mean milliseconds a trial by phase, of this session; empty if it measured nothing.
        seconds: how long this session measured, from its first config to its last record.
        reference: the naive schedule's record that `final` is compared with: of the same final run where there is one,
            else its trial; None if it was not measured.
        omitted: what there was no time left for.
        built: the fastest configs, as this session built them.
    """

    status: Status
    final: Record | None
    phases: dict[str, float]
    seconds: float
    reference: Record | None = None
    omitted: frozenset[Omitted] = frozenset()
    built: Sequence[Trial] = field(default=(), repr=False)

    @property
    def speedup(self) -> float | None:
        """Time of the naive schedule over that of `final`; None where one of them is missing."""
        if self.final is None or self.reference is None or not self.reference.ok:
            return None
        return self.reference.cost / self.final.cost

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
        """Seconds a launch of `final`; `math.inf` if nothing succeeded."""
        return self.final.cost if self.final else math.inf


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
        HostError: the host or the device lets no program run; the log has no record of what failed by that.
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
    if request.confirm:
        under_way.confirm(built, phases)
    final = under_way.result()
    omitted, reference = frozenset(under_way.omitted), under_way.compared_with(final)
    return Tuned(under_way.status, final, phases, seconds, reference, omitted, built)


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
        reference = library.naive(workload)
        self._naive = None if reference and reference.name in self._schedules else reference
        self._compares = request.compare and naive.is_affordable(workload, places[0])
        self._contest: Contest | None = None
        self._unlearnt: list[Record] = []  # what came in before there was a contest
        self._log = Log(request.log)
        self._places = places
        self._known: set[tuple[str, str, str, str]] = set()  # identities of the records that were counted
        self._best_first: list[Record] = []
        self._finals: dict[tuple[str, str, str, str], Record] = {}
        self._naive_finals: list[Record] = []
        self._cut_off = request.limit
        self._num_awaited: int | None = (
            None  # configs that are waited for beyond the time; None before any is submitted
        )
        self.omitted: set[Omitted] = set()

    def recall(self) -> None:
        """Count and learn what the log has of this search, but for failures that were the environment's."""
        reference, device = library.naive(self._workload), self._places[0].name
        records = [record for record in self._log.new_records(self._workload) if record.device == device]
        self._take(without_faults(records, reference.name if reference else None), earlier=True)

    def run(self, begun: float, progress: Callable[[Status], None]) -> tuple[float, dict[str, float], list[Trial]]:
        """Search until the end; seconds of measuring, mean milliseconds a trial by phase, the fastest as built."""
        status = self.status
        start = begun - status.elapsed
        if self._request.seconds is not None:
            own = Deadline.after(self._request.seconds - status.elapsed, begun)
            self._cut_off = earliest(own.cut_off, self._request.limit)
        referring = self._compares and self._naive is not None and status.reference is None
        if self._time_is_up() or (self._ended() and not referring):
            if not status.done:
                self.omitted.add(Omitted.SEARCH)
            return 0.0, {}, []
        builders = list(self._schedules.values())
        with contextlib.ExitStack() as stack:
            measurer = Measurer(  # whose builders start while the spaces are made
                self._workload,
                [*builders, self._naive] if self._naive else builders,
                self._places,
                workers=self._request.workers,
                problem=functools.partial(self._ahead.problems.take, self._workload, self._request.verify),
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
            if not status.done:
                self.omitted.add(Omitted.SEARCH)
            elif referring and status.reference is None and self._time_is_up():
                self.omitted.add(Omitted.COMPARISON)
            return time.monotonic() - first, measurer.phases, measurer.fastest

    def _measure(self, measurer: Measurer, start: float, progress: Callable[[Status], None]) -> None:
        """Propose, measure, keep and learn until the end; `start` is when the clock of the search began to run."""
        status, exhausted = self.status, False
        while not (self._ended() or (exhausted and not measurer.pending)) or self._refers(measurer):
            if not self._ended():
                only_waits = self._num_awaited is not None and self._is_past_time()
                exhausted = only_waits or not self._submit(measurer)
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
            self._ahead.problems.prepare(self._workload, self._request.verify)
        if self._then and self._share() >= DESCENT:
            then, self._then = self._then, None
            with contextlib.suppress(Error):  # which the next search will tell
                then()

    def _refers(self, measurer: Measurer) -> bool:
        """Whether the naive schedule is still being measured, which everything is compared with."""
        wanted = self._compares and self._naive and not self.status.reference
        return bool(wanted and measurer.pending and not self._time_is_up())

    def _submit(self, measurer: Measurer) -> bool:
        """Keep the measurer busy; False if the spaces are exhausted.

        Few large requests rather than many small ones: each has the tuners train anew.
        """
        assert self._contest
        at_builders = 2 * measurer.workers  # jobs that the builders hold, and the next ones
        ahead = max(at_builders, self._contest.batch)
        room = (at_builders if self._is_past_time() else 2 * ahead) - measurer.pending
        if self.status.asked is not None:
            room = min(room, self.status.asked - self.status.done - measurer.pending)
        if measurer.pending >= ahead or room < 1:
            return True
        is_short = self._seconds_left() < LOADING_SECONDS
        proposals = self._contest.propose(room, last=self._share() >= DESCENT, quick=is_short)
        measurer.submit_trials([Trial(name, config) for name, config in proposals])
        if self._num_awaited is None:
            self._num_awaited = min(len(proposals), at_builders) if self._request.waits_for_first else 1
        return bool(proposals)

    def _take(self, records: Iterable[Record], *, earlier: bool = False) -> None:
        """Count and learn those records that belong to this search and are new to it."""
        new = []
        for record in records:
            if record.device != self._places[0].name or record.workload != self._workload:
                continue
            if record.final:
                if record.ok or record.error is ErrorKind.WRONG_ANSWER:  # what failed otherwise is timed again
                    if record.schedule in self._schedules:
                        self._finals[record.identity] = record
                    elif self._naive and record.schedule == self._naive.name and not record.config:
                        self._naive_finals.append(record)
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
            or self._time_is_up()
            or (patience is not None and status.best is not None and status.since_best >= patience)
        )

    def _seconds_left(self) -> float:
        """Return the seconds that are left for trials by the clock of the status; infinite without a limit."""
        return math.inf if self._seconds is None else self._seconds - self.status.elapsed

    def _is_past_time(self) -> bool:
        """Return whether the time for trials has passed, whatever is still waited for."""
        return self._seconds_left() <= 0

    def _time_is_up(self) -> bool:
        """Return whether the trials are over.

        Beyond their time a first config is waited for until the search is cut off, and further ones of the first
        submission as long as there is time for the last timings. Those of earlier sessions spare the wait.
        """
        done, cut_off = self.status.done, self._cut_off
        if cut_off.has_passed or not self._is_past_time() or not done:
            return cut_off.has_passed
        still_waits = not self.status.resumed and done < (self._num_awaited or 1)
        return not still_waits or cut_off.reserving(FINAL_SECONDS if self._request.confirm else 0.0).has_passed

    def result(self) -> Record | None:
        """Return the best record that the log has of this search, as every command that reads the log names it."""
        schedules = self._schedules.keys() if self._field.named else None
        return best(self._log.path, self._workload, schedules, self._places[0].name)

    def compared_with(self, result: Record | None) -> Record | None:
        """Return the naive schedule's record to compare a result with, of the same final run if possible."""
        timed = [record for record in self._naive_finals if record.ok]
        if result is None or not result.final or not timed:
            return self.status.reference
        return min(timed, key=lambda record: abs(record.timestamp - result.timestamp))

    def _naive_to_time(self) -> Trial | None:
        """Return the naive schedule's trial for the final run; None where it is not compared with, or is too slow."""
        reference = self.status.reference
        if not self._compares or reference is None or not reference.cost <= NAIVE_SECONDS:
            return None
        return Trial(reference.schedule, reference.config)

    def confirm(self, built: Sequence[Trial], phases: Mapping[str, float]) -> None:
        """Time the fastest configs once more, in turn, on fresh inputs, with nothing else going on, and log that.

        The best config of earlier final timings and the naive schedule are among them: only times of one final run
        compare well.

        Args:
            built: what this session built of them.
            phases: mean milliseconds a trial by phase: there are as many finalists as there is time for.
        """
        naive_trial = self._naive_to_time()
        is_known = bool(self._best_first) and self._best_first[0].identity in self._finals
        if is_known and (naive_trial is None or self._naive_finals):  # nothing faster was found since
            return
        if self._best_first and self._cut_off.has_passed:
            self.omitted.add(Omitted.LAST_TIMINGS)
            return
        there = {_spelt(trial): trial for trial in built}
        each = LONG_SECONDS + sum(phases.get(phase, 0.0) for phase in ("load", "verify", "time")) / 1e3
        count = min(FINALISTS, max(1, int(self._final_seconds / FINAL_ROUNDS / each)))
        left = iter([Trial(record.schedule, record.config) for record in self._best_first])
        wanted = [*itertools.islice(left, count)]
        if not wanted:
            return
        before = _fastest(self._finals.values())
        if before and all(_spelt(trial) != _spelt(before) for trial in wanted):
            wanted.append(Trial(before.schedule, before.config))
            count += 1
        names = dict.fromkeys(record.schedule for record in (*self._best_first, *self._finals.values()))
        schedules = [*map(self._schedules.__getitem__, names), *([self._naive] if naive_trial and self._naive else [])]
        absent = sum(_spelt(trial) not in there for trial in (*wanted, *([naive_trial] if naive_trial else [])))
        fresh = functools.partial(self._ahead.problems.take, self._workload, self._request.verify)
        finalists: list[Trial] = []
        with Measurer(self._workload, schedules, self._places[:1], workers=absent, problem=fresh) as measurer:
            if naive_trial and _spelt(naive_trial) not in there:
                _measure_all(measurer, [naive_trial], self._cut_off)
                there |= {_spelt(trial): trial for trial in measurer.fastest}
            while wanted:  # what a log has may be of another version, whose configs nobody can build
                missing = [trial for trial in wanted if _spelt(trial) not in there]
                if missing:
                    _measure_all(measurer, missing, self._cut_off)
                    there |= {_spelt(trial): trial for trial in measurer.fastest}
                finalists += [there[_spelt(trial)] for trial in wanted if _spelt(trial) in there]
                wanted = [] if self._cut_off.has_passed else [*itertools.islice(left, count - len(finalists))]
            finalists += [there[_spelt(trial)] for trial in [naive_trial] if trial and _spelt(trial) in there]
            timed = measure_rounds(
                finalists,
                lambda trials: _measure_all(measurer, trials, self._cut_off),
                lambda measurement: measurement.cost if measurement else math.inf,
                rounds=FINAL_ROUNDS,
                repeated=FINAL_REPEATED,
            )
        for rounds in timed:
            if measurements := [measurement for measurement in rounds.agreeing if measurement]:
                outcome = together([measurement.outcome for measurement in measurements])
                self._log.append(Record.of(replace(measurements[-1], outcome=outcome)))
        self._take(self._log.new_records(self._workload))
        too_few = self._cut_off.has_passed and len(finalists) < min(count, len(self._best_first))
        if too_few or any(None in rounds.measurements for rounds in timed):
            self.omitted.add(Omitted.LAST_TIMINGS)


def _fastest(records: Iterable[Record]) -> Record | None:
    """The fastest of those that are right; None if none is."""
    return min((record for record in records if record.ok), key=lambda record: record.cost, default=None)


def _spelt(which: Trial | Measurement | Record) -> str:
    """The same for the same config of a schedule."""
    return f"{which.schedule} {sorted(which.config.items())}"


def _measure_all(measurer: Measurer, trials: Sequence[Trial], cut_off: Deadline) -> list[Measurement | None]:
    """What came of some trials, in their order; None for those that were not measured before the cut-off."""
    found: dict[str, Measurement] = {}
    if not cut_off.has_passed:
        measurer.submit_trials(trials)
    while measurer.pending and not cut_off.has_passed:
        for measurement in measurer.results(timeout=min(1.0, cut_off.left)):
            found[_spelt(measurement)] = measurement
    return [found.get(_spelt(trial)) for trial in trials]
