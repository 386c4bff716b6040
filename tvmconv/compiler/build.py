"""The road from a workload, a schedule and a config to lowered code that fits a device: the only one there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.compiler.lower import lower
from tvmconv.compiler.lowered import Lowered
from tvmconv.compiler.program import check_fits
from tvmconv.user_code import user_code

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

    from tvmconv.gpu import Limits
    from tvmconv.knobs import Config, Value
    from tvmconv.library import Schedule
    from tvmconv.workloads import Workload

Watch = Callable[[str], AbstractContextManager[Any]]  # around the stage of that name


@dataclass(frozen=True)
class Built:
    """What came of a config.

    Attributes:
        config: the value of every knob.
        tir: the scheduled module.
        lowered: its device functions.
    """

    config: Config
    tir: IRModule
    lowered: Lowered


def build(
    workload: Workload,
    schedule: Schedule,
    config: Mapping[str, Value] | None,
    target: Target,
    limits: Limits,
    place: str,
    watch: Watch = lambda stage: nullcontext(),
) -> Built:
    """Apply a schedule to a workload, and lower what comes of it.

    Args:
        workload: what to compute.
        schedule: how.
        config: values by knob name; the other knobs take their defaults.
        target: a TVM target with a host.
        limits: what a block may have at most.
        place: what the device is called, for messages.
        watch: is entered around the stages `apply` and `lower`, to time them.

    Raises:
        KnobError: no such knob, or not a value that it takes.
        ScheduleError: TVM cannot schedule the workload this way.
        CompileError: the schedule does not lower.
        ScheduleFailure: the schedule's own code raises, or what it made raises an exception where it is lowered.
        DeviceError: the kernel exceeds the limits.
    """
    with watch("apply"):
        scheduled, knobs = schedule.apply(workload, config)
    with watch("lower"), user_code(f"schedule {schedule.name}", schedule.function.__module__):
        lowered = lower(scheduled.mod, target)
    check_fits(lowered.steps, limits, place)
    return Built(knobs.config, scheduled.mod, lowered)
