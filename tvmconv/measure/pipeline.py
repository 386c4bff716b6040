"""Pipeline that passes candidates through the builders and a device to their results.

A failure that the environment may have caused (`tvmconv.measure.faults`) is held back until its cause is known. If
another kernel runs, or another config is built, after it, the config caused the failure. If none does, a control
decides: an executable that was correct before, or the naive schedule. If the control fails too, the device or the host
is considered lost, and no results are returned for the failures.
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
from tvmconv.measure import faults
from tvmconv.measure.builder import BuilderResult, BuilderSetup
from tvmconv.measure.phase_timer import PhaseMeans
from tvmconv.measure.results import NUM_FINALISTS, ErrorKind, MeasureResult, RunnerResult
from tvmconv.measure.runner import Runner

if TYPE_CHECKING:
    from tvmconv.compiler.executable import Executable
    from tvmconv.devices import Device
    from tvmconv.measure.builder_pool import BuilderPool
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
    builder_result: BuilderResult = field(default_factory=BuilderResult)
    runner: Runner | None = None  # runner that it was submitted to; None before
    sent_at: float = 0.0  # time of its submission to the runner
    is_retry: bool = False  # whether an environment fault made it fail before


@dataclass
class _UnexplainedFailures:
    """Failures of one device or of the builders with unknown cause."""

    # Tags and results of the failed trials.
    failures: list[tuple[int, RunnerResult | BuilderResult]] = field(default_factory=list)
    control_tag: int | None = None  # tag of the control in progress; None without one

    @property
    def reason(self) -> str:
        """First message that names an environment fault, or else the first message."""
        messages = [result.message for _, result in self.failures]
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
        self._runners = list(runners)
        self._versions = versions
        self._phase_means = phase_means
        self._in_flight: dict[int, _InFlight] = {}
        self._next_tag = 0
        self._ready_executables: deque[tuple[int, Executable]] = deque()
        self._fastest: list[tuple[float, MeasureCandidate]] = []
        self._pending_error: Error | None = None
        self._control_candidate = control_candidate
        self._control_executable: Executable | None = None  # was correct on a device before
        self._run_failures = {id(runner): _UnexplainedFailures() for runner in self._runners}
        self._build_failures = _UnexplainedFailures()

    @property
    def fastest_candidates(self) -> list[MeasureCandidate]:
        """The at most `NUM_FINALISTS` fastest candidates so far with their executables, the fastest first."""
        return [candidate for _, candidate in self._fastest]

    def submit(self, candidate: MeasureCandidate) -> None:
        """Queue a candidate."""
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        self._in_flight[tag] = _InFlight(candidate)
        if candidate.executable is None:
            self._builder_pool.submit(tag, candidate.schedule, candidate.config)
        else:
            self._in_flight[tag].builder_result = BuilderResult(candidate.executable)
            self._ready_executables.append((tag, candidate.executable))
            if candidate.is_final and self._control_candidate is None:
                self._control_executable = candidate.executable  # a finalist was correct before

    def poll(self) -> list[MeasureResult]:
        """Advance all candidates that can advance, and return the results of those that ended."""
        if self._pending_error:
            raise self._pending_error
        results: list[MeasureResult] = []
        for runner in list(self._runners):
            with self._drop_if_lost(runner):
                for tag, runner_result in runner.poll():
                    results += self._handle_run(tag, runner, runner_result)
        try:
            for tag, builder_result in self._builder_pool.poll():
                results += self._handle_build(tag, builder_result)
            results += self._resolve_build_failures()
        except HostError as error:
            self._pending_error = error  # raised by the next call, after the results of this one
        for runner in list(self._runners):
            with self._drop_if_lost(runner):
                results += self._resolve_run_failures(runner)
                while runner.num_free_slots > 0 and (entry := self._take_next_executable(runner)):
                    tag, executable = entry
                    in_flight = self._in_flight[tag]
                    in_flight.runner, in_flight.sent_at = runner, time.monotonic()
                    runner.submit(tag, executable, None if in_flight.candidate.is_final else self._best_seconds)
        return results

    @contextlib.contextmanager
    def _drop_if_lost(self, runner: Runner) -> Iterator[None]:
        """Remove a runner whose device is lost in the block; the next `poll` raises if it was the last one."""
        try:
            yield
        except (DeviceError, HostError) as error:
            self._requeue_from(runner)
            self._pending_error = None if self._runners else error

    @property
    def _best_seconds(self) -> float:
        return self._fastest[0][0] if self._fastest else math.inf

    def _take_next_executable(self, runner: Runner) -> tuple[int, Executable] | None:
        """Return the next executable for a runner; final timings must be comparable, so the first runner takes all."""
        for index, (tag, _) in enumerate(self._ready_executables):
            if runner is self._runners[0] or not self._in_flight[tag].candidate.is_final:
                entry = self._ready_executables[index]
                del self._ready_executables[index]
                return entry
        return None

    def wait_handles(self) -> list[Connection | int]:
        """Return the objects that become readable when `poll` has something to do."""
        runner_handles = (handle for runner in self._runners for handle in runner.wait_handles())
        return [*self._builder_pool.wait_handles(), *runner_handles]

    def _requeue_from(self, runner: Runner) -> None:
        """Remove a lost runner and queue its pending and failed executables for the other runners."""
        self._runners.remove(runner)
        runner.close()
        self._run_failures[id(runner)] = _UnexplainedFailures()
        entries = [(tag, entry) for tag, entry in self._in_flight.items() if entry.runner is runner]
        for tag, entry in reversed(entries):
            entry.runner = None
            if entry.builder_result.executable is not None:
                self._ready_executables.appendleft((tag, entry.builder_result.executable))

    def _handle_build(self, tag: int, builder_result: BuilderResult) -> list[MeasureResult]:
        """Queue a built executable, and return the results of configs that certainly cannot be built."""
        failures = self._build_failures
        is_doubtful = faults.is_doubtful_build(builder_result.error, builder_result.message)
        if tag == failures.control_tag:
            failures.control_tag = None
            if is_doubtful:
                reason = failures.reason if failures.failures else builder_result.message
                raise HostError(f"no kernel can be built, not even of schedule {self._control_schedule_name}: {reason}")
            if builder_result.executable is None:  # inconclusive: the schedule does not support the device
                self._control_candidate = None
            self._control_executable = self._control_executable or builder_result.executable
            return self._accept_build_failures()
        self._phase_means.add(builder_result.phases)
        if is_doubtful:
            failures.failures.append((tag, builder_result))
            return []
        self._in_flight[tag].builder_result = builder_result
        if builder_result.executable is None:
            return [self._make_build_failure(tag, builder_result)]
        self._ready_executables.append((tag, builder_result.executable))
        return self._accept_build_failures()

    def _make_build_failure(self, tag: int, builder_result: BuilderResult) -> MeasureResult:
        result = RunnerResult(error=builder_result.error, message=builder_result.message)
        return self._make_result(tag, self._setup.device, result)

    def _accept_build_failures(self) -> list[MeasureResult]:
        """Attribute failed builds to their configs, because other builds succeed; retry or return them."""
        failures, self._build_failures.failures = self._build_failures.failures, []
        results = []
        for tag, builder_result in failures:
            assert isinstance(builder_result, BuilderResult)
            entry = self._in_flight[tag]
            if not entry.is_retry and faults.is_retryable(builder_result.message):
                entry.is_retry = True
                self._builder_pool.submit(tag, entry.candidate.schedule, entry.candidate.config)
            else:
                entry.builder_result = builder_result
                results.append(self._make_build_failure(tag, builder_result))
        return results

    def _resolve_build_failures(self) -> list[MeasureResult]:
        """Build the control if builds failed and no other build can decide the cause."""
        failures = self._build_failures
        if not failures.failures or failures.control_tag is not None:
            return []
        if self._control_candidate is None:
            return self._accept_build_failures()
        failed_tags = {tag for tag, _ in failures.failures}
        has_pending = any(
            entry.builder_result.executable is None and tag not in failed_tags and entry.candidate.executable is None
            for tag, entry in self._in_flight.items()
        )
        if len(failures.failures) >= MAX_UNEXPLAINED_FAILURES or not has_pending:
            self._submit_control()
        return []

    def _submit_control(self) -> None:
        """Queue the build of the control unless it is in progress."""
        failures, control = self._build_failures, self._control_candidate
        if failures.control_tag is None and control is not None:
            failures.control_tag, self._next_tag = self._next_tag, self._next_tag + 1
            self._builder_pool.submit(failures.control_tag, control.schedule, control.config)

    @property
    def _control_schedule_name(self) -> str:
        return self._control_candidate.schedule if self._control_candidate else ""

    def _handle_run(self, tag: int, runner: Runner, runner_result: RunnerResult) -> list[MeasureResult]:
        """Return the result of an executable, and the results of failures whose cause it decides."""
        failures = self._run_failures[id(runner)]
        is_doubtful = faults.is_doubtful_run(runner_result.error)
        if tag == failures.control_tag:
            failures.control_tag = None
            if is_doubtful:
                reason = failures.reason if failures.failures else runner_result.message
                explanation = "as a kernel that is known to be right fails too"
                raise HostError(f"{runner.device.text} cannot be measured on, {explanation}: {reason}")
            return self._accept_run_failures(runner)
        if is_doubtful:
            failures.failures.append((tag, runner_result))
            return []
        if runner_result.error is ErrorKind.NONE:
            self._control_executable = self._in_flight[tag].builder_result.executable
        return [*self._accept_run_failures(runner), self._make_run_result(tag, runner, runner_result)]

    def _accept_run_failures(self, runner: Runner) -> list[MeasureResult]:
        """Attribute failed runs to their executables, because another one runs; retry or return them."""
        unexplained = self._run_failures[id(runner)]
        for tag, runner_result in unexplained.failures:
            if self._in_flight[tag].is_retry and faults.is_environment_fault(runner_result.message):
                raise HostError(f"{runner.device.text} cannot be measured on: {runner_result.message}")
        failures, unexplained.failures = unexplained.failures, []
        results = []
        for tag, runner_result in failures:
            assert isinstance(runner_result, RunnerResult)
            entry = self._in_flight[tag]
            if not entry.is_retry and faults.is_retryable(runner_result.message):
                entry.is_retry, entry.runner = True, None
                assert entry.builder_result.executable is not None
                self._ready_executables.append((tag, entry.builder_result.executable))
            else:
                results.append(self._make_run_result(tag, runner, runner_result))
        return results

    def _resolve_run_failures(self, runner: Runner) -> list[MeasureResult]:
        """Run the control if executables failed and no other one can decide the cause."""
        failures = self._run_failures[id(runner)]
        if not failures.failures or failures.control_tag is not None:
            return []
        failed_tags = {tag for tag, _ in failures.failures}
        is_idle = not self._ready_executables and not any(
            entry.runner is runner and tag not in failed_tags for tag, entry in self._in_flight.items()
        )
        if len(failures.failures) < MAX_UNEXPLAINED_FAILURES and not is_idle:
            return []
        if self._control_executable is None:
            if self._control_candidate is None:  # no control is available
                return self._accept_run_failures(runner)
            self._submit_control()
        elif runner.num_free_slots > 0:
            failures.control_tag, self._next_tag = self._next_tag, self._next_tag + 1
            runner.submit(failures.control_tag, self._control_executable, 0.0)
        return []

    def _make_run_result(self, tag: int, runner: Runner, runner_result: RunnerResult) -> MeasureResult:
        """Make the result of a candidate that was run."""
        entry = self._in_flight[tag]
        queue_ms = (time.monotonic() - entry.sent_at) * 1e3 - sum(runner_result.phases.values())
        self._phase_means.add({**runner_result.phases, "queue": queue_ms})
        result = self._make_result(tag, runner.device, runner_result)
        if math.isfinite(result.cost) and not result.is_final:
            candidate = replace(entry.candidate, executable=entry.builder_result.executable)
            fastest = sorted([*self._fastest, (result.cost, candidate)], key=lambda pair: pair[0])
            self._fastest = fastest[:NUM_FINALISTS]
        return result

    def _make_result(self, tag: int, device: Device, runner_result: RunnerResult) -> MeasureResult:
        entry = self._in_flight.pop(tag)
        return MeasureResult(
            workload=self._setup.workload,
            schedule=entry.candidate.schedule,
            config=entry.candidate.config,
            device=device.name,
            target=format_target(device),
            runner_result=runner_result,
            seconds=entry.builder_result.seconds + runner_result.seconds,
            timestamp=time.time(),
            resources=_collect_resources(entry.builder_result.executable),
            versions=self._versions,
            is_final=entry.candidate.is_final,
        )


def format_target(device: Device) -> str:
    """Return the target of a device in AutoTVM's notation, such as "cuda -arch=sm_90" or "opencl"."""
    return f"{device.kind} -arch={device.arch}" if device.arch else device.kind


def _collect_resources(executable: Executable | None) -> dict[str, int]:
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
