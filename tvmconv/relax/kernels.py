"""Kernels for the convolutions of a Relax module: scheduled functions of TIR, or compiled modules for CUDA."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv import devices
from tvmconv.analysis.predicted_time import estimate_schedule_seconds
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.errors import CompileError, DeviceError, Error, ScheduleError
from tvmconv.kernel import Kernel, build_for_device
from tvmconv.logs.candidates import iterate_candidates
from tvmconv.logs.packaged import packaged_logs
from tvmconv.logs.ranking import DeviceMatch, RecordIndex, list_log_files
from tvmconv.measure.workers.pool import keep_workers_alive
from tvmconv.search.options import TuneOptions
from tvmconv.search.task_scheduler import tune_tasks
from tvmconv.space import Config
from tvmconv.workloads import Workload

if TYPE_CHECKING:
    from tvm.target import Target
    from tvm.tirx import PrimFunc

DEFAULT_LOG = "tuning.jsonl"
DECLARATION = "plain loops"  # name of what runs on a CPU, where no schedule of tvmconv applies
OPAQUE_PATTERN = 8  # OpPatternKind::kOpaque, with which FuseOps leaves a function alone
MAX_CANDIDATES = 8  # configs of a workload that may fail to build
WORKLOAD_ATTRIBUTE = "tvmconv.workload"


@dataclass(frozen=True)
class FoundKernel:
    """A kernel that TVM's runtime can call: either a function of TIR or a compiled module that exports the symbol."""

    symbol: str
    schedule: str
    config_source: str
    function: PrimFunc | None = None
    runtime_module: Any = None
    seconds: float | None = None  # by the schedule's estimate
    config: Config = field(default_factory=dict)


@dataclass(frozen=True)
class CompileTarget:
    """A target of TVM, and tvmconv's device for it; the device is None for a CPU."""

    target: Target
    device: Device | None


def resolve_target(target: str | Target) -> CompileTarget:
    """Return the target and the device of a text such as "sm_90", "cuda:0", "opencl:0" or "llvm", or of a target.

    Raises:
        DeviceError: There is no such device or architecture, or the kind of the target is not cuda, opencl or llvm.
    """
    from tvm.target import Target

    if isinstance(target, str) and not re.match(r"llvm\b", target):
        device = devices.find_device(target)
        return CompileTarget(device.make_target(), device)
    resolved = Target(target) if isinstance(target, str) else target
    match resolved.kind.name:
        case "llvm":
            return CompileTarget(resolved, None)
        case "opencl":
            return CompileTarget(resolved, devices.find_device("opencl:0"))
        case "cuda":
            return CompileTarget(resolved, _find_cuda_device(str(resolved.attrs["arch"])))
    raise DeviceError(f"target {resolved.kind.name}: expected cuda, opencl or llvm")


def _find_cuda_device(arch: str) -> Device:
    """Return the first GPU of an architecture, or the architecture itself where there is none."""
    gpus = [status.device for status in devices.list_devices() if status.device and status.device.kind == "cuda"]
    return next((gpu for gpu in gpus if str(gpu.arch).rstrip("a") == arch.rstrip("a")), devices.Arch(arch))


class KernelFinder:
    """A source of kernels for a target: from a log, from the packaged logs, or predicted.

    Args:
        target: What the kernels are for.
        log: Path of a log; None for the packaged logs alone.
        creates_log: Whether the log may be missing, because a search will write it.
    """

    def __init__(self, target: CompileTarget, log: str | os.PathLike[str] | None, *, creates_log: bool = False) -> None:
        self._target, self._log, self._creates_log = target, log, creates_log
        self._record_index: RecordIndex | None = None
        self._found: dict[str, FoundKernel | Error] = {}

    def search(self, workloads: Mapping[Workload, int], seconds: float) -> None:
        """Search for kernels of the workloads that the log does not cover, and append the measurements to the log.

        Raises:
            DeviceError: The target has no device to measure on.
        """
        device = self._target.device
        if device is None or isinstance(device, devices.Arch):
            name = device.text if device else self._target.target.kind.name
            raise DeviceError(f"a search measures on a GPU of the target, and {name} is none: omit seconds")
        log = self._log = self._log or DEFAULT_LOG
        index = RecordIndex([log]) if Path(log).exists() else None
        remaining = {w: count for w, count in workloads.items() if not (index and _is_measured(index, w, device))}
        options = TuneOptions(log=log, measure_baseline=False)
        with keep_workers_alive():
            for _, run_search in tune_tasks(remaining, [device], options, deadline=Deadline.after(seconds)):
                try:
                    run_search(lambda progress: None)
                except ScheduleError:  # no schedule computes it; `find` says so again
                    continue
        self._record_index = None
        self._found.clear()  # kernels that were found before the search, to estimate layouts

    def find(self, workload: Workload) -> FoundKernel:
        """Return the kernel of a workload.

        Raises:
            Error: No schedule computes the workload on the target in a form that TVM's runtime can call.
        """
        if workload.text not in self._found:
            try:
                self._found[workload.text] = self._make(workload)
            except Error as error:
                self._found[workload.text] = error
        result = self._found[workload.text]
        if isinstance(result, Error):
            raise result
        return result

    def _make(self, workload: Workload) -> FoundKernel:
        symbol, device = make_symbol(workload), self._target.device
        if device is None:
            return FoundKernel(symbol, DECLARATION, "", declare_function(workload))
        first_error: Error | None = None
        refused_schedules: set[Any] = set()  # whose kernels TVM's runtime cannot call, with any config
        num_failures = 0
        for candidate in iterate_candidates(self._read_logs(), workload, device):
            if candidate.schedule in refused_schedules:
                continue
            try:
                kernel = build_for_device(workload, candidate.schedule, device, candidate.config)
            except Error as error:
                first_error, num_failures = first_error or error, num_failures + 1
                if num_failures >= MAX_CANDIDATES:
                    break
                continue
            try:
                source = candidate.config_source + (f"; a better one failed: {first_error}" if first_error else "")
                return _make_callable(kernel, symbol, source)
            except Error as error:
                first_error = first_error or error
                refused_schedules.add(candidate.schedule)
        raise first_error or ScheduleError(f"no schedule computes {workload} on {device.text}")

    def _read_logs(self) -> RecordIndex:
        if self._record_index is None:
            log = None if self._log is None or (self._creates_log and not Path(self._log).exists()) else self._log
            logs = [] if log is None else list_log_files([log])
            self._record_index = RecordIndex([*logs, *packaged_logs()])
        return self._record_index


def _is_measured(index: RecordIndex, workload: Workload, device: Device) -> bool:
    match, _ = next(index.iterate_by_device_match(workload, device), (None, None))
    return match is DeviceMatch.DEVICE


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


def _make_callable(kernel: Kernel, symbol: str, config_source: str) -> FoundKernel:
    """Return a kernel as TVM's runtime calls it; raise CompileError if it cannot.

    A CUDA kernel is compiled here, because a module has one set of compiler options for all of its functions, and
    schedules need different ones. The text and the machine code are thus those that were measured.
    """
    if kernel.lowered_module.num_prepack_kernels:
        raise CompileError(f"{kernel.schedule.name} packs the weight in a launch of its own, at each call")
    for name, scope in kernel.memory_scopes.items():
        if scope != "global":
            raise CompileError(f"{kernel.schedule.name} has {name} in {scope} memory: expected global memory")
    seconds = estimate_schedule_seconds(kernel)
    function = kernel.tir["main"].with_attr("global_symbol", symbol)
    found = FoundKernel(symbol, kernel.schedule.name, config_source, seconds=seconds, config=kernel.config)
    if kernel.device.kind == "cuda":
        from tvm.ir import IRModule

        lowered = lower_module(IRModule({"main": function}), kernel.device.make_target())
        return replace(found, runtime_module=lowered.build_runtime_module())
    return replace(found, function=function.with_attrs({"tirx.is_scheduled": True, "op_pattern": OPAQUE_PATTERN}))
