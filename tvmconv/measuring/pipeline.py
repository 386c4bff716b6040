"""The way of a config: through the builders, through a device, to what came of it.

A failure that may be the environment's (`tvmconv.measuring.faults`) is held back until it is known whose it is. Where
another program runs, or another config is built, after it, the failure is the config's own. Where none does, a control
decides: a program that was right before, or the naive schedule. If the control fails too, the place is lost, and no
measurement is made of what was held back.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from tvmconv.errors import DeviceError, Error, HostError
from tvmconv.measuring import faults
from tvmconv.measuring.builder import Built, Task
from tvmconv.measuring.outcome import FINALISTS, ErrorKind, Measurement, Outcome
from tvmconv.measuring.runner import Runner
from tvmconv.measuring.stopwatch import Means

if TYPE_CHECKING:
    from tvmconv.compiler.program import Program
    from tvmconv.devices import Device
    from tvmconv.knobs import Config
    from tvmconv.measuring.pool import Pool

MAX_HELD = 8  # failures of one device, or of the builders, before a control decides although there is other work


@dataclass(frozen=True)
class Trial:
    """A config to be measured.

    Attributes:
        schedule: the schedule's name, among those of the task.
        config: values by knob name.
        final: whether it is a last timing, as `Bench.time_long` does it; these are taken by the first device alone.
        program: what it was built to before; None for what has to be built.
    """

    schedule: str
    config: Config
    final: bool = False
    program: Program | None = None


@dataclass
class _Underway:
    """A config on its way.

    Attributes:
        trial: the config.
        built: what the builders made of it.
        runner: the device that it is on; None before.
        sent: when it was dealt to the device.
        is_retry: whether it failed before by a fault that was not its own.
    """

    trial: Trial
    built: Built = field(default_factory=Built)
    runner: Runner | None = None
    sent: float = 0.0
    is_retry: bool = False


@dataclass
class _Doubts:
    """The failures of one device, or of the builders, of which it is not known yet whether they are the configs' own.

    Attributes:
        held: the trials' tags, each with what came of it.
        control: the tag of the control that will decide; None as long as none is on its way.
    """

    held: list[tuple[int, Outcome | Built]] = field(default_factory=list)
    control: int | None = None

    @property
    def reason(self) -> str:
        """The message that says most: one that names the environment, else the first."""
        messages = [ended.message for _, ended in self.held]
        return next((message for message in messages if faults.names_environment(message)), messages[0])


class Pipeline:
    """Deals configs to builders and programs to devices, and tells what came of each config.

    Args:
        task: what is built.
        builders: what builds them.
        runners: the devices.
        versions: of the software that makes and runs the kernels.
        means: where the phases of each trial are counted in.
        control: a config that is known to be right, of a schedule of the task; None if there is none.
    """

    def __init__(
        self,
        task: Task,
        builders: Pool,
        runners: Sequence[Runner],
        versions: Mapping[str, str],
        means: Means,
        control: Trial | None = None,
    ) -> None:
        self._task = task
        self._builders = builders
        self._runners = list(runners)
        self._versions = versions
        self._means = means
        self._underway: dict[int, _Underway] = {}
        self._count = 0
        self._programs: deque[tuple[int, Program]] = deque()
        self._fastest: list[tuple[float, Trial]] = []
        self._lost: Error | None = None
        self._control = control
        self._right: Program | None = None  # of this workload, and right on a device: what a control runs
        self._run_doubts = {id(runner): _Doubts() for runner in self._runners}
        self._build_doubts = _Doubts()

    @property
    def fastest(self) -> list[Trial]:
        """Those trials that were fastest so far, as built: `FINALISTS` at most, the fastest first."""
        return [trial for _, trial in self._fastest]

    def submit(self, trial: Trial) -> None:
        """Queue a config."""
        tag, self._count = self._count, self._count + 1
        self._underway[tag] = _Underway(trial)
        if trial.program is None:
            self._builders.submit(tag, trial.schedule, trial.config)
        else:
            self._underway[tag].built = Built(trial.program)
            self._programs.append((tag, trial.program))
            if trial.final and self._control is None:
                self._right = trial.program  # it is among the fastest, and so was right before

    def poll(self) -> list[Measurement]:
        """Move everything on that can be; what came of what has ended.

        Raises:
            DeviceError: the last device is lost.
            HostError: a program that is known to be right fails as well.
            Error: the builders do not start.
        """
        if self._lost:
            raise self._lost
        ended: list[Measurement] = []
        for runner in list(self._runners):
            with self._losing(runner):
                for tag, outcome in runner.poll():
                    ended += self._ran(tag, runner, outcome)
        try:
            for tag, built in self._builders.poll():
                ended += self._was_built(tag, built)
            ended += self._check_builders()
        except HostError as error:
            self._lost = error  # raised next time: there are others to return
        for runner in list(self._runners):
            with self._losing(runner):
                ended += self._check_runner(runner)
                while runner.free > 0 and (dealt := self._next_for(runner)):
                    tag, program = dealt
                    self._underway[tag].runner, self._underway[tag].sent = runner, time.monotonic()
                    runner.submit(tag, program, None if self._underway[tag].trial.final else self._best)
        return ended

    @contextlib.contextmanager
    def _losing(self, runner: Runner) -> Iterator[None]:
        """Go on without a device that turns out to be lost; the next `poll` raises if it was the last one."""
        try:
            yield
        except (DeviceError, HostError) as error:
            self._take_from(runner)
            self._lost = None if self._runners else error

    @property
    def _best(self) -> float:
        return self._fastest[0][0] if self._fastest else math.inf

    def _next_for(self, runner: Runner) -> tuple[int, Program] | None:
        """The next program that a device may have; last timings are compared, and are all for the first one."""
        for place, (tag, _) in enumerate(self._programs):
            if runner is self._runners[0] or not self._underway[tag].trial.final:
                dealt = self._programs[place]
                del self._programs[place]
                return dealt
        return None

    def waitables(self) -> list[Connection | int]:
        """What becomes readable when `poll` has something to do."""
        return [*self._builders.waitables(), *(w for runner in self._runners for w in runner.waitables())]

    def _take_from(self, runner: Runner) -> None:
        """Let the other devices have what a lost one did not come to, and what failed on it."""
        self._runners.remove(runner)
        runner.close()
        self._run_doubts[id(runner)] = _Doubts()
        left = [(tag, trial) for tag, trial in self._underway.items() if trial.runner is runner]
        for tag, trial in reversed(left):
            trial.runner = None
            if trial.built.program is not None:
                self._programs.appendleft((tag, trial.built.program))

    def _was_built(self, tag: int, built: Built) -> list[Measurement]:
        """Queue a program; the measurements of those configs of which it is clear now that they cannot be built.

        Raises:
            HostError: the control cannot be built.
        """
        doubts = self._build_doubts
        doubtful = faults.is_doubtful_build(built.error, built.message)
        if tag == doubts.control:
            doubts.control = None
            if doubtful:
                reason = doubts.reason if doubts.held else built.message
                raise HostError(f"no kernel can be built, not even of schedule {self._control_name}: {reason}")
            if built.program is None:  # it says nothing: the schedule is not for this device, or too slow
                self._control = None
            self._right = self._right or built.program
            return self._resolve_builds()
        self._means.add(built.phases)
        if doubtful:
            doubts.held.append((tag, built))
            return []
        self._underway[tag].built = built
        if built.program is None:
            return [self._not_built(tag, built)]
        self._programs.append((tag, built.program))
        return self._resolve_builds()

    def _not_built(self, tag: int, built: Built) -> Measurement:
        return self._measurement(tag, self._task.device, Outcome(error=built.error, message=built.message))

    def _resolve_builds(self) -> list[Measurement]:
        """What comes of builds that failed, now that others succeed: the failures are their own."""
        held, self._build_doubts.held = self._build_doubts.held, []
        ended = []
        for tag, built in held:
            assert isinstance(built, Built)
            underway = self._underway[tag]
            if not underway.is_retry and faults.is_worth_retry(built.message):
                underway.is_retry = True
                self._builders.submit(tag, underway.trial.schedule, underway.trial.config)
            else:
                underway.built = built
                ended.append(self._not_built(tag, built))
        return ended

    def _check_builders(self) -> list[Measurement]:
        """Build the control where builds fail and nothing else decides whose fault that is."""
        doubts = self._build_doubts
        if not doubts.held or doubts.control is not None:
            return []
        if self._control is None:
            return self._resolve_builds()
        held = {tag for tag, _ in doubts.held}
        waiting = any(
            each.built.program is None and tag not in held and each.trial.program is None
            for tag, each in self._underway.items()
        )
        if len(doubts.held) >= MAX_HELD or not waiting:
            self._build_control()
        return []

    def _build_control(self) -> None:
        """Queue the control at the builders, unless it is there."""
        if self._build_doubts.control is None and self._control is not None:
            self._build_doubts.control, self._count = self._count, self._count + 1
            self._builders.submit(self._build_doubts.control, self._control.schedule, self._control.config)

    @property
    def _control_name(self) -> str:
        return self._control.schedule if self._control else ""

    def _ran(self, tag: int, runner: Runner, outcome: Outcome) -> list[Measurement]:
        """What came of a program, and of those whose failures it explains.

        Raises:
            HostError: it is the control, and fails.
        """
        doubts = self._run_doubts[id(runner)]
        doubtful = faults.is_doubtful_run(outcome.error)
        if tag == doubts.control:
            doubts.control = None
            if doubtful:
                reason = doubts.reason if doubts.held else outcome.message
                known = "as a kernel that is known to be right fails too"
                raise HostError(f"{runner.device.text} cannot be measured on, {known}: {reason}")
            return self._resolve_runs(runner)
        if doubtful:
            doubts.held.append((tag, outcome))
            return []
        if outcome.error is ErrorKind.NONE:
            self._right = self._underway[tag].built.program
        return [*self._resolve_runs(runner), self._ended(tag, runner, outcome)]

    def _resolve_runs(self, runner: Runner) -> list[Measurement]:
        """What comes of programs that failed, now that another runs: the failures are their own.

        Raises:
            HostError: one failed twice by what no config can bring about.
        """
        doubts = self._run_doubts[id(runner)]
        for tag, outcome in doubts.held:
            if self._underway[tag].is_retry and faults.names_environment(outcome.message):
                raise HostError(f"{runner.device.text} cannot be measured on: {outcome.message}")
        held, doubts.held = doubts.held, []
        ended = []
        for tag, outcome in held:
            assert isinstance(outcome, Outcome)
            underway = self._underway[tag]
            if not underway.is_retry and faults.is_worth_retry(outcome.message):
                underway.is_retry, underway.runner = True, None
                assert underway.built.program is not None
                self._programs.append((tag, underway.built.program))
            else:
                ended.append(self._ended(tag, runner, outcome))
        return ended

    def _check_runner(self, runner: Runner) -> list[Measurement]:
        """Run the control where programs fail and nothing else decides whose fault that is."""
        doubts = self._run_doubts[id(runner)]
        if not doubts.held or doubts.control is not None:
            return []
        held = {tag for tag, _ in doubts.held}
        is_idle = not self._programs and not any(
            each.runner is runner and tag not in held for tag, each in self._underway.items()
        )
        if len(doubts.held) < MAX_HELD and not is_idle:
            return []
        if self._right is None:
            if self._control is None:  # nothing is known to be right
                return self._resolve_runs(runner)
            self._build_control()
        elif runner.free > 0:
            doubts.control, self._count = self._count, self._count + 1
            runner.submit(doubts.control, self._right, 0.0)
        return []

    def _ended(self, tag: int, runner: Runner, outcome: Outcome) -> Measurement:
        """The measurement of a program that was run."""
        underway = self._underway[tag]
        waited = (time.monotonic() - underway.sent) * 1e3 - sum(outcome.phases.values())
        self._means.add({**outcome.phases, "queue": waited})
        measurement = self._measurement(tag, runner.device, outcome)
        if math.isfinite(measurement.cost) and not measurement.final:
            built = replace(underway.trial, program=underway.built.program)
            ranked = sorted([*self._fastest, (measurement.cost, built)], key=lambda each: each[0])
            self._fastest = ranked[:FINALISTS]
        return measurement

    def _measurement(self, tag: int, device: Device, outcome: Outcome) -> Measurement:
        underway = self._underway.pop(tag)
        return Measurement(
            workload=self._task.workload,
            schedule=underway.trial.schedule,
            config=underway.trial.config,
            device=device.name,
            target=target_text(device),
            outcome=outcome,
            seconds=underway.built.seconds + outcome.seconds,
            timestamp=time.time(),
            resources=_resources(underway.built.program),
            versions=self._versions,
            final=underway.trial.final,
        )


def target_text(device: Device) -> str:
    """A device's target as AutoTVM writes it: "cuda -arch=sm_90", "opencl"."""
    return f"{device.kind} -arch={device.arch}" if device.arch else device.kind


def _resources(program: Program | None) -> dict[str, int]:
    """What a program takes, under the names of `Measurement.resources`; of several steps the most that one takes."""
    if program is None:
        return {}
    steps = program.steps
    taken = {
        "shared_bytes": max(step.shared_bytes for step in steps),
        "threads": max(step.launch.threads for step in steps),
        "blocks": max(step.launch.blocks for step in steps),
    }
    if dynamic := max(step.dynamic_shared_bytes for step in steps):
        taken["dynamic_shared_bytes"] = dynamic
    if len(steps) > 1:
        taken["steps"] = len(steps)
    ptxas = [step.resources for step in steps if step.resources]
    if not ptxas:
        return taken
    return {"registers": max(each.registers for each in ptxas), "spills": max(each.spills for each in ptxas), **taken}
