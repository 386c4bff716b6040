"""Kernels for the convolutions of a Relax module: scheduled functions of TIR, or compiled code for CUDA."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv import devices
from tvmconv.compiler.device_lowering import needs_pass_options
from tvmconv.compiler.executable import Executable
from tvmconv.cost_model.predict import Prediction
from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.errors import CompileError, DeviceError, Error, ScheduleError
from tvmconv.kernel import Kernel, build_for_device
from tvmconv.logs.candidates import Candidate
from tvmconv.logs.packaged import packaged_logs
from tvmconv.logs.ranking import RecordIndex, list_log_files
from tvmconv.measure import kernel_cache
from tvmconv.measure.builder import BuilderInput, build_all
from tvmconv.measure.predictions import recommend_for_all
from tvmconv.measure.workers.pool import keep_workers_alive
from tvmconv.relax.candidate_queue import CandidateQueue
from tvmconv.relax.compile_target import CompileTarget
from tvmconv.relax.launcher import check_executable
from tvmconv.relax.packing import PackedExecutable, pack_weight, remove_prepack_kernels
from tvmconv.search.options import TuneOptions
from tvmconv.search.task_scheduler import tune_tasks
from tvmconv.space import Config
from tvmconv.workloads import Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm.tirx import PrimFunc

DEFAULT_LOG = "tuning.jsonl"
DECLARATION = "plain loops"  # name of what runs on a CPU, where no schedule of tvmconv applies
OPAQUE_PATTERN = 8  # OpPatternKind::kOpaque, with which FuseOps leaves a function alone
PREDICTION_FRACTION = 0.2  # of the time of a search at most, for predictions before it
NUM_FIRST_CONFIGS = 3  # predicted configs of a workload that its search tries first
MIN_TRIALS = 8  # of a search whose fastest config comes before predictions, even if one seems to be clearly faster
WORKLOAD_ATTRIBUTE = "tvmconv.workload"


@dataclass(frozen=True)
class FoundKernel:
    """A kernel that a library of TVM can call: either a function of TIR or compiled code for CUDA."""

    symbol: str
    schedule: str
    config_source: str
    function: PrimFunc | None = None
    executable: Executable | None = None
    seconds: float | None = None  # measured or predicted seconds per launch
    config: Config = field(default_factory=dict)
    build: Callable[[], Kernel] | None = None  # builds the compiled kernel again, with its TIR

    @functools.cached_property
    def packed(self) -> PackedExecutable | None:
        """The compiled kernel for packed weights; None if it packs no weight."""
        if self.executable is None or not self.executable.num_prepack_kernels:
            return None
        return remove_prepack_kernels(self.executable)

    def pack_weight(self, weight: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the packed arrays of a weight that has the memory order of the kernel."""
        assert self.packed is not None
        assert self.build is not None
        workspace = pack_weight(self.build().lowered_module, weight)
        return [workspace[index] for index in self.packed.packed_indices]


class KernelFinder:
    """A source of kernels for a target: from a log, from the packaged logs, or predicted.

    Args:
        target: What the kernels are for.
        log: Path of a log; None for the packaged logs alone.
        creates_log: Whether the log may be missing, because a search will write it.
        needs_functions: Whether kernels for CUDA are functions of TIR, too, and not compiled code.
    """

    def __init__(
        self,
        target: CompileTarget,
        log: str | os.PathLike[str] | None,
        *,
        creates_log: bool = False,
        needs_functions: bool = False,
    ) -> None:
        self._target, self._log, self._creates_log = target, log, creates_log
        self._needs_functions = needs_functions
        self._record_index: RecordIndex | None = None
        self._found: dict[str, FoundKernel | Error] = {}
        self._searched: set[Workload] = set()
        self._predictions: dict[Workload, Sequence[Prediction]] = {}

    def search(self, workloads: Mapping[Workload, int], seconds: float) -> None:
        """Search for kernels of the workloads that the log does not cover, and append the measurements to the log.

        Raises:
            DeviceError: The target has no device to measure on.
        """
        device = self.check_device()
        log = self._log = self._log or DEFAULT_LOG
        index = RecordIndex([log] if Path(log).exists() else [])
        remaining = {w: count for w, count in workloads.items() if not any(index.iterate_on_device(w, device))}
        options, deadline = TuneOptions(log=log, measure_baseline=False), Deadline.after(seconds)
        with keep_workers_alive():
            prediction_deadline = deadline.reserve_seconds(seconds * (1 - PREDICTION_FRACTION))
            predictions = recommend_for_all([*remaining], device, deadline=prediction_deadline)
            self._predictions.update(predictions)
            first_configs = {
                workload: [(each.schedule, each.config) for each in best[:NUM_FIRST_CONFIGS]]
                for workload, best in predictions.items()
            }
            for _, run_search in tune_tasks(
                remaining, [device], options, deadline=deadline, first_configs=first_configs
            ):
                try:
                    run_search(lambda progress: None)
                except ScheduleError:  # no schedule computes it; `find` says so again
                    continue
        self._record_index = None
        self._searched.update(remaining)
        self._found.clear()  # kernels from before the search

    def check_device(self) -> Device:
        """Return the device to measure on; raise DeviceError if the target has none."""
        device = self._target.device
        if device is None or isinstance(device, devices.Arch):
            name = device.text if device else self._target.target.kind.name
            raise DeviceError(f"a search measures on a GPU of the target, and {name} is none: omit seconds")
        return device

    def build(self, workloads: Iterable[Workload]) -> None:
        """Build the kernels of workloads, which `find` returns; several processes compile kernels for CUDA."""
        remaining = {workload.text: workload for workload in workloads if workload.text not in self._found}
        device = self._target.device
        if device is not None and device.kind == "cuda" and not self._needs_functions:
            self._build_for_cuda(list(remaining.values()), device)
            return
        for text, workload in remaining.items():
            try:
                self._found[text] = self._make_function(workload)
            except Error as error:
                self._found[text] = error

    def find(self, workload: Workload) -> FoundKernel:
        """Return the kernel of a workload.

        Raises:
            Error: No schedule computes the workload on the target in a form that TVM's runtime can call.
        """
        self.build([workload])
        result = self._found[workload.text]
        if isinstance(result, Error):
            raise result
        return result

    def _build_for_cuda(self, workloads: Sequence[Workload], device: Device) -> None:
        """Build the best candidate of each workload, and the next one where it fails."""
        logs = self.read_logs()
        few_trials = {each for each in workloads if each in self._searched and self._has_few_trials(each, device)}
        unrecorded = [each for each in workloads if not any(logs.iterate_applicable_records(each, device))]
        unpredicted = [each for each in {*unrecorded, *few_trials} if each not in self._predictions]
        self._predictions.update(recommend_for_all(unpredicted, device))
        candidates = {
            each.text: CandidateQueue(
                logs, each, device, self._predictions.get(each), prefers_clear_prediction=each in few_trials
            )
            for each in workloads
        }
        while batch := [(queue, queue.candidate) for queue in candidates.values() if queue.advance()]:
            executables = _build_executables([(queue.workload, candidate) for queue, candidate in batch], device)
            for (queue, candidate), executable in zip(batch, executables, strict=True):
                try:
                    if isinstance(executable, Error):
                        raise executable
                    self._found[queue.workload.text] = _make_external(queue, candidate, executable, device)
                    del candidates[queue.workload.text]
                except Error as error:
                    queue.add_failure(error)
        for text, queue in candidates.items():
            self._found[text] = queue.error

    def _has_few_trials(self, workload: Workload, device: Device) -> bool:
        """Return whether all that is known about a workload is what a search has measured before it was cut off."""
        if self._log is None or not Path(self._log).exists():
            return False
        number = _count_trials(RecordIndex([self._log]), workload, device)
        return 0 < number < MIN_TRIALS and number == _count_trials(self.read_logs(), workload, device)

    def _make_function(self, workload: Workload) -> FoundKernel:
        """Return the best candidate that builds as a function of TIR."""
        device = self._target.device
        if device is None:
            return FoundKernel(make_symbol(workload), DECLARATION, "", declare_function(workload))
        queue = CandidateQueue(self.read_logs(), workload, device)
        while queue.advance():
            try:
                kernel = build_for_device(workload, queue.candidate.schedule, device, queue.candidate.config)
            except Error as error:
                queue.add_failure(error)
                continue
            if (reason := _explain_external(kernel)) is None:
                return _make_scheduled(kernel, queue)
            queue.refuse_schedule(reason)
        raise queue.error

    def read_logs(self) -> RecordIndex:
        """Return the records of the log and of the packaged logs."""
        if self._record_index is None:
            log = None if self._log is None or (self._creates_log and not Path(self._log).exists()) else self._log
            logs = [] if log is None else list_log_files([log])
            self._record_index = RecordIndex([*logs, *packaged_logs()])
        return self._record_index


def _count_trials(index: RecordIndex, workload: Workload, device: Device) -> int:
    """Return the number of measurements of a workload on a device, at most `MIN_TRIALS`."""
    return sum(1 for _ in islice(index.iterate_on_device(workload, device), MIN_TRIALS))


def make_symbol(workload: Workload) -> str:
    """Return the name of a workload's function in a module.

    Example:
        >>> import tvmconv
        >>> make_symbol(tvmconv.parse("conv2d:1x8x9x9,8x8x3x3,s1,p1,relu"))
        'tvmconv_conv2d_1x8x9x9_8x8x3x3_s1_p1_relu'
    """
    return "tvmconv_" + re.sub(r"\W", "_", workload.text)


def declare_function(workload: Workload) -> PrimFunc:
    """Return the declaration of a workload as a function that TVM may schedule, marked with the workload's text."""
    marks = {
        "global_symbol": make_symbol(workload),
        "op_pattern": OPAQUE_PATTERN,
        WORKLOAD_ATTRIBUTE: workload.text,
    }
    return workload.prim_func().with_attrs(marks)


def _build_executables(inputs: Sequence[tuple[Workload, Candidate]], device: Device) -> list[Executable | Error]:
    """Compile candidates for CUDA, those that are not cached in parallel, and return each result or error."""
    results: list[Executable | Error | None] = [
        kernel_cache.lookup(workload, candidate.schedule.name, candidate.config, device)
        for workload, candidate in inputs
    ]
    missing = [index for index, result in enumerate(results) if result is None]
    built = build_all(
        [BuilderInput(inputs[index][0], inputs[index][1].schedule, inputs[index][1].config) for index in missing],
        device,
    )
    for index, result in zip(missing, built, strict=True):
        workload, candidate = inputs[index]
        if result.executable is None:
            results[index] = CompileError(result.message)
            continue
        results[index] = result.executable
        kernel_cache.store(workload, candidate.schedule, candidate.config, device, result.executable)
    return results  # type: ignore[return-value]


def _make_external(queue: CandidateQueue, candidate: Candidate, executable: Executable, device: Device) -> FoundKernel:
    """Return a compiled kernel as an external function; raise CompileError if it cannot be one."""
    check_executable(executable, candidate.schedule.name)
    return FoundKernel(
        make_symbol(queue.workload),
        candidate.schedule.name,
        queue.config_source,
        executable=executable,
        seconds=candidate.seconds,
        config=candidate.config,
        build=functools.cache(
            functools.partial(build_for_device, queue.workload, candidate.schedule, device, candidate.config)
        ),
    )


def _explain_external(kernel: Kernel) -> str | None:
    """Return why a kernel cannot be a function of TIR in a module of TVM; None if it can."""
    name, lowered = kernel.schedule.name, kernel.lowered_module
    if lowered.num_prepack_kernels:
        return f"{name} packs the weight in a launch of its own, at each call"
    for argument, scope in kernel.memory_scopes.items():
        if scope != "global":
            return f"{name} has {argument} in {scope} memory: expected global memory"
    if any(each.tensor_maps or math.prod(each.launch.cluster) > 1 for each in lowered.kernels):
        return f"{name} needs tensor maps or clusters, which TVM's runtime does not have"
    if needs_pass_options(kernel.tir):
        return f"{name} needs options of TVM's passes that hold for a whole module"
    return None


def _make_scheduled(kernel: Kernel, queue: CandidateQueue) -> FoundKernel:
    """Return a kernel as a scheduled function of TIR."""
    symbol = make_symbol(queue.workload)
    attributes = {"global_symbol": symbol, "tirx.is_scheduled": True, "op_pattern": OPAQUE_PATTERN}
    return FoundKernel(
        symbol,
        kernel.schedule.name,
        queue.config_source,
        function=kernel.tir["main"].with_attrs(attributes),
        seconds=queue.candidate.seconds,
        config=kernel.config,
    )
