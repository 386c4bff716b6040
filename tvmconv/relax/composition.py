"""Schedules for pipelines of one's own: a rule of dlight, and a database for `MetaScheduleApplyDatabase`.

Both schedule functions of TIR that `declare_convolutions` has marked with their workloads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from tvm.ir import IRModule

from tvmconv import registry
from tvmconv.errors import DeviceError, Error, ModelError
from tvmconv.logs.candidates import Candidate, iterate_candidates
from tvmconv.relax.candidate_queue import MAX_CANDIDATES
from tvmconv.relax.compile_target import resolve_target
from tvmconv.relax.kernels import WORKLOAD_ATTRIBUTE, KernelFinder
from tvmconv.workloads import Workload, parse

if TYPE_CHECKING:
    from tvm.s_tir import Schedule
    from tvm.target import Target
    from tvm.tirx import PrimFunc

UNKNOWN_SECONDS = 1.0  # MetaSchedule ignores records without a time, and cannot read infinity


def dlight_rule(*, log: str | os.PathLike[str] | None = None) -> Any:
    """Return a rule for `tvm.s_tir.dlight.ApplyDefaultSchedule` that schedules the functions of `declare_convolutions`.

    It leaves other functions, and those without a kernel that TVM's passes can lower, to the rules that follow it.
    Kernels with tensor maps or clusters are therefore left out; `optimize` has them.

    Args:
        log: Path of a tuning log, from which kernels are taken.

    Examples:
        >>> import tvmconv.relax
        >>> from tvm.s_tir import dlight
        >>> rules = tvmconv.relax.dlight_rule(), dlight.gpu.Fallback()
        >>> mod = dlight.ApplyDefaultSchedule(*rules)(mod)  # doctest: +SKIP
    """
    from tvm.s_tir import dlight

    finders: dict[str, KernelFinder] = {}

    @dlight.base.ScheduleRule.from_callable("tvmconv")
    def rule(function: PrimFunc, target: Target, _tunable: bool) -> Schedule | None:
        from tvm.s_tir import Schedule

        workload = _read_workload(function)
        if workload is None:
            return None
        if str(target) not in finders:
            finders[str(target)] = KernelFinder(resolve_target(target), log, needs_functions=True)
        try:
            scheduled = finders[str(target)].find(workload).function
        except Error:
            return None
        assert scheduled is not None
        return Schedule(IRModule({"main": scheduled.with_attrs(function.attrs)}))

    return rule


def export_database(
    mod: IRModule,
    target: str | Mapping[str, Any] | Target,
    folder: str | os.PathLike[str],
    *,
    log: str | os.PathLike[str] | None = None,
) -> dict[str, str]:
    """Write a database of MetaSchedule with a schedule for each function that `declare_convolutions` has marked.

    Pass the folder to `relax.transform.MetaScheduleApplyDatabase(work_dir)`. A database stores traces of scheduling
    primitives, so it has schedules that consist of these alone; those of tensor cores emit TIR themselves.

    Args:
        mod: Module of `declare_convolutions`.
        target: Target for CUDA or OpenCL, as in `optimize`. The database is for this target.
        folder: Folder to write to; records are appended to those that it has.
        log: Path of a tuning log, from which configs are taken.

    Returns:
        The name of the schedule by the workload's text, for each function that has one.

    Raises:
        ModelError: No function of the module is marked.
        DeviceError: The target has no schedules.
        Error: The log cannot be read.
    """
    from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

    compile_target = resolve_target(target)
    if compile_target.device is None:
        raise DeviceError(f"target {compile_target.target.kind.name} has no schedules: expected cuda or opencl")
    functions = {function: workload for function in mod.functions.values() if (workload := _read_workload(function))}
    if not functions:
        raise ModelError("no function is marked with a workload: call declare_convolutions first")
    finder = KernelFinder(compile_target, log)
    os.makedirs(folder, exist_ok=True)
    database = JSONDatabase(work_dir=os.fspath(folder))
    names: dict[str, str] = {}
    for function, workload in functions.items():
        candidates = iterate_candidates(finder.read_logs(), workload, compile_target.device)
        for candidate, trace in _iterate_traces(function, workload, candidates, compile_target.device):
            entry = database.commit_workload(IRModule({"main": function}))
            seconds = [candidate.seconds or UNKNOWN_SECONDS]
            database.commit_tuning_record(TuningRecord(trace, entry, seconds, compile_target.target))
            names[workload.text] = candidate.schedule.name
            break
    return names


def _read_workload(function: Any) -> Workload | None:
    """Return the workload that a function of TIR is marked with; None for another function."""
    attributes = getattr(function, "attrs", None)
    return parse(str(attributes[WORKLOAD_ATTRIBUTE])) if attributes and WORKLOAD_ATTRIBUTE in attributes else None


def _iterate_traces(
    function: PrimFunc, workload: Workload, candidates: Iterator[Candidate], device: Any
) -> Iterator[tuple[Candidate, Any]]:
    """Yield the candidates whose traces, applied to the function, give the scheduled program, and these traces.

    After `MAX_CANDIDATES` others, the default configs of the target's schedules follow.
    """
    from tvm.s_tir import Schedule
    from tvm_ffi import structural_equal

    defaults = (
        Candidate(schedule, schedule.space(workload, device.limits).default, "")
        for schedule in reversed(registry.schedules(workload))  # the simplest ones are listed first
        if schedule.can_run_on(device.kind, device.arch)
    )
    for candidate in (*islice(candidates, MAX_CANDIDATES), *defaults):
        try:
            scheduled = candidate.schedule.apply(workload, candidate.config)[0]
            replayed = Schedule(IRModule({"main": function}))
            scheduled.trace.apply_to_schedule(replayed, remove_postproc=False)
        except (Error, AttributeError, ValueError, RuntimeError):  # the schedule emits TIR, which no trace contains
            continue
        if structural_equal(*(each.mod["main"].body for each in (replayed, scheduled)), map_free_vars=True):
            yield candidate, replayed.trace
