"""Lowering pipeline from a workload, a schedule and a config to device functions that fit a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tvmconv.compiler.device_lowering import lower_module
from tvmconv.compiler.executable import ArrayType, check_block_limits
from tvmconv.compiler.lowered_module import LoweredModule
from tvmconv.registry import Schedule
from tvmconv.space import Config, Value
from tvmconv.target import BlockLimits
from tvmconv.user_code import translate_user_errors
from tvmconv.workloads import Workload
from tvmconv.workloads.dtypes import FLOAT8_DTYPES

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

TimePhase = Callable[[str], AbstractContextManager[Any]]  # context manager around a phase with a name


@dataclass(frozen=True)
class LoweringResult:
    """Value of each knob, scheduled module and lowered module."""

    config: Config
    tir: IRModule
    lowered: LoweredModule


def lower_schedule(
    workload: Workload,
    schedule: Schedule,
    config: Mapping[str, Value] | None,
    target: Target,
    limits: BlockLimits,
    device_name: str,
    time_phase: TimePhase = lambda stage: nullcontext(),
) -> LoweringResult:
    """Apply a schedule to a workload and lower the result, for a target with a host.

    Knobs that `config` does not name take their defaults. `limits` are the maximum resources of a block, `device_name`
    is for messages, and the context of `time_phase` is entered around the phases "apply" and "lower", to time them.

    Raises:
        KnobError: A knob is unknown, or its value is not accepted.
        ScheduleError: TVM cannot schedule the workload in this way.
        CompileError: The schedule does not lower.
        ScheduleFailure: The code of the schedule, or the lowering of its result, raised an exception.
        DeviceError: The kernel exceeds the limits.
    """
    with time_phase("apply"):
        scheduled, knobs = schedule.apply(workload, config)
    with time_phase("lower"), translate_user_errors(f"schedule {schedule.name}", schedule.function.__module__):
        lowered = lower_module(scheduled.mod, target)
    lowered = replace(lowered, arrays=_name_8_bit_floats(lowered.arrays, workload.argument_dtypes))
    check_block_limits(lowered.kernels, limits, device_name)
    return LoweringResult(knobs.config, scheduled.mod, lowered)


def _name_8_bit_floats(arrays: Sequence[ArrayType], dtypes: Sequence[str]) -> tuple[ArrayType, ...]:
    """Return arrays with the dtypes of a workload's 8-bit floats, whose bits TIR has as integers."""
    named = zip(arrays, dtypes, strict=True)
    return tuple(replace(array, dtype=dtype) if dtype in FLOAT8_DTYPES else array for array, dtype in named)
