"""The experiment behind `tvmconv run`: build and verify schedules of a workload, then time all of them in turn."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from tvmconv import baselines as libraries
from tvmconv import library, naive
from tvmconv.baselines.base import WrongDeviceError
from tvmconv.devices import Device, Timing
from tvmconv.errors import Error, KnobError, ScheduleError, log_traceback, reason_of
from tvmconv.experiments.results import Result, Row
from tvmconv.kernel import Kernel
from tvmconv.knobs import Config, Knob, Value
from tvmconv.knowledge.model import known_for
from tvmconv.library import Schedule
from tvmconv.logs.best import Paths
from tvmconv.logs.build import build
from tvmconv.measuring.rounds import ROUNDS, Rounds, measure_rounds
from tvmconv.untuned import build_untuned, fastest_untuned, untuned_schedules
from tvmconv.verify import Problem
from tvmconv.workloads import Conv, Workload

TUNED = "tuned"  # the name of what a log has
PREDICTED = "predicted"  # of what the model takes to be the fastest, without any trial
UNTUNED = "untuned"  # the row of the schedule that is the fastest with its default config
QUANTILES = 21

Progress = Callable[[str], None]


def run_ladder(
    workload: Workload,
    schedules: Sequence[str] | None = None,
    *,
    device: Device,
    config: Mapping[str, Value] | None = None,
    baselines: Sequence[str] = (),
    cold: bool | None = False,
    seconds: float = 0.5,
    seed: int | None = None,
    log: Paths | None = None,
    ladder: bool = True,
    predicted: bool = False,
    progress: Progress | None = None,
    prepared: Prepared | None = None,
    verify: str = "auto",
) -> Result:
    """Build, verify and time schedules of a workload, all on the same inputs.

    A schedule or library that fails is a row with the reason. A wrong kernel is not timed. All are built and verified
    first; then schedules and libraries are timed in turn, for `ROUNDS` rounds, and those whose rounds deviate by more
    than 10 % for some more (`measure_rounds`). The time of a row is that of its median round.

    Args:
        workload: what to compute.
        schedules: names; by default all that apply. The naive one is added, for the speed-ups to be over it, unless it
            would take too long (`tvmconv.naive`).
        device: where to run.
        config: values by knob name; each schedule takes those of the knobs that it has.
        baselines: libraries to time as well, of `tvmconv.baselines.known`.
        cold: time with inputs and outputs outside the cache; None for so if they exceed it.
        seconds: about how long to time each kernel, in all rounds together.
        seed: of the inputs; a fresh one by default.
        log: logs, whose fastest record for this device becomes the row `TUNED`.
        ladder: whether any schedules run; without, only what the log has and the libraries do.
        predicted: whether what the model predicts runs as well, as the row `PREDICTED`, and `UNTUNED` beside it, the
            fastest of the schedules with their default configs; where no model knows the device there are no such rows.
        progress: is told each step in a few words.
        prepared: what the other arguments ask for, made by a thread meanwhile; made here by default.
        verify: "full" to compare all outputs with float64, "sample" to compare a random sample of them, "auto" for a
            sample of convolutions above 20 GFLOP; see `tvmconv.verify`.

    Raises:
        ScheduleError: no such schedule for this workload, or not for devices of this kind.
        KnobError: no schedule has such a knob, or none that has it takes the value.
        WorkloadError: the problem does not fit in this machine's memory, or there is no such way to verify.
        WrongDeviceError: a library is not for devices of this kind.
        Error: all schedules fail for the same reason.
    """
    ready = prepared or Prepared(
        workload,
        schedules,
        device=device,
        config=config,
        seed=seed,
        log=log,
        ladder=ladder,
        predicted=predicted,
        verify=verify,
    )
    chosen = ready.schedules
    is_cold = exceeds_cache(workload, device) if cold is None else cold
    bench = _Bench(ready.problem, device, is_cold, seconds / ROUNDS)
    report = progress or (lambda step: None)
    with ExitStack() as stack:
        # Libraries first: they may not be for this device.
        compared = [bench.prepare_library(name, report, stack) for name in baselines]
        candidates: list[_Candidate] = []
        for number, schedule in enumerate(chosen, 1):
            tell = _prefixed(report, f"schedule {number} of {len(chosen)}, {schedule.name}: ")
            made = functools.partial(ready.kernel, schedule.name)
            candidates.append(_or_failed(schedule.name, functools.partial(bench.prepare, made, tell)))
        for name in ready.chosen_by_others:
            made = functools.partial(ready.kernel, name)
            candidate = _or_failed(name, functools.partial(bench.prepare, made, _prefixed(report, f"{name}: ")))
            candidates.append(replace(candidate, row=candidate.row.called(name)))
        candidates = _time_in_turn([*candidates, *compared], bench, report)
    errors = [candidate.error for candidate in candidates[: len(chosen)] if candidate.error]
    if len(errors) == len(chosen) and len({str(error) for error in errors}) == 1:
        raise errors[0]  # not a schedule's fault: too little memory, say
    rows = [candidate.row for candidate in candidates]
    if PREDICTED in ready.chosen_by_others:
        rows = with_untuned(rows, ready.at_default)
    return Result(
        workload,
        device.text,
        device.name,
        bench.problem.seed,
        _with_speedups(rows, over=library.naive(workload)),
        device.peak_flops,
        device.peak_bandwidth,
    )


class Prepared:
    """What an experiment needs before it can measure; arguments and errors are those of `run_ladder`.

    Attributes:
        schedules: that will run.
        chosen_by_others: further rows, whose schedules nobody named: of a log, of the model.
        at_default: the names of the schedules among those that run with their default config.
        problem: they are verified on.
    """

    def __init__(
        self,
        workload: Workload,
        schedules: Sequence[str] | None = None,
        *,
        device: Device,
        config: Mapping[str, Value] | None = None,
        seed: int | None = None,
        log: Paths | None = None,
        ladder: bool = True,
        predicted: bool = False,
        verify: str = "auto",
    ) -> None:
        self.schedules = choose(workload, schedules, device) if ladder else []
        configs = share_config(workload, self.schedules, config or {}, named=schedules)
        self.at_default = frozenset(name for name, own in configs.items() if not own)
        self.problem = Problem(workload, seed, mode=verify)
        self._made: dict[str, Kernel | Error] = {}
        self._makes: dict[str, Callable[[], Kernel]] = {}
        for schedule in self.schedules:
            own = configs[schedule.name]
            self._makes[schedule.name] = functools.partial(build, workload, schedule, device=device, config=own)
        others: dict[str, Callable[[], Kernel]] = {}
        if predicted and known_for(device.arch) and isinstance(workload, Conv):
            others[PREDICTED] = functools.partial(build, workload, device=device, check=False)  # others are timed now
            untuned = {schedule.name for schedule in untuned_schedules(workload, device)}
            if not untuned <= self.at_default:  # else the fastest of them is measured anyway
                others[UNTUNED] = functools.partial(build_untuned, workload, device)
        if log is not None:
            others[TUNED] = functools.partial(build, workload, device=device, log=log)
        self.chosen_by_others = [*others]
        self._makes |= others

    def kernel(self, name: str) -> Kernel:
        """The kernel of a schedule, or of the log, built when it is first asked for."""
        if name not in self._made:
            try:
                self._made[name] = self._makes[name]()
            except Error as error:
                self._made[name] = error
        made = self._made[name]
        if isinstance(made, Error):
            raise made
        return made

    def make(self) -> Prepared:
        """Itself, with inputs and reference computed, and all kernels built and compiled."""
        _ = self.problem.expected
        for name in self._makes:
            with contextlib.suppress(Error):  # which is told where the kernel is asked for
                _ = self.kernel(name).program
        return self


def with_untuned(rows: Sequence[Row], at_default: frozenset[str]) -> list[Row]:
    """The rows with one `UNTUNED`: the fastest of what ran with a default config, what was built for it included."""
    timed = {row.name: row for row in rows if row.timing and row.name in (UNTUNED, *at_default)}
    seconds = {name: row.timing.median for name, row in timed.items() if row.timing}
    if not seconds:
        return list(rows)
    fastest = timed[fastest_untuned(seconds)]
    untuned = replace(fastest, name=UNTUNED, schedule=fastest.schedule or fastest.name)
    place = 1 + next(index for index, row in enumerate(rows) if row.name == PREDICTED)
    others = [row for row in rows if row.name != UNTUNED]
    return [*others[:place], untuned, *others[place:]]


def choose(workload: Workload, names: Sequence[str] | None, device: Device) -> list[Schedule]:
    """The schedules of these names, with the naive one first; where no names are given all that run on the device.

    Where others run, a naive schedule that was not named and is not affordable is left out (`tvmconv.naive`).

    Raises:
        ScheduleError: no such schedule for this workload, or not for devices of this kind, or none at all.
    """
    there = library.schedules(workload)
    if not there:
        raise ScheduleError(f"no schedule computes {workload.operator} in {workload.dtype}")
    reference, omitted = library.naive(workload), omitted_naive(workload, names, device)
    if not names:
        chosen = [schedule for schedule in there if schedule.runs_on(device.kind, device.arch)]
        if not chosen:
            there[0].check_runs_on(device.kind, device.arch, device.text)
        kept = [schedule for schedule in chosen if schedule != omitted]
        return sorted(kept, key=lambda schedule: schedule != reference)
    wanted = [library.find(workload, name) for name in names]
    for schedule in wanted:
        schedule.check_runs_on(device.kind, device.arch, device.text)
    chosen = [schedule for schedule in there if schedule in (reference, *wanted) and schedule != omitted]
    return sorted(chosen, key=lambda schedule: schedule != reference)


def omitted_naive(workload: Workload, names: Sequence[str] | None, device: Device) -> Schedule | None:
    """Return the naive schedule if it was not named and takes too long to be compared with, else None."""
    reference = library.naive(workload)
    if reference is None or reference.name in (names or ()) or naive.is_affordable(workload, device):
        return None
    others = [each for each in library.schedules(workload) if each != reference]
    if not names and not any(each.runs_on(device.kind, device.arch) for each in others):
        return None  # there is nothing else to run
    return reference


def left_out(workload: Workload, device: Device) -> list[Schedule]:
    """The schedules that `choose` leaves out where no names are given: those that are not for the device."""
    return [schedule for schedule in library.schedules(workload) if not schedule.runs_on(device.kind, device.arch)]


def exceeds_cache(workload: Workload, device: Device) -> bool:
    """Whether inputs and output together are larger than the device's last cache; False where that is not known."""
    return device.l2_bytes is not None and workload.min_bytes > device.l2_bytes


def share_config(
    workload: Workload,
    schedules: Sequence[Schedule],
    config: Mapping[str, Value],
    *,
    named: Sequence[str] | None = None,
) -> dict[str, Config]:
    """Give each schedule the values of those knobs that it has.

    Args:
        workload: what is computed.
        schedules: those that will run.
        config: values by knob name.
        named: names of the schedules that the config is for; by default of all.

    Returns:
        A config for each schedule, by its name.

    Raises:
        KnobError: no schedule has such a knob, or none that has it takes the value.
    """
    shares: dict[str, Config] = {schedule.name: {} for schedule in schedules}
    if not config:
        return shares
    receivers = [schedule for schedule in schedules if not named or schedule.name in named]
    knobs: dict[str, Mapping[str, Knob]] = {}
    for schedule in receivers:
        try:
            knobs[schedule.name] = schedule.space(workload).knobs
        except ScheduleError:  # it fails again where it is built, and is a row with the reason
            shares[schedule.name] = dict(config)
    if not knobs:
        return shares
    there = dict.fromkeys(name for own in knobs.values() for name in own)
    for name in config:
        if name not in there:
            raise KnobError(f"no knob {name!r} in {', '.join(knobs)}; there are: {', '.join(there) or 'none'}")
    for name, own in knobs.items():
        shares[name] = {knob: value for knob, value in config.items() if knob in own}
    _check_taken(workload, [schedule for schedule in receivers if schedule.name in knobs], shares)
    return shares


def _check_taken(workload: Workload, schedules: Sequence[Schedule], shares: Mapping[str, Config]) -> None:
    """Raise the first schedule's KnobError if no schedule takes its share."""
    errors: list[KnobError] = []
    for schedule in schedules:
        if shares[schedule.name]:
            try:
                schedule.apply(workload, shares[schedule.name])
            except KnobError as error:
                errors.append(error)
            except ScheduleError:  # for which the values are not to blame
                return
            else:
                return
    if errors:
        raise errors[0]


@dataclass(frozen=True)
class _Candidate:
    """A row before it is timed.

    Attributes:
        row: what is known of it.
        time: times it for one round; None for what is not timed, as it failed or is wrong.
        error: why it failed.
    """

    row: Row
    time: Callable[[], Timing] | None = None
    error: Error | None = None


@dataclass(frozen=True)
class _Bench:
    """What all rows of an experiment have in common; `seconds` is the time of a round."""

    problem: Problem
    device: Device
    cold: bool
    seconds: float

    def prepare(self, made: Callable[[], Kernel], tell: Progress) -> _Candidate:
        """Build and verify a kernel."""
        tell("building")
        built = made()
        _ = built.loaded  # the device's own compiler is part of building, and may refuse
        resources = built.resources if self.device.arch else None
        tell("verifying")
        verification = built.verify(self.problem)
        row = Row(
            built.schedule.name,
            verified=verification.ok,
            error=verification.error,
            launch=built.launch,
            shared_bytes=built.shared_bytes,
            registers=resources.registers if resources else None,
            spills=resources.spills if resources else None,
            config=built.config,
            sampled=verification.sampled,
        )
        if not verification.ok:
            return _Candidate(replace(row, failure=f"wrong result: {verification.fault}"))
        return _Candidate(row, functools.partial(built.time, self.problem, cold=self.cold, seconds=self.seconds))

    def prepare_library(self, name: str, tell: Progress, stack: ExitStack) -> _Candidate:
        """Have a library ready to be timed, and verify it.

        Args:
            name: of the library.
            tell: is told what goes on.
            stack: frees what the library holds.

        Raises:
            WrongDeviceError: it is not for devices of this kind.
        """
        tell(f"{name}: verifying")
        workload, inputs = self.problem.workload, self.problem.inputs
        how = {"device": self.device, "cold": self.cold, "seconds": self.seconds}
        call = functools.partial(libraries.known()[name], workload, inputs, **how)
        try:
            ran = call()
        except WrongDeviceError:
            raise
        except Error as error:
            return _Candidate(Row(name, failure=str(error)), error=error)
        stack.callback(ran.close)
        row = Row(name, library=ran.text)
        if ran.output is not None:
            verification = self.problem.check(ran.output)
            row = replace(row, verified=verification.ok, error=verification.error, sampled=verification.sampled)
            if not verification.ok:
                return _Candidate(replace(row, failure=f"wrong result: {verification.fault}"))
        time_again = ran.time_again
        if time_again is None:
            return _Candidate(row, lambda: call().timing)
        return _Candidate(row, functools.partial(time_again, self.seconds))

    def timed(self, row: Row, rounds: Rounds[Timing | Error]) -> Row:
        """The row with the time of its median round."""
        timing = rounds.median
        assert isinstance(timing, Timing)
        timing = replace(timing, seconds=_thinned(timing.seconds))
        workload, device = self.problem.workload, self.device
        rate, bandwidth = workload.flops / timing.median, workload.min_bytes / timing.median
        computes = not row.library or row.verified  # a copy of as many bytes does not
        return replace(
            row,
            timing=timing,
            gflops=rate / 1e9 if computes else None,
            peak_share=rate / device.peak_flops if device.peak_flops and computes else None,
            bandwidth=bandwidth,
            bandwidth_share=bandwidth / device.peak_bandwidth if device.peak_bandwidth else None,
            rounds=_shortened(rounds.seconds),
            unstable=not rounds.is_stable,
        )


def _or_failed(name: str, prepare: Callable[[], _Candidate]) -> _Candidate:
    """What is prepared, or a row with the reason why not."""
    try:
        return prepare()
    except Error as error:
        return _Candidate(_failed(name, error), error=error)


def _time_in_turn(candidates: Sequence[_Candidate], bench: _Bench, tell: Progress) -> list[_Candidate]:
    """The candidates with their times, those that can be timed."""
    timed = [candidate for candidate in candidates if candidate.time]
    finished = 0

    def measure(wanted: Sequence[_Candidate]) -> list[Timing | Error]:
        nonlocal finished
        finished += 1
        return [_time_once(one, _prefixed(tell, f"round {finished}, ")) for one in wanted]

    found = iter(measure_rounds(timed, measure, _seconds_of))
    ended = []
    for candidate in candidates:
        if candidate.time:
            rounds = next(found)
            last = rounds.measurements[-1]
            if isinstance(last, Error):
                row = replace(candidate.row, failure=reason_of(last))
                candidate = replace(candidate, row=row, error=last)
            else:
                candidate = replace(candidate, row=bench.timed(candidate.row, rounds))
        ended.append(candidate)
    return ended


def _time_once(candidate: _Candidate, tell: Progress) -> Timing | Error:
    """The time of one round, or why there is none."""
    assert candidate.time
    tell(f"{candidate.row.name}: timing")
    try:
        return candidate.time()
    except Error as error:
        return error


def _seconds_of(measured: Timing | Error) -> float:
    return math.inf if isinstance(measured, Error) else measured.median


def _shortened(seconds: Sequence[float]) -> tuple[float, ...]:
    """Seconds to five digits, which is more than any clock here resolves."""
    return tuple(float(f"{each:.5g}") for each in seconds)


def _thinned(samples: Sequence[float]) -> tuple[float, ...]:
    """The samples, or so many of their quantiles, the median and the quartiles among them; to five digits.

    A file of results stays small.
    """
    if len(samples) > QUANTILES:
        samples = np.quantile(samples, np.linspace(0, 1, QUANTILES)).tolist()
    return _shortened(samples)


def _failed(name: str, error: Error) -> Row:
    log_traceback(error)
    return Row(name, failure=reason_of(error))


def _with_speedups(rows: Sequence[Row], over: Schedule | None) -> tuple[Row, ...]:
    reference = next((row.timing for row in rows if over and row.name == over.name), None)
    if reference is None:
        return tuple(rows)
    return tuple(replace(r, speedup=reference.median / r.timing.median) if r.timing else r for r in rows)


def _prefixed(tell: Progress, prefix: str) -> Progress:
    return lambda step: tell(prefix + step)
