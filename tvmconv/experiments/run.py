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
from tvmconv import compat, naive_cost, registry
from tvmconv.baselines.base import UnsupportedDeviceError
from tvmconv.cost_model.model import cost_model_for
from tvmconv.default_kernel import build_fastest_default, default_candidate_schedules, fastest_default_name
from tvmconv.devices import Device, Timing
from tvmconv.errors import Error, KnobError, ScheduleError, get_reason, log_traceback
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.kernel import Kernel
from tvmconv.logs.build import build
from tvmconv.logs.ranking import LogPaths
from tvmconv.measure.timing_rounds import NUM_ROUNDS, TimingRounds, measure_in_rounds
from tvmconv.registry import Schedule
from tvmconv.space import Config, Knob, Value
from tvmconv.verification import Problem
from tvmconv.workloads import Conv, Workload

TUNED = "tuned"  # name of the row of a log's best record
PREDICTED = "predicted"  # name of the row of the cost model's prediction
UNTUNED = "untuned"  # name of the row of the fastest default config
NUM_QUANTILES = 21

ProgressCallback = Callable[[str], None]


def run_schedules(
    workload: Workload,
    schedules: Sequence[str] | None = None,
    *,
    device: Device,
    config: Mapping[str, Value] | None = None,
    baselines: Sequence[str] = (),
    cold: bool | None = False,
    seconds: float = 0.5,
    seed: int | None = None,
    log: LogPaths | None = None,
    ladder: bool = True,
    predicted: bool = False,
    progress: ProgressCallback | None = None,
    prepared: PreparedExperiment | None = None,
    verify: str = "auto",
) -> Result:
    """Build, verify and time schedules of a workload on the same inputs.

    All kernels are built and verified first. Then schedules and libraries are timed in turn for `NUM_ROUNDS` rounds,
    and for further rounds if these deviate by more than 10 % (`measure_in_rounds`). The time of a row is that of its
    median round. A schedule or library that fails gets a row with the reason, and a wrong kernel is not timed.

    Args:
        workload: Workload to compute.
        schedules: Names of schedules (default: all that apply). The naive schedule is added as the reference of
            speed-ups, unless it would take too long (`tvmconv.naive_cost`).
        device: Device to run on.
        config: Values by knob name. Each schedule takes the values of its own knobs.
        baselines: Names of libraries to time as well, keys of `tvmconv.baselines.load_baselines`.
        cold: Whether inputs and outputs are outside the cache when a kernel is timed; None for only if they exceed it.
        seconds: Approximate time for timing each kernel, in all rounds together.
        seed: Seed of the inputs (default: a new one).
        log: Logs whose fastest record for this device becomes the row `TUNED`.
        ladder: Whether schedules run; otherwise only the record of the log, the prediction and the libraries run.
        predicted: Whether the cost model's prediction runs as the row `PREDICTED`, followed by the row `UNTUNED` of the
            fastest default config. If the cost model does not cover the device, there are no such rows.
        progress: Function that is called with a short text at each step.
        prepared: Experiment that a thread has prepared with the same arguments (default: prepared by this call).
        verify: Outputs that are compared with float64 results: "full" for all, "sample" for a random sample, "auto" for
            a sample of convolutions above 20 GFLOP; see `tvmconv.verification`.

    Returns:
        The rows of the schedules and libraries.

    Raises:
        ScheduleError: There is no such schedule for this workload, or it does not support the device.
        KnobError: No schedule has such a knob, or accepts the value.
        WorkloadError: The arrays do not fit in the host's memory, or there is no such value of `verify`.
        UnsupportedDeviceError: A library does not support the device.
        Error: All schedules fail for the same reason.
    """
    experiment = prepared or PreparedExperiment(
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
    schedules_to_run = experiment.schedules
    is_cold = exceeds_cache(workload, device) if cold is None else cold
    benchmark = _ExperimentBenchmark(experiment.problem, device, is_cold, seconds / NUM_ROUNDS)
    on_progress = progress or (lambda message: None)
    with ExitStack() as stack:
        # Libraries come first, because they may not support this device.
        library_rows = [benchmark.prepare_library(name, on_progress, stack) for name in baselines]
        untimed_rows: list[_UntimedRow] = []
        for number, schedule in enumerate(schedules_to_run, 1):
            prefix = f"schedule {number} of {len(schedules_to_run)}, {schedule.name}: "
            untimed_rows.append(benchmark.prepare_row(experiment, schedule.name, _prefix_progress(on_progress, prefix)))
        for name in experiment.automatic_rows:
            untimed_row = benchmark.prepare_row(experiment, name, _prefix_progress(on_progress, f"{name}: "))
            untimed_rows.append(replace(untimed_row, row=untimed_row.row.with_name(name)))
        untimed_rows = _time_interleaved([*untimed_rows, *library_rows], benchmark, on_progress)
    errors = [untimed_row.error for untimed_row in untimed_rows[: len(schedules_to_run)] if untimed_row.error]
    if len(errors) == len(schedules_to_run) and len({str(error) for error in errors}) == 1:
        raise errors[0]  # the cause is not a schedule, but for example too little memory
    rows = [untimed_row.row for untimed_row in untimed_rows]
    if PREDICTED in experiment.automatic_rows:
        rows = add_untuned_row(rows, experiment.default_config_names)
    return Result(
        workload,
        device.text,
        device.name,
        benchmark.problem.seed,
        _add_speedups(rows, naive_schedule=registry.get_baseline_schedule(workload)),
        device.peak_flops,
        device.peak_bandwidth,
    )


class PreparedExperiment:
    """An experiment before it is measured, with the arguments and errors of `run_schedules`.

    Attributes:
        schedules: Schedules to run.
        automatic_rows: Names of further rows, of the log's record and of the cost model's prediction.
        default_config_names: Names of the schedules that run with their default config.
        problem: Inputs and reference outputs.
    """

    def __init__(
        self,
        workload: Workload,
        schedules: Sequence[str] | None = None,
        *,
        device: Device,
        config: Mapping[str, Value] | None = None,
        seed: int | None = None,
        log: LogPaths | None = None,
        ladder: bool = True,
        predicted: bool = False,
        verify: str = "auto",
    ) -> None:
        self.schedules = select_schedules(workload, schedules, device) if ladder else []
        configs = distribute_config(workload, self.schedules, config or {}, schedule_names=schedules)
        self.default_config_names = frozenset(name for name, own_config in configs.items() if not own_config)
        self.problem = Problem(workload, seed, mode=verify)
        self._results: dict[str, Kernel | Error] = {}
        self._builders: dict[str, Callable[[], Kernel]] = {}
        for schedule in self.schedules:
            own_config = configs[schedule.name]
            self._builders[schedule.name] = functools.partial(
                build, workload, schedule, device=device, config=own_config
            )
        automatic_builders: dict[str, Callable[[], Kernel]] = {}
        if predicted and cost_model_for(device.arch) and isinstance(workload, Conv):
            # The experiment itself compares the prediction with default configs, so that `check` is not needed.
            automatic_builders[PREDICTED] = functools.partial(build, workload, device=device, check=False)
            untuned_names = {schedule.name for schedule in default_candidate_schedules(workload, device)}
            if not untuned_names <= self.default_config_names:  # otherwise all default configs run already
                automatic_builders[UNTUNED] = functools.partial(build_fastest_default, workload, device)
        if log is not None:
            automatic_builders[TUNED] = functools.partial(build, workload, device=device, log=log)
        self.automatic_rows = [*automatic_builders]
        self._builders |= automatic_builders

    def get_kernel(self, name: str) -> Kernel:
        """Return the kernel of a schedule or of an automatic row, which is built at the first call."""
        if name not in self._results:
            try:
                self._results[name] = self._builders[name]()
            except Error as error:
                self._results[name] = error
        result = self._results[name]
        if isinstance(result, Error):
            raise result
        return result

    def build_all_kernels(self) -> PreparedExperiment:
        """Compute inputs and reference outputs, build all kernels, and return the experiment."""
        _ = self.problem.expected_output
        for name in self._builders:
            with contextlib.suppress(Error):  # `get_kernel` raises the error again
                _ = self.get_kernel(name).executable
        return self


def add_untuned_row(rows: Sequence[ResultRow], default_config_names: frozenset[str]) -> list[ResultRow]:
    """Return the rows with one row `UNTUNED`, the fastest of all rows with a default config."""
    timed_rows = {row.name: row for row in rows if row.timing and row.name in (UNTUNED, *default_config_names)}
    seconds = {name: row.timing.median for name, row in timed_rows.items() if row.timing}
    if not seconds:
        return list(rows)
    fastest = timed_rows[fastest_default_name(seconds)]
    untuned_row = replace(fastest, name=UNTUNED, schedule=fastest.schedule or fastest.name)
    insert_index = 1 + next(index for index, row in enumerate(rows) if row.name == PREDICTED)
    other_rows = [row for row in rows if row.name != UNTUNED]
    return [*other_rows[:insert_index], untuned_row, *other_rows[insert_index:]]


def select_schedules(workload: Workload, names: Sequence[str] | None, device: Device) -> list[Schedule]:
    """Return the schedules to run, with the naive schedule first.

    A naive schedule that was not named and takes too long is left out if other schedules run (`tvmconv.naive_cost`).

    Args:
        workload: Workload to compute.
        names: Names of schedules (default: all that run on the device).
        device: Device to run on.

    Raises:
        ScheduleError: There is no such schedule for this workload, or it does not support the device.
    """
    available = registry.schedules(workload)
    if not available:
        raise ScheduleError(f"no schedule computes {workload.operator} in {workload.dtype}")
    naive_schedule = registry.get_baseline_schedule(workload)
    omitted_schedule = find_omitted_naive(workload, names, device)
    if not names:
        selected = [schedule for schedule in available if schedule.can_run_on(device.kind, device.arch)]
        if not selected:
            available[0].check_runs_on(device.kind, device.arch, device.text)
        kept_schedules = [schedule for schedule in selected if schedule != omitted_schedule]
        return sorted(kept_schedules, key=lambda schedule: schedule != naive_schedule)
    requested = [registry.find_schedule(workload, name) for name in names]
    for schedule in requested:
        schedule.check_runs_on(device.kind, device.arch, device.text)
    selected = [each for each in available if each in (naive_schedule, *requested) and each != omitted_schedule]
    return sorted(selected, key=lambda schedule: schedule != naive_schedule)


def find_omitted_naive(workload: Workload, names: Sequence[str] | None, device: Device) -> Schedule | None:
    """Return the naive schedule if it was not named and takes too long to run, else None."""
    naive_schedule = registry.get_baseline_schedule(workload)
    if naive_schedule is None or naive_schedule.name in (names or ()) or naive_cost.is_affordable(workload, device):
        return None
    other_schedules = [schedule for schedule in registry.schedules(workload) if schedule != naive_schedule]
    if not names and not any(schedule.can_run_on(device.kind, device.arch) for schedule in other_schedules):
        return None  # no other schedule runs
    return naive_schedule


def list_unsupported_schedules(workload: Workload, device: Device) -> list[Schedule]:
    """Return the schedules of a workload that do not support the device."""
    return [schedule for schedule in registry.schedules(workload) if not schedule.can_run_on(device.kind, device.arch)]


def exceeds_cache(workload: Workload, device: Device) -> bool:
    """Return whether inputs and output exceed the device's L2 cache; False if its size is unknown."""
    return device.l2_bytes is not None and workload.min_bytes > device.l2_bytes


def distribute_config(
    workload: Workload,
    schedules: Sequence[Schedule],
    config: Mapping[str, Value],
    *,
    schedule_names: Sequence[str] | None = None,
) -> dict[str, Config]:
    """Return for each schedule the values of its own knobs.

    Args:
        workload: Workload to compute.
        schedules: Schedules to run.
        config: Values by knob name.
        schedule_names: Names of the schedules that the config is for (default: all).

    Returns:
        Configs by the name of the schedule.

    Raises:
        KnobError: No schedule has such a knob, or accepts the value.
    """
    configs: dict[str, Config] = {schedule.name: {} for schedule in schedules}
    if not config:
        return configs
    receivers = [schedule for schedule in schedules if not schedule_names or schedule.name in schedule_names]
    knobs: dict[str, Mapping[str, Knob]] = {}
    for schedule in receivers:
        try:
            knobs[schedule.name] = schedule.space(workload).knobs
        except ScheduleError:  # building fails again, and its row gets the reason
            configs[schedule.name] = dict(config)
    if not knobs:
        return configs
    knob_names = dict.fromkeys(name for own_knobs in knobs.values() for name in own_knobs)
    for name in config:
        if not any(compat.rename_knob(schedule, name) in own_knobs for schedule, own_knobs in knobs.items()):
            raise KnobError(f"no knob {name!r} in {', '.join(knobs)}; there are: {', '.join(knob_names) or 'none'}")
    for name, own_knobs in knobs.items():
        configs[name] = compat.rename_requested_config(
            name, {knob: value for knob, value in config.items() if compat.rename_knob(name, knob) in own_knobs}
        )
    _check_values(workload, [schedule for schedule in receivers if schedule.name in knobs], configs)
    return configs


def _check_values(workload: Workload, schedules: Sequence[Schedule], configs: Mapping[str, Config]) -> None:
    """Raise the first schedule's KnobError if no schedule accepts its values."""
    errors: list[KnobError] = []
    for schedule in schedules:
        if configs[schedule.name]:
            try:
                schedule.apply(workload, configs[schedule.name])
            except KnobError as error:
                errors.append(error)
            except ScheduleError:  # its cause is not a value
                return
            else:
                return
    if errors:
        raise errors[0]


@dataclass(frozen=True)
class _UntimedRow:
    """A row before it is timed.

    Attributes:
        row: Row without a time.
        time: Function that times the row for one round; None if it failed or is wrong.
        error: Reason of a failure.
    """

    row: ResultRow
    time: Callable[[], Timing] | None = None
    error: Error | None = None


@dataclass(frozen=True)
class _ExperimentBenchmark:
    """The settings that all rows of an experiment share; `round_seconds` is the time of a round."""

    problem: Problem
    device: Device
    uses_cold_cache: bool
    round_seconds: float

    def prepare_row(self, experiment: PreparedExperiment, name: str, on_progress: ProgressCallback) -> _UntimedRow:
        """Build and verify the kernel of a row; an error is the failure of the row."""
        try:
            return self._verify_kernel(experiment, name, on_progress)
        except Error as error:
            return _UntimedRow(_make_failed_row(name, error), error=error)

    def _verify_kernel(self, experiment: PreparedExperiment, name: str, on_progress: ProgressCallback) -> _UntimedRow:
        on_progress("building")
        built_kernel = experiment.get_kernel(name)
        _ = built_kernel.loaded_kernel  # the device's own compiler is part of building, and may fail
        resources = built_kernel.resources if self.device.arch else None
        on_progress("verifying")
        verification = built_kernel.verify(self.problem)
        row = ResultRow(
            built_kernel.schedule.name,
            verified=verification.ok,
            error=verification.error,
            launch=built_kernel.launch,
            shared_bytes=built_kernel.shared_bytes,
            registers=resources.registers if resources else None,
            spills=resources.spills if resources else None,
            config=built_kernel.config,
            sampled=verification.sampled,
        )
        if not verification.ok:
            return _UntimedRow(replace(row, failure=f"wrong result: {verification.fault}"))
        return _UntimedRow(
            row,
            functools.partial(built_kernel.time, self.problem, cold=self.uses_cold_cache, seconds=self.round_seconds),
        )

    def prepare_library(self, name: str, on_progress: ProgressCallback, stack: ExitStack) -> _UntimedRow:
        """Run a library once, and verify its output.

        Args:
            name: Name of the library.
            on_progress: Function that is called with a text at each step.
            stack: Stack whose exit releases the library's memory.

        Raises:
            UnsupportedDeviceError: The library does not support the device.
        """
        on_progress(f"{name}: verifying")
        workload, inputs = self.problem.workload, self.problem.inputs
        timing_arguments = {"device": self.device, "cold": self.uses_cold_cache, "seconds": self.round_seconds}
        run_library = functools.partial(libraries.load_baselines()[name], workload, inputs, **timing_arguments)
        try:
            library_run = run_library()
        except UnsupportedDeviceError:
            raise
        except Error as error:
            return _UntimedRow(ResultRow(name, failure=str(error)), error=error)
        stack.callback(library_run.close)
        row = ResultRow(name, library=library_run.description)
        if library_run.output is not None:
            verification = self.problem.check(library_run.output)
            row = replace(row, verified=verification.ok, error=verification.error, sampled=verification.sampled)
            if not verification.ok:
                return _UntimedRow(replace(row, failure=f"wrong result: {verification.fault}"))
        time_again = library_run.time_again
        if time_again is None:
            return _UntimedRow(row, lambda: run_library().timing)
        return _UntimedRow(row, functools.partial(time_again, self.round_seconds))

    def add_timing(self, row: ResultRow, rounds: TimingRounds[Timing | Error]) -> ResultRow:
        """Return the row with the time of its median round."""
        timing = rounds.median_measurement
        assert isinstance(timing, Timing)
        timing = replace(timing, seconds=_reduce_samples(timing.seconds))
        workload, device = self.problem.workload, self.device
        rate, bandwidth = workload.flops / timing.median, workload.min_bytes / timing.median
        computes_convolution = not row.library or row.verified  # false for a baseline that copies as many bytes
        return replace(
            row,
            timing=timing,
            gflops=rate / 1e9 if computes_convolution else None,
            peak_share=rate / device.peak_flops if device.peak_flops and computes_convolution else None,
            bandwidth=bandwidth,
            bandwidth_share=bandwidth / device.peak_bandwidth if device.peak_bandwidth else None,
            rounds=_round_seconds(rounds.seconds),
            unstable=not rounds.is_stable,
        )


def _time_interleaved(
    untimed_rows: Sequence[_UntimedRow], benchmark: _ExperimentBenchmark, on_progress: ProgressCallback
) -> list[_UntimedRow]:
    """Time all rows that can be timed, in turn, and return all rows."""
    timeable_rows = [untimed_row for untimed_row in untimed_rows if untimed_row.time]
    num_rounds = 0

    def measure(rows: Sequence[_UntimedRow]) -> list[Timing | Error]:
        nonlocal num_rounds
        num_rounds += 1
        return [_time_once(untimed_row, _prefix_progress(on_progress, f"round {num_rounds}, ")) for untimed_row in rows]

    measured_rounds = iter(measure_in_rounds(timeable_rows, measure, _get_median_seconds))
    finished_rows = []
    for untimed_row in untimed_rows:
        if untimed_row.time:
            rounds = next(measured_rounds)
            last_measurement = rounds.measurements[-1]
            if isinstance(last_measurement, Error):
                row = replace(untimed_row.row, failure=get_reason(last_measurement))
                untimed_row = replace(untimed_row, row=row, error=last_measurement)
            else:
                untimed_row = replace(untimed_row, row=benchmark.add_timing(untimed_row.row, rounds))
        finished_rows.append(untimed_row)
    return finished_rows


def _time_once(untimed_row: _UntimedRow, on_progress: ProgressCallback) -> Timing | Error:
    """Return the time of one round, or the error that occurred."""
    assert untimed_row.time
    on_progress(f"{untimed_row.row.name}: timing")
    try:
        return untimed_row.time()
    except Error as error:
        return error


def _get_median_seconds(measurement: Timing | Error) -> float:
    return math.inf if isinstance(measurement, Error) else measurement.median


def _round_seconds(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return seconds with five digits, which exceeds the resolution of the clocks."""
    return tuple(float(f"{value:.5g}") for value in seconds)


def _reduce_samples(samples: Sequence[float]) -> tuple[float, ...]:
    """Return at most `NUM_QUANTILES` quantiles of the samples, with five digits, so that files of results stay small.

    They include the median and the quartiles.
    """
    if len(samples) > NUM_QUANTILES:
        samples = np.quantile(samples, np.linspace(0, 1, NUM_QUANTILES)).tolist()
    return _round_seconds(samples)


def _make_failed_row(name: str, error: Error) -> ResultRow:
    log_traceback(error)
    return ResultRow(name, failure=get_reason(error))


def _add_speedups(rows: Sequence[ResultRow], naive_schedule: Schedule | None) -> tuple[ResultRow, ...]:
    naive_timing = next((row.timing for row in rows if naive_schedule and row.name == naive_schedule.name), None)
    if naive_timing is None:
        return tuple(rows)
    return tuple(replace(row, speedup=naive_timing.median / row.timing.median) if row.timing else row for row in rows)


def _prefix_progress(on_progress: ProgressCallback, prefix: str) -> ProgressCallback:
    return lambda message: on_progress(prefix + message)
