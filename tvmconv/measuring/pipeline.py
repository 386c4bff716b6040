"""The way of a config: through the builders, through a device, to what came of it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from tvmconv.errors import DeviceError
from tvmconv.measuring.builder import Built, Task
from tvmconv.measuring.outcome import FINALISTS, Measurement, Outcome
from tvmconv.measuring.runner import Runner
from tvmconv.measuring.stopwatch import Means

if TYPE_CHECKING:
    from tvmconv.compiler.program import Program
    from tvmconv.devices import Device
    from tvmconv.knobs import Config
    from tvmconv.measuring.pool import Pool


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
    """

    trial: Trial
    built: Built = field(default_factory=Built)
    runner: Runner | None = None
    sent: float = 0.0


class Pipeline:
    """Deals configs to builders and programs to devices, and tells what came of each config.

    Args:
        task: what is built.
        builders: what builds them.
        runners: the devices.
        versions: of the software that makes and runs the kernels.
        means: where the phases of each trial are counted in.
    """

    def __init__(
        self, task: Task, builders: Pool, runners: Sequence[Runner], versions: Mapping[str, str], means: Means
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
        self._lost: DeviceError | None = None

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

    def poll(self) -> list[Measurement]:
        """Move everything on that can be; what came of what has ended.

        Raises:
            DeviceError: the last device is lost.
            Error: the builders do not start.
        """
        if self._lost:
            raise self._lost
        ended: list[Measurement] = []
        for runner in list(self._runners):
            try:
                ended += [self._ran(tag, runner.device, outcome) for tag, outcome in runner.poll()]
            except DeviceError as error:
                self._take_from(runner)
                self._lost = None if self._runners else error  # raised next time: there may be others to return
        for tag, built in self._builders.poll():
            self._means.add(built.phases)
            self._underway[tag].built = built
            if built.program is None:
                ended.append(
                    self._measurement(tag, self._task.device, Outcome(error=built.error, message=built.message))
                )
            else:
                self._programs.append((tag, built.program))
        for runner in self._runners:
            while runner.free > 0 and (dealt := self._next_for(runner)):
                tag, program = dealt
                self._underway[tag].runner, self._underway[tag].sent = runner, time.monotonic()
                runner.submit(tag, program, None if self._underway[tag].trial.final else self._best)
        return ended

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
        """Let the other devices have what a lost one did not come to."""
        self._runners.remove(runner)
        runner.close()
        left = [(tag, trial) for tag, trial in self._underway.items() if trial.runner is runner]
        for tag, trial in reversed(left):
            if trial.built.program is not None:
                self._programs.appendleft((tag, trial.built.program))

    def _ran(self, tag: int, device: Device, outcome: Outcome) -> Measurement:
        waited = (time.monotonic() - self._underway[tag].sent) * 1e3 - sum(outcome.phases.values())
        self._means.add({**outcome.phases, "queue": waited})
        underway = self._underway[tag]
        measurement = self._measurement(tag, device, outcome)
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
