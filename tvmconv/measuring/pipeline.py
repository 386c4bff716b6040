"""The way of a config: through the builders, through a device, to what came of it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from tvmconv.errors import DeviceError
from tvmconv.measuring.builder import Built, Task
from tvmconv.measuring.outcome import Measurement, Outcome
from tvmconv.measuring.runner import Runner
from tvmconv.measuring.stopwatch import Means

if TYPE_CHECKING:
    from tvmconv.compiler.program import Program
    from tvmconv.devices import Device
    from tvmconv.knobs import Config
    from tvmconv.measuring.pool import Builders


@dataclass
class _Underway:
    """A config on its way.

    Attributes:
        config: the config.
        built: what the builders made of it.
        runner: the device that it is on; None before.
        sent: when it was dealt to the device.
    """

    config: Config
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
        self, task: Task, builders: Builders, runners: Sequence[Runner], versions: Mapping[str, str], means: Means
    ) -> None:
        self._task = task
        self._builders = builders
        self._runners = list(runners)
        self._versions = versions
        self._means = means
        self._underway: dict[int, _Underway] = {}
        self._count = 0
        self._programs: deque[tuple[int, Program]] = deque()
        self._best = math.inf
        self._lost: DeviceError | None = None

    def submit(self, config: Config) -> None:
        """Queue a config."""
        self._underway[self._count] = _Underway(config)
        self._builders.submit(self._count, config)
        self._count += 1

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
            while self._programs and runner.free > 0:
                tag, program = self._programs.popleft()
                self._underway[tag].runner, self._underway[tag].sent = runner, time.monotonic()
                runner.submit(tag, program, self._best)
        return ended

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
        measurement = self._measurement(tag, device, outcome)
        self._best = min(self._best, measurement.cost)
        return measurement

    def _measurement(self, tag: int, device: Device, outcome: Outcome) -> Measurement:
        trial = self._underway.pop(tag)
        return Measurement(
            workload=self._task.workload,
            schedule=self._task.schedule.name,
            config=trial.config,
            device=device.name,
            target=target_text(device),
            outcome=outcome,
            seconds=trial.built.seconds + outcome.seconds,
            timestamp=time.time(),
            resources=_resources(trial.built.program),
            versions=self._versions,
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
