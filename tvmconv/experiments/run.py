"""The experiment behind `tvmconv run`: build and verify schedules of a workload, then time all of them in turn."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tvmconv import baselines as libraries
from tvmconv import registry
from tvmconv.baselines.base import CHECKING, Baseline, UnsupportedDeviceError
from tvmconv.compiler.executable import ArrayType
from tvmconv.devices import Arch, Device, Timing, sharing
from tvmconv.devices.device import TurnTimer
from tvmconv.devices.power import PowerSample, measure_sustained
from tvmconv.errors import Error, get_reason, log_traceback
from tvmconv.experiments.preparation import PreparedExperiment
from tvmconv.experiments.results import PREDICTED, UNTUNED, Result, ResultRow
from tvmconv.kernel import resolve_device
from tvmconv.logs.ranking import LogPaths
from tvmconv.measure.timing_rounds import (
    NUM_LATER_WARM_UP_TURNS,
    NUM_ROUNDS,
    NUM_WARM_UP_TURNS,
    TimingRounds,
    measure_in_rounds,
    time_in_turns,
)
from tvmconv.predicted_kernel import fastest_default_name
from tvmconv.space import Value
from tvmconv.tvm_import import import_tvm
from tvmconv.verification import Problem, Verification
from tvmconv.workloads import Workload
from tvmconv.workloads.registry import as_workload

NUM_QUANTILES = 21

ProgressCallback = Callable[[str], None]


def run(
    workload: Workload | str,
    schedules: Sequence[str] | None = None,
    *,
    device: str | Device = "auto",
    config: Mapping[str, Value] | None = None,
    baselines: Sequence[str] = (),
    log: LogPaths | None = None,
    seconds: float = 0.5,
    cold: bool = False,
    seed: int | None = None,
) -> Result:
    """Build, verify and time schedules of a workload on the same inputs, as `tvmconv run` does.

    Args:
        workload: Workload to compute, or its text.
        schedules: Names of schedules (default: all that apply). The naive schedule is added as the baseline.
        device: Device to run on: "cuda:0", "opencl:0", or "auto" for the first GPU, else the first OpenCL device.
        config: Values by knob name. Each schedule takes the values of its own knobs.
        baselines: Names of libraries to time as well, such as "cudnn".
        log: Log, or folder of logs, whose fastest record for this device becomes the row "tuned".
        seconds: Approximate time in seconds for timing each kernel.
        cold: Whether inputs and outputs are outside the L2 cache when a kernel is timed.
        seed: Seed of the random inputs (default: a new one).

    Returns:
        One row per schedule and library; `tvmconv.plot.result` draws it.

    Raises:
        WorkloadError: The text of the workload is malformed.
        ScheduleError: There is no such schedule for this workload, or it does not support the device.
        KnobError: No schedule has such a knob, or accepts the value.
        DeviceError: The device does not exist, or a library does not support it.
        Error: All schedules fail for the same reason.

    Examples:
        >>> result = run("conv2d:1x8x8x8,8x8x3x3,s1,p1", ["tiling"], device="opencl:0", seconds=0.01)
        >>> [row.name for row in result.rows], result.has_all_times
        (['default', 'tiling'], True)
    """
    import_tvm()
    return run_schedules(
        as_workload(workload),
        schedules,
        device=resolve_device(device, None),
        config=config,
        baselines=baselines,
        log=log,
        seconds=seconds,
        cold=cold,
        seed=seed,
    )


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
    sustained: float = 0.0,
    library_options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Result:
    """Build, verify and time schedules of a workload on the same inputs.

    All kernels are built and verified first. Then schedules and libraries are timed in turn for `NUM_ROUNDS` rounds,
    and for further rounds if these deviate by more than 10 % (`measure_in_rounds`). The arrays of each round are
    elsewhere in memory, those of libraries too, because the sets of a cache in which they lie can change a time by
    30 %. The time of a row is that of its median round. A schedule or library that fails gets a row with the reason,
    and a wrong kernel is not timed.

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
        sustained: Seconds for which each row runs once more, for its clock and energy (`tvmconv.devices.power`); 0 for
            none of these.
        library_options: Further arguments of libraries, by their names.

    Raises:
        ScheduleError: There is no such schedule for this workload, or it does not support the device.
        KnobError: No schedule has such a knob, or accepts the value.
        WorkloadError: The arrays do not fit in the host's memory, or there is no such value of `verify`.
        DeviceError: The device is an architecture, for which kernels are compiled but not run, or it has no sensors of
            clock and energy.
        UnsupportedDeviceError: A library does not support the device.
        Error: All schedules fail for the same reason.
    """
    if isinstance(device, Arch):
        device.load()  # raises the error before kernels are built
    read_sensors = device.open_sensors() if sustained else None
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
    num_schedules = len(experiment.schedules)
    is_cold = exceeds_cache(workload, device) if cold is None else cold
    on_progress = progress or (lambda message: None)
    benchmark = _Benchmark(experiment.problem, device, is_cold, seconds / NUM_ROUNDS, on_progress)
    if sharing.is_shared():
        experiment.build_all_kernels()  # other processes use the GPU meanwhile
        libraries.import_modules(baselines)
    with ExitStack() as stack:
        # Libraries come first, because they may not support this device.
        library_entries = [benchmark.prepare_library(name, stack, library_options.get(name, {})) for name in baselines]
        entries = [
            benchmark.prepare_kernel(experiment, schedule.name, f"schedule {number} of {num_schedules}, ")
            for number, schedule in enumerate(experiment.schedules, 1)
        ]
        for name in experiment.automatic_rows:
            entry = benchmark.prepare_kernel(experiment, name)
            entry.row = entry.row.with_name(name)
            entries.append(entry)
        with sharing.hold_gpu():
            benchmark.time_in_rounds([*entries, *library_entries])
            if read_sensors:
                benchmark.measure_sustained([*entries, *library_entries], read_sensors, sustained)
    errors = [entry.error for entry in entries[:num_schedules] if entry.error]
    if len(errors) == num_schedules and len({str(error) for error in errors}) == 1:
        raise errors[0]  # the cause is not a schedule, but for example too little memory
    rows = [entry.row for entry in (*entries, *library_entries)]
    if PREDICTED in experiment.automatic_rows:
        rows = add_untuned_row(rows, experiment.default_config_names)
    naive_schedule = registry.get_baseline_schedule(workload)
    naive_seconds = next((row.seconds for row in rows if naive_schedule and row.name == naive_schedule.name), None)
    if naive_seconds:
        rows = [replace(row, speedup=naive_seconds / row.seconds) if row.seconds else row for row in rows]
    peaks = device.peak_flops, device.peak_bandwidth, device.target.clock_hz if device.target else None
    return Result(workload, device.text, device.name, experiment.problem.seed, tuple(rows), *peaks)


def exceeds_cache(workload: Workload, device: Device) -> bool:
    """Return whether inputs and output exceed the device's L2 cache; False if its size is unknown."""
    return device.l2_bytes is not None and workload.min_bytes > device.l2_bytes


def add_untuned_row(rows: Sequence[ResultRow], default_config_names: frozenset[str]) -> list[ResultRow]:
    """Return the rows with one row `UNTUNED` after the prediction, the fastest of all rows with a default config."""
    default_rows = {row.name: row for row in rows if row.seconds and row.name in (UNTUNED, *default_config_names)}
    if not default_rows:
        return list(rows)
    fastest = default_rows[fastest_default_name({name: row.seconds or 0 for name, row in default_rows.items()})]
    other_rows = [row for row in rows if row.name != UNTUNED]
    insert_index = 1 + next(index for index, row in enumerate(other_rows) if row.name == PREDICTED)
    other_rows.insert(insert_index, replace(fastest, name=UNTUNED, schedule=fastest.schedule or fastest.name))
    return other_rows


@dataclass
class _TimingEntry:
    """A row, and the function that times it for about the given seconds; None if it failed or is wrong."""

    row: ResultRow
    time: Callable[[float], Timing] | None = None
    open_timer: Callable[[], AbstractContextManager[TurnTimer] | None] = lambda: None  # for turns with other rows
    error: Error | None = None  # reason of a failure


@dataclass(frozen=True)
class _Benchmark:
    """The verification and timing of rows, with the settings that all rows of an experiment share."""

    problem: Problem
    device: Device
    is_cold: bool
    round_seconds: float  # time for timing a row in one round
    on_progress: ProgressCallback

    def prepare_kernel(self, experiment: PreparedExperiment, name: str, prefix: str = "") -> _TimingEntry:
        """Build and verify the kernel of a row; an error is the failure of the row."""
        try:
            self.on_progress(f"{prefix}{name}: building")
            kernel = experiment.get_kernel(name)
            _ = kernel.loaded_kernel  # the device's own compiler is part of building, and may fail
            resources = kernel.resources if self.device.arch else None
            self.on_progress(f"{prefix}{name}: verifying")
            verification = kernel.verify(self.problem)
        except Error as error:
            log_traceback(error)
            return _TimingEntry(ResultRow(name, failure=get_reason(error)), error=error)
        row = ResultRow(
            kernel.schedule.name,
            verified=verification.ok,
            error=verification.error,
            launch=kernel.launch,
            shared_bytes=kernel.shared_bytes,
            registers=resources.registers if resources else None,
            spills=resources.spills if resources else None,
            config=kernel.config,
            sampled=verification.sampled,
        )
        if not verification.ok:
            return _TimingEntry(replace(row, failure=f"wrong result: {verification.fault}"))
        time_kernel = functools.partial(kernel.time, self.problem, cold=self.is_cold)
        open_timer = functools.partial(kernel.open_timer, self.problem, cold=self.is_cold)
        return _TimingEntry(row, lambda seconds: time_kernel(seconds=seconds), open_timer)

    def prepare_library(self, name: str, stack: ExitStack, own_options: Mapping[str, Any]) -> _TimingEntry:
        """Run a library once, and verify its output; the exit of `stack` releases its memory.

        If its result is wrong, a library that has several algorithms takes the fastest one whose result is right.

        Raises:
            UnsupportedDeviceError: The library does not support the device.
        """
        self.on_progress(f"{name}: verifying")
        run_library = functools.partial(
            libraries.load_baselines()[name],
            self.problem.workload,
            self.problem.inputs,
            device=self.device,
            cold=self.is_cold,
            **own_options,
        )
        try:
            library_run = run_library(seconds=0.0)  # it is timed later, in turn with the others
            verification = self._verify_library(library_run)
            if verification and not verification.ok and name in CHECKING:
                library_run.close()
                library_run = run_library(seconds=0.0, is_right=lambda output: self.problem.check(output).ok)
                verification = self._verify_library(library_run)
        except UnsupportedDeviceError:
            raise
        except Error as error:
            return _TimingEntry(ResultRow(name, failure=str(error)), error=error)
        stack.callback(library_run.close)
        row = ResultRow(name, library=library_run.description)
        if verification:
            row = replace(row, verified=verification.ok, error=verification.error, sampled=verification.sampled)
            if not verification.ok:
                return _TimingEntry(replace(row, failure=f"wrong result: {verification.fault}"))
        if library_run.time_again is None:
            return _TimingEntry(row, lambda seconds: run_library(seconds=seconds).timing)
        return _TimingEntry(row, library_run.time_again, library_run.open_timer or (lambda: None))

    def _verify_library(self, library_run: Baseline) -> Verification | None:
        """Compare the output of a library with the reference; None if it has no output."""
        return None if library_run.output is None else self.problem.check(library_run.output)

    def time_in_rounds(self, entries: Sequence[_TimingEntry]) -> None:
        """Time all rows that can be timed, in turn, each round in arrays elsewhere in memory if that matters."""
        num_rounds = 0
        timeable_entries = [entry for entry in entries if entry.time]
        with ExitStack() as occupied_memory:

            def measure(round_entries: Sequence[_TimingEntry]) -> list[Timing | Error]:
                nonlocal num_rounds
                num_rounds += 1
                if num_rounds > 1 and self._is_location_relevant:
                    occupied_memory.enter_context(self.device.occupy_memory(self._array_sizes))
                in_turns = self._time_in_turns(round_entries, num_rounds)
                return in_turns or [self._time_once(entry, num_rounds) for entry in round_entries]

            all_rounds = measure_in_rounds(timeable_entries, measure, _get_median_seconds)
        for entry, rounds in zip(timeable_entries, all_rounds, strict=True):
            last_measurement = rounds.measurements[-1]
            if isinstance(last_measurement, Error):
                entry.row = replace(entry.row, failure=get_reason(last_measurement))
                entry.error = last_measurement
            else:
                entry.row = self._add_timing(entry.row, rounds)

    def measure_sustained(
        self, entries: Sequence[_TimingEntry], read_sensors: Callable[[], PowerSample], seconds: float
    ) -> None:
        """Run each row that has a time for `seconds`, and add its clock and energy."""
        for entry in entries:
            if entry.time and entry.row.timing:
                self.on_progress(f"{entry.row.name}: measuring clock and energy")
                run = functools.partial(_time_median, entry.time)
                entry.row = replace(entry.row, sustained=measure_sustained(run, read_sensors, seconds))

    @property
    def _array_sizes(self) -> list[int]:
        """Sizes of all arrays of the workload in bytes."""
        workload = self.problem.workload
        arrays = zip(workload.argument_shapes, workload.argument_dtypes, strict=True)
        return [ArrayType(shape, dtype).nbytes for shape, dtype in arrays]

    @property
    def _is_location_relevant(self) -> bool:
        """Whether times may depend on the location of the arrays; cold timings cycle through many of them."""
        return not self.is_cold and self.device.is_location_relevant(sum(self._array_sizes))

    def _time_in_turns(self, entries: Sequence[_TimingEntry], round_number: int) -> list[Timing | Error] | None:
        """Time rows in short turns; None if there is one row, or if some row cannot be timed so, or fails."""
        if len(entries) < 2:
            return None
        self.on_progress(f"round {round_number}: timing in turns")
        openers = [entry.open_timer for entry in entries]
        num_warm_up_turns = NUM_WARM_UP_TURNS if round_number == 1 else NUM_LATER_WARM_UP_TURNS
        try:
            timings: Sequence[Timing | Error] | None = time_in_turns(openers, self.round_seconds, num_warm_up_turns)
        except Error:
            return None  # the row is timed alone, and fails again
        return None if timings is None else [*timings]

    def _time_once(self, entry: _TimingEntry, round_number: int) -> Timing | Error:
        assert entry.time
        self.on_progress(f"round {round_number}, {entry.row.name}: timing")
        try:
            return entry.time(self.round_seconds)
        except Error as error:
            return error

    def _add_timing(self, row: ResultRow, rounds: TimingRounds[Timing | Error]) -> ResultRow:
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


def _time_median(time: Callable[[float], Timing], seconds: float) -> float:
    return time(seconds).median


def _get_median_seconds(measurement: Timing | Error) -> float:
    return math.inf if isinstance(measurement, Error) else measurement.median


def _round_seconds(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return seconds with five digits, which exceeds the resolution of the clocks."""
    return tuple(float(f"{value:.5g}") for value in seconds)


def _reduce_samples(samples: Sequence[float]) -> tuple[float, ...]:
    """Return at most `NUM_QUANTILES` quantiles of the samples, with the median and the quartiles, for small files."""
    if len(samples) > NUM_QUANTILES:
        samples = np.quantile(samples, np.linspace(0, 1, NUM_QUANTILES)).tolist()
    return _round_seconds(samples)
