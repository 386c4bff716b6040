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

from tvmconv import naive_cost, registry
from tvmconv.deadline import Deadline, find_earliest
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.logs.lines import translate_os_errors
from tvmconv.logs.log import Log
from tvmconv.logs.ranking import find_best_record
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.measure.measurer import Measurer
from tvmconv.measure.pipeline import MeasureCandidate
from tvmconv.measure.results import (
    MAX_EXTRA_FINAL_ROUNDS,
    NUM_FINAL_ROUNDS,
    NUM_FINALISTS,
    MeasureResult,
    merge_results,
)
from tvmconv.measure.timing_rounds import measure_in_rounds
from tvmconv.search.history_filter import drop_environment_failures
from tvmconv.search.options import TuneOptions
from tvmconv.search.portfolio import PortfolioSearch
from tvmconv.search.progress import SearchProgress
from tvmconv.search.setup import ScheduleSelection, SearchPrefetcher
from tvmconv.workloads import Workload

DEFAULT_MAX_TRIALS = 512  # where neither their number nor the time is limited
LOCAL_SEARCH_START_FRACTION = 0.8  # of the search, after which the neighbours of the fastest configs come first
MAX_FINAL_SECONDS, MAX_FINAL_FRACTION = (
    2.0,
    0.2,
)  # what is kept of the time for the last timings, at most: seconds, and a share
MODEL_LOADING_SECONDS = 3.0  # that have to be left for trials where libraries of a cost model are to be loaded
MAX_NAIVE_SECONDS = 0.03  # a launch of the naive schedule, above which it is not timed again beside the finalists
FINAL_MEASUREMENT_SECONDS = 0.11  # that a last timing takes, its warm-up included
MAX_BEST_RECORDS = 8 * NUM_FINALISTS  # of the fastest records, should the first be of configs that nobody can build


class SkippedPhase(Enum):
    """What a search left out, as there was no time left for it."""

    SEARCH = "search"
    BASELINE = "comparison with the naive schedule"
    FINAL_MEASUREMENTS = "last timings"


@dataclass(frozen=True)
class TuneResult:
    """What came of a tuning.

    Attributes:
        status: at its end; its best record is what was fastest during the search.
        final: the best record of the log by the rule of `tvmconv.logs.ranking`: a final timing on fresh inputs where
            there is one, else the median trial; None if nothing succeeded. Where schedules were named, only theirs
            count.
        phases: mean milliseconds a trial by phase, of this session; empty if it measured nothing.
        seconds: how long this session measured, from its first config to its last record.
        reference: the naive schedule's record that `final` is compared with: of the same final run where there is one,
            else its trial; None if it was not measured.
        omitted: what there was no time left for.
        built: the fastest configs, as this session built them.
    """

    status: SearchProgress
    final: Record | None
    phases: dict[str, float]
    seconds: float
    reference: Record | None = None
    omitted: frozenset[SkippedPhase] = frozenset()
    built: Sequence[MeasureCandidate] = field(default=(), repr=False)

    @property
    def speedup(self) -> float | None:
        """Time of the naive schedule over that of `final`; None where one of them is missing."""
        if self.final is None or self.reference is None or not self.reference.ok:
            return None
        return self.reference.cost / self.final.cost

    def __repr__(self) -> str:
        record = self.final or self.status.best
        if not record:
            return f"<TuneResult nothing succeeded: {self.status}>"
        return f"<TuneResult {record.workload} by {record.schedule}: {record.cost * 1e6:.4g} µs, {self.status}>"

    @property
    def stages(self) -> dict[str, float]:
        """`phases`, under the name that it had in version 0.1."""
        return self.phases

    @property
    def cost(self) -> float:
        """Seconds a launch of `final`; `math.inf` if nothing succeeded."""
        return self.final.cost if self.final else math.inf


Tuned = TuneResult  # the former name


def search(
    workload: Workload,
    selection: ScheduleSelection,
    devices: Sequence[Device],
    options: TuneOptions,
    on_progress: Callable[[SearchProgress], None],
    prefetcher: SearchPrefetcher | None = None,
    prepare_next: Callable[[], None] | None = None,
) -> TuneResult:
    """Search for the fastest config of several schedules.

    Args:
        workload: what to compute.
        selection: how; the schedules' knobs make the spaces, and the device's limits bound them.
        devices: devices of one architecture, to measure on.
        options: how to search, and how long.
        on_progress: called with the status about ten times a second.
        prefetcher: what an earlier search has prepared for this one.
        prepare_next: is called once, when there is time to prepare the next one.

    Raises:
        TunerError: there is no such tuner.
        TuningError: the tuner does not learn from other workloads.
        ScheduleError: a schedule is not for devices of this kind.
        DeviceError: a device is lost, or has no such dtype.
        HostError: the host or the device lets no program run; the log has no record of what failed by that.
        Error: the log cannot be read or written.
        KeyboardInterrupt: the user's; the log is whole.
    """
    started_at = time.monotonic() if options.started_at is None else options.started_at
    device = devices[0]
    for schedule in selection.high_priority:
        schedule.check_runs_on(device.kind, device.arch, device.text)
    device.check_dtypes(workload.argument_dtypes)
    options.check_tuner()
    _check_writable(Path(options.log))
    session = _SearchSession(workload, selection, devices, options, prefetcher or SearchPrefetcher(), prepare_next)
    session.load_history()
    seconds, phases, built_candidates = session.run_trials(started_at, on_progress)
    if options.remeasure_best:
        session.remeasure_best(built_candidates, phases)
    final = session.find_result()
    skipped_phases, reference = frozenset(session.skipped_phases), session.find_reference(final)
    return TuneResult(session.progress, final, phases, seconds, reference, skipped_phases, built_candidates)


def _check_writable(log: Path) -> None:
    """Raise Error if records cannot be appended, before anything is measured for nothing."""
    with translate_os_errors(log, "write"):
        if log.exists() and not log.is_file():  # records that a pipe or /dev/null swallows would never be counted
            raise Error(f"cannot write {log}: expected a regular file")
        log.open("ab").close()


class _SearchSession:
    """One search: what it consists of, and how far it is."""

    def __init__(
        self,
        workload: Workload,
        selection: ScheduleSelection,
        devices: Sequence[Device],
        options: TuneOptions,
        prefetcher: SearchPrefetcher,
        prepare_next: Callable[[], None] | None,
    ):
        max_trials = DEFAULT_MAX_TRIALS if options.trials is None and options.seconds is None else options.trials
        self.progress = SearchProgress(max_trials, options.seconds)
        self._options = options
        self._workload = workload
        self._selection = selection
        self._schedules = {schedule.name: schedule for schedule in (*selection.high_priority, *selection.low_priority)}
        self._prefetcher = prefetcher
        self._prepare_next = prepare_next
        reference = registry.get_baseline_schedule(workload)
        self._naive_schedule = None if reference and reference.name in self._schedules else reference
        self._measures_baseline = options.measure_baseline and naive_cost.is_affordable(workload, devices[0])
        self._portfolio: PortfolioSearch | None = None
        self._untold_records: list[Record] = []  # what came in before there was a contest
        self._log = Log(options.log)
        self._devices = devices
        self._counted_identities: set[tuple[str, str, str, str]] = set()  # identities of the records that were counted
        self._best_records: list[Record] = []
        self._final_records: dict[tuple[str, str, str, str], Record] = {}
        self._naive_final_records: list[Record] = []
        self._hard_deadline = options.hard_deadline
        self._num_required_trials: int | None = (
            None  # configs that are waited for beyond the time; None before any is submitted
        )
        self.skipped_phases: set[SkippedPhase] = set()

    def load_history(self) -> None:
        """Count and learn what the log has of this search, but for failures that were the environment's."""
        reference, device = registry.get_baseline_schedule(self._workload), self._devices[0].name
        records = [record for record in self._log.new_records(self._workload) if record.device == device]
        self._count_records(drop_environment_failures(records, reference.name if reference else None), is_resumed=True)

    def run_trials(
        self, started_at: float, on_progress: Callable[[SearchProgress], None]
    ) -> tuple[float, dict[str, float], list[MeasureCandidate]]:
        """Search until the end; seconds of measuring, mean milliseconds a trial by phase, the fastest as built."""
        progress = self.progress
        clock_start = started_at - progress.elapsed_seconds
        if self._options.seconds is not None:
            own_deadline = Deadline.after(self._options.seconds - progress.elapsed_seconds, started_at)
            self._hard_deadline = find_earliest(own_deadline.cut_off, self._options.hard_deadline)
        needs_baseline = self._measures_baseline and self._naive_schedule is not None and progress.reference is None
        if self._is_time_up() or (self._can_stop() and not needs_baseline):
            if not progress.num_trials:
                self.skipped_phases.add(SkippedPhase.SEARCH)
            return 0.0, {}, []
        schedules = list(self._schedules.values())
        with contextlib.ExitStack() as stack:
            measurer = Measurer(  # whose builders start while the spaces are made
                self._workload,
                [*schedules, self._naive_schedule] if self._naive_schedule else schedules,
                self._devices,
                workers=self._options.workers,
                problem=functools.partial(self._prefetcher.problems.get, self._workload, self._options.verify),
            )
            stack.enter_context(measurer)
            if needs_baseline and self._naive_schedule:
                measurer.submit([{}], self._naive_schedule.name)
            if not self._can_stop():
                self._portfolio = self._prefetcher.pop_search(
                    self._workload, self._selection, self._devices[0], self._options
                )
                self._portfolio.tell(self._untold_records)
            progress.elapsed_seconds = time.monotonic() - clock_start
            measuring_started_at = time.monotonic()
            self._measure(measurer, clock_start, on_progress)
            if not progress.num_trials:
                self.skipped_phases.add(SkippedPhase.SEARCH)
            elif needs_baseline and progress.reference is None and self._is_time_up():
                self.skipped_phases.add(SkippedPhase.BASELINE)
            return time.monotonic() - measuring_started_at, measurer.phase_means, measurer.fastest_candidates

    def _measure(self, measurer: Measurer, clock_start: float, on_progress: Callable[[SearchProgress], None]) -> None:
        """Propose, measure, keep and learn until the end; the clock of the search runs from `clock_start`."""
        progress, is_exhausted = self.progress, False
        while not (self._can_stop() or (is_exhausted and not measurer.num_pending)) or self._is_baseline_pending(
            measurer
        ):
            if not self._can_stop():
                is_only_waiting = self._num_required_trials is not None and self._is_past_time()
                is_exhausted = is_only_waiting or not self._submit_candidates(measurer)
            measurements = measurer.collect_results(timeout=0.1)
            progress.elapsed_seconds = time.monotonic() - clock_start
            for measurement in measurements:
                self._log.append(Record.from_measurement(measurement, progress.elapsed_seconds))
            if measurements:
                self._count_records(self._log.new_records(self._workload))
                self._prefetch()
            on_progress(progress)

    def _prefetch(self) -> None:
        """Have inputs computed for the last timings, and in the end what the next search needs."""
        if self._options.remeasure_best:
            self._prefetcher.problems.prefetch(self._workload, self._options.verify)
        if self._prepare_next and self._progress_fraction() >= LOCAL_SEARCH_START_FRACTION:
            prepare_next, self._prepare_next = self._prepare_next, None
            with contextlib.suppress(Error):  # which the next search will tell
                prepare_next()

    def _is_baseline_pending(self, measurer: Measurer) -> bool:
        """Whether the naive schedule is still being measured, which everything is compared with."""
        needs_baseline = self._measures_baseline and self._naive_schedule and not self.progress.reference
        return bool(needs_baseline and measurer.num_pending and not self._is_time_up())

    def _submit_candidates(self, measurer: Measurer) -> bool:
        """Keep the measurer busy; False if the spaces are exhausted.

        Few large requests rather than many small ones: each has the tuners train anew.
        """
        assert self._portfolio
        num_builder_jobs = 2 * measurer.num_workers  # jobs that the builders hold, and the next ones
        target_pending = max(num_builder_jobs, self._portfolio.batch_size)
        num_free_slots = (num_builder_jobs if self._is_past_time() else 2 * target_pending) - measurer.num_pending
        if self.progress.max_trials is not None:
            num_free_slots = min(
                num_free_slots, self.progress.max_trials - self.progress.num_trials - measurer.num_pending
            )
        if measurer.num_pending >= target_pending or num_free_slots < 1:
            return True
        is_time_short = self._remaining_seconds() < MODEL_LOADING_SECONDS
        proposals = self._portfolio.ask(
            num_free_slots,
            is_final_phase=self._progress_fraction() >= LOCAL_SEARCH_START_FRACTION,
            skip_model=is_time_short,
        )
        measurer.submit_candidates([MeasureCandidate(name, config) for name, config in proposals])
        if self._num_required_trials is None:
            self._num_required_trials = (
                min(len(proposals), num_builder_jobs) if self._options.waits_for_first_trials else 1
            )
        return bool(proposals)

    def _count_records(self, records: Iterable[Record], *, is_resumed: bool = False) -> None:
        """Count and learn those records that belong to this search and are new to it."""
        new_records = []
        for record in records:
            if record.device != self._devices[0].name or record.workload != self._workload:
                continue
            if record.final:
                if record.ok or record.error is ErrorKind.WRONG_ANSWER:  # what failed otherwise is timed again
                    if record.schedule in self._schedules:
                        self._final_records[record.identity] = record
                    elif self._naive_schedule and record.schedule == self._naive_schedule.name and not record.config:
                        self._naive_final_records.append(record)
            elif self._naive_schedule and record.schedule == self._naive_schedule.name and not record.config:
                self.progress.reference = record
            elif record.schedule in self._schedules and record.identity not in self._counted_identities:
                self._counted_identities.add(record.identity)
                self.progress.count_record(record, is_resumed=is_resumed)
                new_records.append(record)
        self._best_records = sorted(
            [*self._best_records, *(valid_record for valid_record in new_records if valid_record.ok)],
            key=lambda valid_record: valid_record.cost,
        )[:MAX_BEST_RECORDS]
        if self._portfolio:
            self._portfolio.tell(new_records)
        else:
            self._untold_records += new_records

    @property
    def _search_seconds(self) -> float | None:
        """How long to search, so that there is time for the last timings."""
        seconds = self._options.seconds
        if seconds is None or not self._options.remeasure_best:
            return seconds
        return seconds - self._final_seconds

    @property
    def _final_seconds(self) -> float:
        """How long the last timings may take, about."""
        seconds = self._options.seconds
        return MAX_FINAL_SECONDS if seconds is None else min(MAX_FINAL_SECONDS, MAX_FINAL_FRACTION * seconds)

    def _progress_fraction(self) -> float:
        """How much of the search is done."""
        progress = self.progress
        time_fraction = progress.elapsed_seconds / self._search_seconds if self._search_seconds else 0.0
        trial_fraction = progress.num_trials / progress.max_trials if progress.max_trials else 0.0
        return max(time_fraction, trial_fraction)

    def _can_stop(self) -> bool:
        progress, patience = self.progress, self._options.patience
        return (
            (progress.max_trials is not None and progress.num_trials >= progress.max_trials)
            or self._is_time_up()
            or (patience is not None and progress.best is not None and progress.trials_since_best >= patience)
        )

    def _remaining_seconds(self) -> float:
        """Return the seconds that are left for trials by the clock of the status; infinite without a limit."""
        return math.inf if self._search_seconds is None else self._search_seconds - self.progress.elapsed_seconds

    def _is_past_time(self) -> bool:
        """Return whether the time for trials has passed, whatever is still waited for."""
        return self._remaining_seconds() <= 0

    def _is_time_up(self) -> bool:
        """Return whether the trials are over.

        Beyond their time a first config is waited for until the search is cut off, and further ones of the first
        submission as long as there is time for the last timings. Those of earlier sessions spare the wait.
        """
        num_trials, hard_deadline = self.progress.num_trials, self._hard_deadline
        if hard_deadline.has_passed or not self._is_past_time() or not num_trials:
            return hard_deadline.has_passed
        is_still_waiting = not self.progress.num_resumed and num_trials < (self._num_required_trials or 1)
        return (
            not is_still_waiting
            or hard_deadline.reserve_seconds(MAX_FINAL_SECONDS if self._options.remeasure_best else 0.0).has_passed
        )

    def find_result(self) -> Record | None:
        """Return the best record that the log has of this search, as every command that reads the log names it."""
        schedule_names = self._schedules.keys() if self._selection.is_explicit else None
        return find_best_record(self._log.path, self._workload, schedule_names, self._devices[0].name)

    def find_reference(self, result: Record | None) -> Record | None:
        """Return the naive schedule's record to compare a result with, of the same final run if possible."""
        timed_records = [record for record in self._naive_final_records if record.ok]
        if result is None or not result.final or not timed_records:
            return self.progress.reference
        return min(timed_records, key=lambda record: abs(record.timestamp - result.timestamp))

    def _make_naive_trial(self) -> MeasureCandidate | None:
        """Return the naive schedule's trial for the final run; None where it is not compared with, or is too slow."""
        reference = self.progress.reference
        if not self._measures_baseline or reference is None or not reference.cost <= MAX_NAIVE_SECONDS:
            return None
        return MeasureCandidate(reference.schedule, reference.config)

    def remeasure_best(self, built_candidates: Sequence[MeasureCandidate], phases: Mapping[str, float]) -> None:
        """Time the fastest configs once more, in turn, on fresh inputs, with nothing else going on, and log that.

        The best config of earlier final timings and the naive schedule are among them: only times of one final run
        compare well.

        Args:
            built_candidates: what this session built of them.
            phases: mean milliseconds a trial by phase: there are as many finalists as there is time for.
        """
        naive_trial = self._make_naive_trial()
        is_already_measured = bool(self._best_records) and self._best_records[0].identity in self._final_records
        if is_already_measured and (naive_trial is None or self._naive_final_records):  # nothing faster was found since
            return
        if self._best_records and self._hard_deadline.has_passed:
            self.skipped_phases.add(SkippedPhase.FINAL_MEASUREMENTS)
            return
        built_by_key = {_config_key(trial): trial for trial in built_candidates}
        seconds_per_finalist = (
            FINAL_MEASUREMENT_SECONDS + sum(phases.get(phase, 0.0) for phase in ("load", "verify", "time")) / 1e3
        )
        count = min(NUM_FINALISTS, max(1, int(self._final_seconds / NUM_FINAL_ROUNDS / seconds_per_finalist)))
        remaining_trials = iter([MeasureCandidate(record.schedule, record.config) for record in self._best_records])
        pending_trials = [*itertools.islice(remaining_trials, count)]
        if not pending_trials:
            return
        previous_best = _fastest_valid_record(self._final_records.values())
        if previous_best and all(_config_key(trial) != _config_key(previous_best) for trial in pending_trials):
            pending_trials.append(MeasureCandidate(previous_best.schedule, previous_best.config))
            count += 1
        names = dict.fromkeys(record.schedule for record in (*self._best_records, *self._final_records.values()))
        schedules = [
            *map(self._schedules.__getitem__, names),
            *([self._naive_schedule] if naive_trial and self._naive_schedule else []),
        ]
        num_unbuilt = sum(
            _config_key(trial) not in built_by_key
            for trial in (*pending_trials, *([naive_trial] if naive_trial else []))
        )
        take_problem = functools.partial(self._prefetcher.problems.get, self._workload, self._options.verify)
        finalists: list[MeasureCandidate] = []
        with Measurer(
            self._workload, schedules, self._devices[:1], workers=num_unbuilt, problem=take_problem
        ) as measurer:
            if naive_trial and _config_key(naive_trial) not in built_by_key:
                _measure_all(measurer, [naive_trial], self._hard_deadline)
                built_by_key |= {_config_key(trial): trial for trial in measurer.fastest_candidates}
            while pending_trials:  # what a log has may be of another version, whose configs nobody can build
                unbuilt_trials = [trial for trial in pending_trials if _config_key(trial) not in built_by_key]
                if unbuilt_trials:
                    _measure_all(measurer, unbuilt_trials, self._hard_deadline)
                    built_by_key |= {_config_key(trial): trial for trial in measurer.fastest_candidates}
                finalists += [
                    built_by_key[_config_key(trial)] for trial in pending_trials if _config_key(trial) in built_by_key
                ]
                pending_trials = (
                    []
                    if self._hard_deadline.has_passed
                    else [*itertools.islice(remaining_trials, count - len(finalists))]
                )
            finalists += [
                built_by_key[_config_key(trial)]
                for trial in [naive_trial]
                if trial and _config_key(trial) in built_by_key
            ]
            finalist_rounds = measure_in_rounds(
                finalists,
                lambda trials: _measure_all(measurer, trials, self._hard_deadline),
                lambda measurement: measurement.cost if measurement else math.inf,
                num_rounds=NUM_FINAL_ROUNDS,
                max_extra_rounds=MAX_EXTRA_FINAL_ROUNDS,
            )
        for rounds in finalist_rounds:
            if measurements := [measurement for measurement in rounds.agreeing_measurements if measurement]:
                outcome = merge_results([measurement.runner_result for measurement in measurements])
                self._log.append(Record.from_measurement(replace(measurements[-1], runner_result=outcome)))
        self._count_records(self._log.new_records(self._workload))
        has_too_few = self._hard_deadline.has_passed and len(finalists) < min(count, len(self._best_records))
        if has_too_few or any(None in rounds.measurements for rounds in finalist_rounds):
            self.skipped_phases.add(SkippedPhase.FINAL_MEASUREMENTS)


def _fastest_valid_record(records: Iterable[Record]) -> Record | None:
    """The fastest of those that are right; None if none is."""
    return min((record for record in records if record.ok), key=lambda record: record.cost, default=None)


def _config_key(candidate: MeasureCandidate | MeasureResult | Record) -> str:
    """The same for the same config of a schedule."""
    return f"{candidate.schedule} {sorted(candidate.config.items())}"


def _measure_all(
    measurer: Measurer, trials: Sequence[MeasureCandidate], hard_deadline: Deadline
) -> list[MeasureResult | None]:
    """What came of some trials, in their order; None for those that were not measured before the cut-off."""
    measurements: dict[str, MeasureResult] = {}
    if not hard_deadline.has_passed:
        measurer.submit_candidates(trials)
    while measurer.num_pending and not hard_deadline.has_passed:
        for measurement in measurer.collect_results(timeout=min(1.0, hard_deadline.remaining_seconds)):
            measurements[_config_key(measurement)] = measurement
    return [measurements.get(_config_key(trial)) for trial in trials]
