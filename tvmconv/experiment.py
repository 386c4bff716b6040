"""The experiment behind `tvmconv run`: build, verify and time schedules of a workload, all on the same inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from tvmconv import kernel, library
from tvmconv.baselines.cudnn import Baseline, time_cudnn
from tvmconv.compiler.lower import Launch
from tvmconv.devices import Device, Timing
from tvmconv.errors import Error, KnobError, ScheduleError
from tvmconv.knobs import Config, Value
from tvmconv.library import Schedule
from tvmconv.tuning.best import Paths
from tvmconv.verify import Problem, Verification
from tvmconv.workloads import Workload, parse

REFERENCE = "default"  # the schedule that speed-ups are over
TUNED = "tuned"  # the name of what a log has
QUANTILES = 101
BASELINES: dict[str, Callable[..., Baseline]] = {"cudnn": time_cudnn}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """What one schedule, or a library to compare with, did on a workload.

    Attributes:
        name: of the schedule or the library.
        verified: whether the output was compared with float64 and is right.
        error: relative L2 error of the output; None if it never ran.
        failure: why there is no time, in one line; None where there is one.
        timing: only of a verified kernel.
        gflops: GFLOP/s at the median time.
        peak_share: of the device's float32 peak, 0 to 1; None where that is not known.
        speedup: time of `default` over this one's; None without a time of `default`.
        launch: grid and block.
        shared_bytes: static shared memory of a block, in bytes.
        registers: a thread; None on OpenCL.
        spills: bytes of register spills; None on OpenCL.
        config: the value of every knob.
        library: for a library, what ran: its version and settings.
    """

    name: str
    verified: bool = False
    error: float | None = None
    failure: str | None = None
    timing: Timing | None = None
    gflops: float | None = None
    peak_share: float | None = None
    speedup: float | None = None
    launch: Launch | None = None
    shared_bytes: int | None = None
    registers: int | None = None
    spills: int | None = None
    config: Config = field(default_factory=dict)
    library: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as JSON has it, times in seconds."""
        data = asdict(self)
        if self.error is not None and not math.isfinite(self.error):
            data["error"] = None  # JSON has no NaN
        if self.timing is not None:
            data["timing"] |= {"median": self.timing.median, "spread": self.timing.spread}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """The row that `to_json` wrote."""
        timing, launch = data["timing"], data["launch"]
        config = {name: tuple(value) if isinstance(value, list) else value for name, value in data["config"].items()}
        return cls(
            **{
                **data,
                "timing": timing and Timing(tuple(timing["seconds"]), timing["method"], timing["cold"]),
                "launch": launch and Launch(tuple(launch["grid"]), tuple(launch["block"])),
                "config": config,
            }
        )


@dataclass(frozen=True)
class Result:
    """The rows of one workload on one device.

    Attributes:
        workload: what was computed.
        device: its text, such as `cuda:0`.
        device_name: the driver's name for it.
        seed: of the inputs.
        rows: one a schedule, the simplest first; then the library, if one was asked for.
    """

    workload: Workload
    device: str
    device_name: str
    seed: int
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether every row is verified and has a time."""
        return all(row.failure is None for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON has it."""
        rows = [row.to_json() for row in self.rows]
        own = {"device": self.device, "device_name": self.device_name, "seed": self.seed}
        return {"workload": self.workload.text, **own, "rows": rows}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        """The result that `to_json` wrote."""
        rows = tuple(Row.from_json(row) for row in data["rows"])
        return cls(parse(data["workload"]), data["device"], data["device_name"], data["seed"], rows)


def run_ladder(
    workload: Workload,
    schedules: Sequence[str] | None = None,
    *,
    device: Device,
    config: Mapping[str, Value] | None = None,
    baseline: str | None = None,
    cold: bool = False,
    seconds: float = 0.5,
    seed: int | None = None,
    log: Paths | None = None,
    progress: Progress | None = None,
) -> Result:
    """Build, verify and time schedules of a workload, all on the same inputs.

    A schedule that fails is a row with the reason. A wrong kernel is not timed.

    Args:
        workload: what to compute.
        schedules: names; by default all that apply. `default` is added, for the speed-ups to be over it.
        device: where to run.
        config: values by knob name; each schedule takes those of the knobs that it has.
        baseline: a library to time as well, one of `BASELINES`.
        cold: time with inputs and outputs outside the cache.
        seconds: about how long to time each kernel.
        seed: of the inputs; a fresh one by default.
        log: logs, whose fastest record for this device becomes the row `TUNED`.
        progress: is told each step in a few words.

    Raises:
        ScheduleError: no such schedule for this workload.
        KnobError: no schedule has such a knob, or none that has it takes the value.
        WorkloadError: the problem does not fit in this machine's memory.
        Error: the baseline cannot run here, or all schedules fail for the same reason.
    """
    chosen = choose(workload, schedules)
    configs = share_config(workload, chosen, config or {}, named=schedules)
    bench = _Bench(Problem(workload, seed), device, cold, seconds)
    report = progress or (lambda step: None)
    compared = [bench.measure_library(baseline, report)] if baseline else []  # first: it may be missing here
    rows: list[Row] = []
    errors: list[Error] = []
    for number, schedule in enumerate(chosen, 1):
        tell = _prefixed(report, f"schedule {number} of {len(chosen)}, {schedule.name}: ")
        try:
            build = functools.partial(kernel.build, workload, schedule, config=configs[schedule.name])
            rows.append(bench.measure(build, tell))
        except Error as error:
            rows.append(Row(schedule.name, failure=str(error)))
            errors.append(error)
    if log is not None:
        tell = _prefixed(report, f"{TUNED}: ")
        try:
            rows.append(replace(bench.measure(functools.partial(kernel.build, workload, log=log), tell), name=TUNED))
        except Error as error:
            rows.append(Row(TUNED, failure=str(error)))
    if len(errors) == len(chosen) and len({str(error) for error in errors}) == 1:
        raise errors[0]  # not a schedule's fault: too little memory, say
    return Result(workload, device.text, device.name, bench.problem.seed, _with_speedups([*rows, *compared]))


def choose(workload: Workload, names: Sequence[str] | None = None) -> list[Schedule]:
    """The schedules of these names, the simplest first, with `default`; all that apply where no names are given.

    Raises:
        ScheduleError: no such schedule for this workload, or none at all.
    """
    known = library.schedules(workload)
    if not known:
        raise ScheduleError(f"no schedule computes {workload.operator} in {workload.dtype}")
    if not names:
        return known
    wanted = {library.find(workload, name).name for name in names} | {REFERENCE}
    return [schedule for schedule in known if schedule.name in wanted]


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
    knobs = {schedule.name: schedule.space(workload).knobs for schedule in receivers}
    there = dict.fromkeys(name for own in knobs.values() for name in own)
    for name in config:
        if name not in there:
            raise KnobError(f"no knob {name!r} in {', '.join(knobs)}; there are: {', '.join(there) or 'none'}")
    for name, own in knobs.items():
        shares[name] = {knob: value for knob, value in config.items() if knob in own}
    _check_taken(workload, receivers, shares)
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
            else:
                return
    raise errors[0]


@dataclass(frozen=True)
class _Bench:
    """What all rows of an experiment have in common."""

    problem: Problem
    device: Device
    cold: bool
    seconds: float

    def measure(self, build: Callable[..., kernel.Kernel], tell: Progress) -> Row:
        """Build, verify and time a kernel."""
        tell("building")
        built = build(device=self.device)
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
        )
        if not verification.ok:
            return replace(row, failure=_wrong(verification))
        tell("timing")
        return self._timed(row, built.time(self.problem, cold=self.cold, seconds=self.seconds))

    def measure_library(self, name: str, tell: Progress) -> Row:
        """Verify and time a library."""
        tell(f"{name}: verifying and timing")
        workload = self.problem.workload
        ran = BASELINES[name](workload, self.problem.inputs, device=self.device, cold=self.cold, seconds=self.seconds)
        verification = self.problem.check(ran.output)
        row = Row(name, verified=verification.ok, error=verification.error, library=ran.text)
        return self._timed(row, ran.timing) if verification.ok else replace(row, failure=_wrong(verification))

    def _timed(self, row: Row, timing: Timing) -> Row:
        timing = replace(timing, seconds=_thinned(timing.seconds))
        rate = self.problem.workload.flops / timing.median
        peak = self.device.peak_flops
        return replace(row, timing=timing, gflops=rate / 1e9, peak_share=rate / peak if peak else None)


def _thinned(samples: Sequence[float]) -> tuple[float, ...]:
    """The samples, or so many of their quantiles, the median and the quartiles among them; to five digits.

    That is more than any clock here resolves, and a file of results stays small.
    """
    if len(samples) > QUANTILES:
        samples = np.quantile(samples, np.linspace(0, 1, QUANTILES)).tolist()
    return tuple(float(f"{sample:.5g}") for sample in samples)


def _wrong(verification: Verification) -> str:
    if math.isnan(verification.error):
        return "wrong result: some elements are NaN, which is what the output held before"
    return f"wrong result: relative error {verification.error:.2g}, where {verification.tolerance:.0e} is allowed"


def _with_speedups(rows: Sequence[Row]) -> tuple[Row, ...]:
    reference = next((row.timing for row in rows if row.name == REFERENCE), None)
    if reference is None:
        return tuple(rows)
    return tuple(replace(r, speedup=reference.median / r.timing.median) if r.timing else r for r in rows)


def _prefixed(tell: Progress, prefix: str) -> Progress:
    return lambda step: tell(prefix + step)
