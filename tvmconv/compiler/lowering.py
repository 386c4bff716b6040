"""The road from a workload, a schedule and a config to lowered code that fits a device: the only one there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.compiler.device_lowering import lower_module
from tvmconv.compiler.executable import check_block_limits
from tvmconv.compiler.lowered_module import LoweredModule
from tvmconv.user_code import translate_user_errors

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

    from tvmconv.gpu_specs import BlockLimits
    from tvmconv.registry import Schedule
    from tvmconv.space import Config, Value
    from tvmconv.workloads import Workload

TimePhase = Callable[[str], AbstractContextManager[Any]]  # around the stage of that name


@dataclass(frozen=True)
class LoweringResult:
    """What came of a config.

    Attributes:
        config: the value of every knob.
        tir: the scheduled module.
        lowered: its device functions.
    """

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
    """Apply a schedule to a workload, and lower what comes of it.

    Args:
        workload: what to compute.
        schedule: how.
        config: values by knob name; the other knobs take their defaults.
        target: a TVM target with a host.
        limits: what a block may have at most.
        device_name: what the device is called, for messages.
        time_phase: is entered around the stages `apply` and `lower_module`, to time them.

    Raises:
        KnobError: no such knob, or not a value that it takes.
        ScheduleError: TVM cannot schedule the workload this way.
        CompileError: the schedule does not lower.
        ScheduleFailure: the schedule's own code raises, or what it made raises an exception where it is lowered.
        DeviceError: the kernel exceeds the limits.
    """
    with time_phase("apply"):
        scheduled, knobs = schedule.apply(workload, config)
    with time_phase("lower"), translate_user_errors(f"schedule {schedule.name}", schedule.function.__module__):
        lowered = lower_module(scheduled.mod, target)
    check_block_limits(lowered.kernels, limits, device_name)
    return LoweringResult(knobs.config, scheduled.mod, lowered)
