"""One search: propose configs, measure them, append the records to the log, and update the tuners, until the end."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tvmconv import naive_cost, registry
from tvmconv.arithmetic import ceil_div
from tvmconv.deadline import Deadline, find_earliest
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.logs.lines import translate_os_errors
from tvmconv.logs.log import Log
from tvmconv.logs.ranking import find_best_record
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.measure import faults
from tvmconv.measure.builder import START_SECONDS
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
from tvmconv.measure.workers import pool
from tvmconv.search.options import TuneOptions
from tvmconv.search.portfolio import PortfolioSearch
from tvmconv.search.progress import SearchProgress
from tvmconv.search.result import SkippedPhase, TuneResult
from tvmconv.search.setup import ScheduleSelection, SearchPrefetcher
from tvmconv.workloads import Workload

DEFAULT_MAX_TRIALS = 512  # limit of trials if neither trials nor seconds are limited by the caller
LOCAL_SEARCH_START_FRACTION = 0.8  # fraction of the search after which neighbours of the fastest configs come first
MAX_FINAL_SECONDS = 2.0  # upper limit of the time that is reserved for final timings
MAX_FINAL_FRACTION = 0.2  # upper limit of the same time as a fraction of the time limit
MODEL_LOADING_SECONDS = 3.0  # a tuner loads the libraries of its cost model only if this much time remains
MAX_NAIVE_SECONDS = 0.03  # longest launch of the naive schedule with which it is timed again together with finalists
# A search that is cut off without any config was for nothing: on a busy machine, the processes may start that slowly.
EXTRA_FIRST_TRIAL_SECONDS = 30.0
FINAL_MEASUREMENT_SECONDS = 0.11  # time of one final timing, its warm-up included
MIN_FINALISTS = 3  # finalists for which there is always time
FINALIST_RATIO = 1.15  # largest time of a finalist that is preferred for its other resources, relative to the fastest
MAX_BEST_RECORDS = 8 * NUM_FINALISTS  # number of fastest records that are kept, as some may no longer build


def search(
    workload: Workload,
    selection: ScheduleSelection,
    devices: Sequence[Device],
    options: TuneOptions,
    on_progress: Callable[[SearchProgress], None],
    prefetcher: SearchPrefetcher | None = None,
    prepare_next: Callable[[], None] | None = None,
) -> TuneResult:
    """Search for the fastest config of several schedules. `prepare_next` prepares the next search; it is called once,
    while this search waits for trials.
    """
    started_at = time.monotonic() if options.started_at is None else options.started_at
    device = devices[0]
    for schedule in selection.high_priority:
        schedule.check_runs_on(device.kind, device.arch, device.text)
    device.check_dtypes(workload.argument_dtypes)
    options.check_tuner()
    check_writable(Path(options.log))
    session = _SearchSession(workload, selection, devices, options, prefetcher or SearchPrefetcher(), prepare_next)
    session.load_history()
    seconds, phases, built_candidates = session.run_trials(started_at, on_progress)
    if options.remeasure_best:
        session.remeasure_best(built_candidates, phases)
    final = session.find_result()
    skipped_phases, reference = frozenset(session.skipped_phases), session.find_reference(final)
    return TuneResult(session.progress, final, phases, seconds, reference, skipped_phases, built_candidates)


def check_writable(log: Path) -> None:
    """Raise Error if records cannot be appended to the log, before any config is measured."""
    with translate_os_errors(log, "write"):
        if log.exists() and not log.is_file():  # records in a pipe or in /dev/null could not be read again
            raise Error(f"cannot write {log}: expected a regular file")
        if log.exists():
            log.open("ab").close()
        else:  # a search that is refused or interrupted before its first record leaves no empty log behind
            tempfile.TemporaryFile(dir=log.parent).close()


class _SearchSession:
    """The state of one search."""

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
        seconds = options.seconds  # in all, of which the last ones are for the final timings
        self._final_seconds = (
            MAX_FINAL_SECONDS if seconds is None else min(MAX_FINAL_SECONDS, MAX_FINAL_FRACTION * seconds)
        )
        self._search_seconds = seconds
        if seconds is not None and options.remeasure_best:
            self._search_seconds = seconds - self._final_seconds
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
        self._untold_records: list[Record] = []  # records that arrived before the portfolio was created
        self._log = Log(options.log)
        self._devices = devices
        self._counted_identities: set[tuple[str, str, str, str]] = set()
        self._best_records: list[Record] = []
        self._final_records: dict[tuple[str, str, str, str], Record] = {}
        self._naive_final_records: list[Record] = []
        self._hard_deadline = self._first_trial_deadline = options.hard_deadline
        self._num_required_trials: int | None = None  # trials to wait for beyond the time; None before the first
        self.skipped_phases: set[SkippedPhase] = set()

    def load_history(self) -> None:
        """Count and learn the log's records of this search, without failures that the environment caused."""
        reference, device = registry.get_baseline_schedule(self._workload), self._devices[0].name
        records = [record for record in self._log.new_records(self._workload) if record.device == device]
        self._count_records(drop_environment_failures(records, reference.name if reference else None), is_resumed=True)

    def run_trials(
        self, started_at: float, on_progress: Callable[[SearchProgress], None]
    ) -> tuple[float, dict[str, float], list[MeasureCandidate]]:
        """Search until the end. Return the seconds of measuring, mean milliseconds per trial of each phase, and the
        fastest configs with their kernels.
        """
        progress = self.progress
        clock_start = self._start_clock(started_at)
        needs_baseline = self._measures_baseline and self._naive_schedule is not None and progress.reference is None
        if self._is_time_up() or (self._can_stop() and not needs_baseline):
            if not progress.num_trials:
                self.skipped_phases.add(SkippedPhase.SEARCH)
            return 0.0, {}, []
        if self._options.counts_from_ready_workers:
            self._create_portfolio()
            pool.shared.wait_for_worker(pool.BUILDER_MODULE, START_SECONDS)
            clock_start = self._start_clock(time.monotonic())
        schedules = list(self._schedules.values())
        with contextlib.ExitStack() as stack:
            measurer = Measurer(  # its builders start while the search spaces are created
                self._workload,
                [*schedules, self._naive_schedule] if self._naive_schedule else schedules,
                self._devices,
                workers=self._options.workers,
                problem=functools.partial(self._prefetcher.problems.get, self._workload, self._options.verify),
            )
            stack.enter_context(measurer)
            if needs_baseline and self._naive_schedule:
                measurer.submit([{}], self._naive_schedule.name)
            self._create_portfolio()
            progress.elapsed_seconds = time.monotonic() - clock_start
            measuring_started_at = time.monotonic()
            self._measure(measurer, clock_start, on_progress)
            if not progress.num_trials:
                self.skipped_phases.add(SkippedPhase.SEARCH)
            elif needs_baseline and progress.reference is None and self._is_time_up():
                self.skipped_phases.add(SkippedPhase.BASELINE)
            return time.monotonic() - measuring_started_at, measurer.phase_means, measurer.fastest_candidates

    def _start_clock(self, started_at: float) -> float:
        """Set the deadline of a search that begins at `started_at`, by `time.monotonic`. Return the time at which it
        would have begun without interruptions.
        """
        elapsed_seconds = self.progress.elapsed_seconds
        if self._options.seconds is not None:
            own_deadline = Deadline.after(self._options.seconds - elapsed_seconds, started_at)
            self._hard_deadline = find_earliest(own_deadline.cut_off, self._options.hard_deadline)
            extended_deadline = Deadline(own_deadline.cut_off.end_time + EXTRA_FIRST_TRIAL_SECONDS)
            self._first_trial_deadline = find_earliest(extended_deadline, self._options.hard_deadline)
        return started_at - elapsed_seconds

    def _create_portfolio(self) -> None:
        """Create the search spaces and tuners, if any trial remains and they do not exist."""
        if self._portfolio is None and not self._can_stop():
            self._portfolio = self._prefetcher.pop_search(
                self._workload, self._selection, self._devices[0], self._options
            )
            self._portfolio.tell(self._untold_records)

    def _measure(self, measurer: Measurer, clock_start: float, on_progress: Callable[[SearchProgress], None]) -> None:
        """Propose, measure, log and learn until the end; `clock_start` is the time at which the search began."""
        progress, is_exhausted = self.progress, False
        while self._is_baseline_pending(measurer) or not (
            self._can_stop() or (is_exhausted and not measurer.num_pending)
        ):
            if not self._can_stop():
                is_only_waiting = self._num_required_trials is not None and self._is_past_time()
                is_exhausted = is_only_waiting or not self._submit_candidates(measurer)
            if self._collect_results(measurer, clock_start, timeout=0.1):
                self._prefetch()
            on_progress(progress)
        if progress.max_trials is None and self._collect_results(measurer, clock_start, timeout=0):
            on_progress(progress)  # of trials that ended while the search was busy

    def _collect_results(self, measurer: Measurer, clock_start: float, timeout: float) -> bool:
        """Log and learn the results since the last call, and return whether there are any."""
        measurements = measurer.collect_results(timeout=timeout)
        self.progress.elapsed_seconds = time.monotonic() - clock_start
        for measurement in measurements:
            self._log.append(Record.from_measurement(measurement, self.progress.elapsed_seconds))
        if measurements:
            self._count_records(self._log.new_records(self._workload))
        return bool(measurements)

    def _prefetch(self) -> None:
        """Start computing the inputs of the final timings, and towards the end prepare the next search, which may take
        so long that it begins after the first trials.
        """
        if self._options.remeasure_best:
            self._prefetcher.problems.prefetch(self._workload, self._options.verify)
        has_first_trials = self.progress.num_trials >= (self._num_required_trials or 1)
        if self._prepare_next and has_first_trials and self._progress_fraction() >= LOCAL_SEARCH_START_FRACTION:
            prepare_next, self._prepare_next = self._prepare_next, None
            with contextlib.suppress(Error):  # the next search raises the error again
                prepare_next()

    def _is_baseline_pending(self, measurer: Measurer) -> bool:
        """Return whether the naive schedule, the reference of speed-ups, is still being measured."""
        needs_baseline = self._measures_baseline and self._naive_schedule and not self.progress.reference
        return bool(needs_baseline and measurer.num_pending and not self._is_time_up())

    def _submit_candidates(self, measurer: Measurer) -> bool:
        """Keep the measurer busy, and return False if the search spaces are exhausted. The search asks for few large
        batches, because the tuners train their models again for each of them.
        """
        assert self._portfolio
        num_builder_jobs = 2 * measurer.num_workers  # one running and one queued job per builder
        target_pending = max(num_builder_jobs, self._portfolio.batch_size)
        num_free_slots = (num_builder_jobs if self._is_past_time() else 2 * target_pending) - measurer.num_pending
        if self.progress.max_trials is not None:
            num_remaining = self.progress.max_trials - self.progress.num_trials - measurer.num_pending
            num_free_slots = min(num_free_slots, num_remaining)
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
            num_first_trials = ceil_div(measurer.num_workers, 2)  # of the fastest builds, one job for each builder
            self._num_required_trials = num_builder_jobs if self._options.waits_for_first_trials else num_first_trials
        return bool(proposals)

    def _count_records(self, records: Iterable[Record], *, is_resumed: bool = False) -> None:
        """Count and learn the records that belong to this search and are new to it."""
        new_records = []
        for record in records:
            if record.device != self._devices[0].name or record.workload != self._workload:
                continue
            if record.final:
                if record.ok or record.error is ErrorKind.WRONG_ANSWER:  # configs with other errors are timed again
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
        valid_records = [*self._best_records, *(record for record in new_records if record.ok)]
        self._best_records = sorted(valid_records, key=lambda record: record.cost)[:MAX_BEST_RECORDS]
        if self._portfolio:
            self._portfolio.tell(new_records)
        else:
            self._untold_records += new_records

    def _progress_fraction(self) -> float:
        """Return the fraction of the search that is done."""
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
        """Return the remaining seconds for trials by the clock of the status; infinite without a limit."""
        return math.inf if self._search_seconds is None else self._search_seconds - self.progress.elapsed_seconds

    def _is_past_time(self) -> bool:
        """Return whether the time limit of the trials has passed."""
        return self._remaining_seconds() <= 0

    def _is_time_up(self) -> bool:
        """Return whether the trials are over. Beyond the time limit, the search waits for the first config until it is
        cut off, which is later than with a config, and for other configs of the first submission as long as time
        remains for the final timings. With trials of earlier sessions it does not wait.
        """
        num_trials = self.progress.num_trials
        hard_deadline = self._hard_deadline if num_trials else self._first_trial_deadline
        if hard_deadline.has_passed or not self._is_past_time() or not num_trials:
            return hard_deadline.has_passed
        is_still_waiting = not self.progress.num_resumed and num_trials < (self._num_required_trials or 1)
        return (
            not is_still_waiting
            or hard_deadline.reserve_seconds(MAX_FINAL_SECONDS if self._options.remeasure_best else 0.0).has_passed
        )

    def find_result(self) -> Record | None:
        """Return the best record of this search in the log, by the rule that all commands use."""
        if not self._log.path.exists():  # nothing was recorded
            return None
        schedule_names = self._schedules.keys() if self._selection.is_explicit else None
        return find_best_record(self._log.path, self._workload, schedule_names, self._devices[0].name)

    def find_reference(self, result: Record | None) -> Record | None:
        """Return the record of the naive schedule to compare a result with, of the same final run if possible."""
        timed_records = [record for record in self._naive_final_records if record.ok]
        if result is None or not result.final or not timed_records:
            return self.progress.reference
        return min(timed_records, key=lambda record: abs(record.timestamp - result.timestamp))

    def remeasure_best(self, built_candidates: Sequence[MeasureCandidate], phases: Mapping[str, float]) -> None:
        """Time the fastest configs again, in turn, on fresh inputs, while no other work runs, and log the results. The
        finalists include the best config of earlier final timings and the naive schedule, because only times of one
        final run are comparable. The mean milliseconds of each phase decide how many finalists there is time for.
        """
        reference, naive_trial = self.progress.reference, None
        if self._measures_baseline and reference and reference.cost <= MAX_NAIVE_SECONDS:
            naive_trial = MeasureCandidate(reference.schedule, reference.config)
        is_already_measured = bool(self._best_records) and self._best_records[0].identity in self._final_records
        if is_already_measured and (naive_trial is None or self._naive_final_records):
            return
        if self._best_records and self._hard_deadline.has_passed:
            self.skipped_phases.add(SkippedPhase.FINAL_MEASUREMENTS)
            return
        built_by_key = {_config_key(trial): trial for trial in built_candidates}
        trial_milliseconds = sum(phases.get(phase, 0.0) for phase in ("load", "verify", "time"))
        seconds_per_finalist = FINAL_MEASUREMENT_SECONDS + trial_milliseconds / 1e3
        count = int(self._final_seconds / NUM_FINAL_ROUNDS / seconds_per_finalist)
        count = min(self._options.max_finalists, max(MIN_FINALISTS, count))
        ordered_records = order_finalists(self._best_records, built_by_key.keys())
        remaining_trials = iter([MeasureCandidate(record.schedule, record.config) for record in ordered_records])
        pending_trials = [*itertools.islice(remaining_trials, count)]
        if not pending_trials:
            return
        valid_finals = (record for record in self._final_records.values() if record.ok)
        previous_best = min(valid_finals, key=lambda record: record.cost, default=None)
        if previous_best and all(_config_key(trial) != _config_key(previous_best) for trial in pending_trials):
            pending_trials.append(MeasureCandidate(previous_best.schedule, previous_best.config))
            count += 1
        names = dict.fromkeys(record.schedule for record in (*self._best_records, *self._final_records.values()))
        schedules = [self._schedules[name] for name in names]
        if naive_trial and self._naive_schedule:
            schedules.append(self._naive_schedule)
        first_trials = [*pending_trials, *([naive_trial] if naive_trial else [])]
        num_unbuilt = sum(_config_key(trial) not in built_by_key for trial in first_trials)
        problem = functools.partial(self._prefetcher.problems.get, self._workload, self._options.verify)
        finalists: list[MeasureCandidate] = []
        with Measurer(self._workload, schedules, self._devices[:1], workers=num_unbuilt, problem=problem) as measurer:
            if naive_trial and _config_key(naive_trial) not in built_by_key:
                _measure_all(measurer, [naive_trial], self._hard_deadline)
                built_by_key |= {_config_key(trial): trial for trial in measurer.fastest_candidates}
            while pending_trials:  # configs that an older version logged may no longer build
                unbuilt_trials = [trial for trial in pending_trials if _config_key(trial) not in built_by_key]
                if unbuilt_trials:
                    _measure_all(measurer, unbuilt_trials, self._hard_deadline)
                    built_by_key |= {_config_key(trial): trial for trial in measurer.fastest_candidates}
                finalists += [built_by_key[key] for key in map(_config_key, pending_trials) if key in built_by_key]
                num_missing = 0 if self._hard_deadline.has_passed else count - len(finalists)
                pending_trials = [*itertools.islice(remaining_trials, num_missing)]
            if naive_trial and _config_key(naive_trial) in built_by_key:
                finalists.append(built_by_key[_config_key(naive_trial)])
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


def order_finalists(records: Sequence[Record], built_keys: Collection[str]) -> list[Record]:
    """Return the fastest records in the order in which they are timed again.

    Those within `FINALIST_RATIO` of the fastest that take other resources than all faster ones come first: a kernel
    that draws much power may be the fastest in short trials alone, and its neighbours are alike. If any is built,
    only built ones are preferred.
    """
    leaders: dict[str, Record] = {}
    for record in records:
        is_available = record is records[0] or not built_keys or _config_key(record) in built_keys
        if is_available and record.cost <= FINALIST_RATIO * records[0].cost:
            leaders.setdefault(f"{record.schedule} {sorted(record.resources.items())}", record)
    preferred = {id(record) for record in leaders.values()}
    return sorted(records, key=lambda record: id(record) not in preferred)


def _config_key(candidate: MeasureCandidate | MeasureResult | Record) -> str:
    """Return a text that identifies a schedule and a config."""
    return f"{candidate.schedule} {sorted(candidate.config.items())}"


def _measure_all(
    measurer: Measurer, trials: Sequence[MeasureCandidate], hard_deadline: Deadline
) -> list[MeasureResult | None]:
    """Measure candidates, and return their results in order; None for those not measured before the deadline."""
    measurements: dict[str, MeasureResult] = {}
    if not hard_deadline.has_passed:
        measurer.submit_candidates(trials)
    while measurer.num_pending and not hard_deadline.has_passed:
        for measurement in measurer.collect_results(timeout=min(1.0, hard_deadline.remaining_seconds)):
            measurements[_config_key(measurement)] = measurement
    return [measurements.get(_config_key(trial)) for trial in trials]


def drop_environment_failures(records: Sequence[Record], naive_name: str | None) -> list[Record]:
    """Return the records without failures that the host or the device caused, so that their configs are tried again. A
    failure is left out if its message names the environment, or if it is part of a streak in which even the naive
    schedule failed, which is correct on every device. If the log has other records, a lone failure of the naive
    schedule does not prove that. The records are those of one workload on one device, in the order of the log.
    """
    kept_records: list[Record] = []
    for ok, group in itertools.groupby(records, key=lambda record: record.ok):
        streak = list(group)
        suspects = [] if ok else [record for record in streak if faults.is_doubtful(record.error, record.message)]
        has_naive_failure = any(record.schedule == naive_name for record in suspects)
        has_other_failure = any(record.schedule != naive_name for record in suspects)
        is_environment_fault = has_naive_failure and (has_other_failure or len(streak) == len(records))
        dropped = {id(each) for each in suspects if is_environment_fault or faults.is_environment_fault(each.message)}
        kept_records += [record for record in streak if id(record) not in dropped]
    return kept_records
