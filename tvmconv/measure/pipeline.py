"""Pipeline that passes candidates through the builders and a device to their results.

A failure that the environment may have caused (`tvmconv.measure.faults`) is held back until its cause is known. If
another kernel runs, or another config is built, after it, the config caused the failure. If none does, a control
decides: an executable that was correct before, or the naive schedule. If the control fails too, the device or the host
is considered lost, and no results are returned for the failures.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from tvmconv.compiler.executable import Executable
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, Error, HostError
from tvmconv.measure import faults
from tvmconv.measure.builder import BuilderPool, BuilderResult, BuilderSetup
from tvmconv.measure.results import NUM_FINALISTS, ErrorKind, MeasureResult, PhaseMeans, RunnerResult
from tvmconv.measure.runner import Runner
from tvmconv.space import Config

MAX_UNEXPLAINED_FAILURES = 8  # failures of a device or of the builders after which a control runs before other work


@dataclass(frozen=True)
class MeasureCandidate:
    """A config to measure."""

    schedule: str  # key of the schedule in the setup
    config: Config
    is_final: bool = False  # time it as `Benchmark.time_final` does; only the first device takes such candidates
    executable: Executable | None = None  # executable of an earlier build; None if it has to be built


@dataclass
class _InFlight:
    """A candidate in the pipeline."""

    candidate: MeasureCandidate
    builder_result: BuilderResult
    runner: Runner | None = None  # runner that it was submitted to; None before
    sent_at: float = 0.0  # time of its submission to the runner
    is_retry: bool = False  # whether an environment fault made it fail before


@dataclass
class _Stage:
    """The builders, or a device with its runner: failures with unknown cause, and the control that decides it."""

    runner: Runner | None = None  # None for the builders
    failures: list[tuple[int, RunnerResult | BuilderResult]] = field(default_factory=list)  # with their tags
    control_tag: int | None = None  # tag of the control in progress; None without one

    def find_reason(self, control_result: RunnerResult | BuilderResult) -> str:
        """Return the first message that names an environment fault, else the first one, else that of the control."""
        messages = [result.message for _, result in self.failures] or [control_result.message]
        return next((message for message in messages if faults.is_environment_fault(message)), messages[0])


class MeasurePipeline:
    """Distributes candidates to builders and executables to runners, and collects the results.

    `versions`: versions of the software that builds and runs the kernels.
    `phase_means`: statistics to which the phases of each trial are added.
    `control_candidate`: candidate that is known to be correct; None if there is none.
    """

    def __init__(
        self,
        setup: BuilderSetup,
        builder_pool: BuilderPool,
        runners: Sequence[Runner],
        versions: Mapping[str, str],
        phase_means: PhaseMeans,
        control_candidate: MeasureCandidate | None = None,
    ) -> None:
        self._setup = setup
        self._builder_pool = builder_pool
        self._build_stage = _Stage()
        self._run_stages = [_Stage(runner) for runner in runners]
        self._versions = versions
        self._phase_means = phase_means
        self._in_flight: dict[int, _InFlight] = {}
        self._tags = itertools.count()
        self._ready_tags: deque[int] = deque()  # built, and not submitted to a runner
        self._results: list[MeasureResult] = []  # to be returned by `poll`
        self._fastest: list[tuple[float, MeasureCandidate]] = []
        self._pending_error: Error | None = None
        self._control_candidate = control_candidate
        self._control_executable: Executable | None = None  # was correct on a device before

    @property
    def fastest_candidates(self) -> list[MeasureCandidate]:
        """The at most `NUM_FINALISTS` fastest candidates so far with their executables, the fastest first."""
        return [candidate for _, candidate in self._fastest]

    def submit(self, candidate: MeasureCandidate) -> None:
        """Queue a candidate."""
        tag = next(self._tags)
        self._in_flight[tag] = _InFlight(candidate, BuilderResult(candidate.executable))
        self._enqueue(tag)
        if candidate.executable and candidate.is_final and self._control_candidate is None:
            self._control_executable = candidate.executable  # a finalist was correct before

    def wait_handles(self) -> list[Connection | int]:
        """Return the objects that become readable when `poll` has something to do."""
        runner_handles = (
            handle for stage in self._run_stages if stage.runner for handle in stage.runner.wait_handles()
        )
        return [*self._builder_pool.wait_handles(), *runner_handles]

    def poll(self) -> list[MeasureResult]:
        """Advance all candidates that can advance, and return the results of those that ended.

        Raises `DeviceError` if the last device is lost, and `HostError` if a control failed or no builder starts.
        """
        if self._pending_error:
            raise self._pending_error
        for stage in list(self._run_stages):
            with self._drop_if_lost(stage) as runner:
                for tag, runner_result in runner.poll():
                    self._handle_run(tag, stage, runner, runner_result)
        try:
            for tag, builder_result in self._builder_pool.poll():
                self._handle_build(tag, builder_result)
            self._resolve_failures(self._build_stage)
        except HostError as error:
            self._pending_error = error  # raised by the next call, after the results of this one
        for stage in list(self._run_stages):
            with self._drop_if_lost(stage) as runner:
                self._resolve_failures(stage)
                while runner.num_free_slots > 0 and (next_tag := self._take_next_tag(stage)) is not None:
                    entry = self._in_flight[next_tag]
                    entry.runner, entry.sent_at = runner, time.monotonic()
                    assert entry.builder_result.executable
                    best_seconds = None if entry.candidate.is_final else self._best_seconds
                    runner.submit(next_tag, entry.builder_result.executable, best_seconds)
        results, self._results = self._results, []
        return results

    @contextlib.contextmanager
    def _drop_if_lost(self, stage: _Stage) -> Iterator[Runner]:
        """Remove a runner whose device is lost in the block, and queue its executables for the other runners.

        The next `poll` raises the error if it was the last runner.
        """
        runner = stage.runner
        assert runner
        try:
            yield runner
        except (DeviceError, HostError) as error:
            self._run_stages.remove(stage)
            runner.close()
            tags = [tag for tag, entry in self._in_flight.items() if entry.runner is runner]
            for tag in tags:
                self._in_flight[tag].runner = None
            self._ready_tags.extendleft(reversed(tags))
            self._pending_error = None if self._run_stages else error

    @property
    def _best_seconds(self) -> float:
        return self._fastest[0][0] if self._fastest else math.inf

    def _enqueue(self, tag: int) -> None:
        """Queue a candidate for a runner if it is built, and else for the builders."""
        entry = self._in_flight[tag]
        if entry.builder_result.executable is None:
            self._builder_pool.submit(tag, entry.candidate.schedule, entry.candidate.config)
        else:
            self._ready_tags.append(tag)

    def _take_next_tag(self, stage: _Stage) -> int | None:
        """Take the next executable for a runner; final timings must be comparable, so the first runner takes all."""
        for tag in self._ready_tags:
            if stage is self._run_stages[0] or not self._in_flight[tag].candidate.is_final:
                self._ready_tags.remove(tag)
                return tag
        return None

    def _handle_build(self, tag: int, result: BuilderResult) -> None:
        """Queue a built executable, or finish a config that certainly cannot be built."""
        stage = self._build_stage
        is_doubtful = faults.is_doubtful(result.error, result.message)
        if tag == stage.control_tag:
            stage.control_tag = None
            if is_doubtful:
                name = self._control_candidate.schedule if self._control_candidate else ""
                raise HostError(f"no kernel can be built, not even of schedule {name}: {stage.find_reason(result)}")
            if result.executable is None:  # inconclusive: the schedule does not support the device
                self._control_candidate = None
            self._control_executable = self._control_executable or result.executable
            self._accept_failures(stage)
            return
        self._phase_means.add(result.phases)
        if is_doubtful:
            stage.failures.append((tag, result))
        elif result.executable is None:
            self._finish_build_failure(tag, result)
        else:
            self._in_flight[tag].builder_result = result
            self._enqueue(tag)
            self._accept_failures(stage)

    def _handle_run(self, tag: int, stage: _Stage, runner: Runner, result: RunnerResult) -> None:
        """Finish an executable, and the failures whose cause it decides."""
        is_doubtful = faults.is_doubtful(result.error, result.message)
        is_control = tag == stage.control_tag
        if is_control:
            stage.control_tag = None
            if is_doubtful:
                explanation = "as a kernel that is known to be right fails too"
                reason = stage.find_reason(result)
                raise HostError(f"{runner.device.text} cannot be measured on, {explanation}: {reason}")
        elif is_doubtful:
            stage.failures.append((tag, result))
            return
        elif result.error is ErrorKind.NONE:
            self._control_executable = self._in_flight[tag].builder_result.executable
        self._accept_failures(stage)
        if not is_control:
            self._finish_run(tag, runner, result)

    def _accept_failures(self, stage: _Stage) -> None:
        """Attribute failures to their configs, because another kernel succeeds; retry or finish them."""
        for tag, result in stage.failures:
            if stage.runner and self._in_flight[tag].is_retry and faults.is_environment_fault(result.message):
                raise HostError(f"{stage.runner.device.text} cannot be measured on: {result.message}")
        failures, stage.failures = stage.failures, []
        for tag, result in failures:
            entry = self._in_flight[tag]
            if not entry.is_retry and faults.is_retryable(result.message):
                entry.is_retry, entry.runner = True, None
                self._enqueue(tag)
            elif isinstance(result, BuilderResult):
                self._finish_build_failure(tag, result)
            else:
                assert stage.runner
                self._finish_run(tag, stage.runner, result)

    def _resolve_failures(self, stage: _Stage) -> None:
        """Try the control if work of a stage failed and no other work can decide the cause."""
        if not stage.failures or stage.control_tag is not None:
            return
        runner, failed_tags = stage.runner, {tag for tag, _ in stage.failures}
        has_pending = any(
            (entry.runner is runner or tag in self._ready_tags) if runner else entry.builder_result.executable is None
            for tag, entry in self._in_flight.items()
            if tag not in failed_tags
        )
        if self._control_candidate is None and not (runner and self._control_executable):
            self._accept_failures(stage)
        elif has_pending and len(stage.failures) < MAX_UNEXPLAINED_FAILURES:
            return
        elif runner and self._control_executable:
            if runner.num_free_slots > 0:
                stage.control_tag = next(self._tags)
                runner.submit(stage.control_tag, self._control_executable, 0.0)
        elif self._control_candidate and self._build_stage.control_tag is None:
            self._build_stage.control_tag = next(self._tags)
            control = self._control_candidate
            self._builder_pool.submit(self._build_stage.control_tag, control.schedule, control.config)

    def _finish_build_failure(self, tag: int, result: BuilderResult) -> None:
        self._in_flight[tag].builder_result = result
        self._finish(tag, self._setup.device, RunnerResult(error=result.error, message=result.message))

    def _finish_run(self, tag: int, runner: Runner, runner_result: RunnerResult) -> None:
        entry = self._in_flight[tag]
        queue_ms = (time.monotonic() - entry.sent_at) * 1e3 - sum(runner_result.phases.values())
        self._phase_means.add({**runner_result.phases, "queue": queue_ms})
        result = self._finish(tag, runner.device, runner_result)
        if math.isfinite(result.cost) and not result.is_final:
            candidate = replace(entry.candidate, executable=entry.builder_result.executable)
            fastest = sorted([*self._fastest, (result.cost, candidate)], key=lambda pair: pair[0])
            self._fastest = fastest[:NUM_FINALISTS]

    def _finish(self, tag: int, device: Device, runner_result: RunnerResult) -> MeasureResult:
        """Remove a candidate from the pipeline, and add its result to those that `poll` returns."""
        entry = self._in_flight.pop(tag)
        result = MeasureResult(
            workload=self._setup.workload,
            schedule=entry.candidate.schedule,
            config=entry.candidate.config,
            device=device.name,
            target=format_target(device),
            runner_result=runner_result,
            seconds=entry.builder_result.seconds + runner_result.seconds,
            timestamp=time.time(),
            resources=collect_resources(entry.builder_result.executable),
            versions=self._versions,
            is_final=entry.candidate.is_final,
        )
        self._results.append(result)
        return result


def format_target(device: Device) -> str:
    """Return the target of a device in AutoTVM's notation, such as "cuda -arch=sm_90" or "opencl"."""
    return f"{device.kind} -arch={device.arch}" if device.arch else device.kind


def collect_resources(executable: Executable | None) -> dict[str, int]:
    """Return `MeasureResult.resources` of an executable: the maximum over its device functions."""
    if executable is None:
        return {}
    kernels = executable.kernels
    resources = {
        "shared_bytes": max(kernel.shared_bytes for kernel in kernels),
        "threads": max(kernel.launch.threads_per_block for kernel in kernels),
        "blocks": max(kernel.launch.num_blocks for kernel in kernels),
    }
    if dynamic_bytes := max(kernel.dynamic_shared_bytes for kernel in kernels):
        resources["dynamic_shared_bytes"] = dynamic_bytes
    if len(kernels) > 1:
        resources["steps"] = len(kernels)
    ptxas_resources = [kernel.resources for kernel in kernels if kernel.resources]
    if not ptxas_resources:
        return resources
    return {
        "registers": max(kernel_resources.registers for kernel_resources in ptxas_resources),
        "spills": max(kernel_resources.spills for kernel_resources in ptxas_resources),
        **resources,
    }
