"""Kernels by their names on command lines: a schedule, a config, the fastest of the logs, or the predicted one."""

from __future__ import annotations

from collections.abc import Mapping

from tvmconv import kernel, registry
from tvmconv.cli.options import OptionGroup, add_option, parse_assignment, report_fallbacks
from tvmconv.compat import rename_requested_config
from tvmconv.cost_model.recommend import recommend_configs
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.kernel import Kernel
from tvmconv.logs.build import build
from tvmconv.logs.packaged import packaged_logs
from tvmconv.logs.ranking import RecordIndex, list_log_files
from tvmconv.predicted_kernel import build_predicted
from tvmconv.space import Value
from tvmconv.workloads import Workload

TUNED, PREDICTED = "tuned", "predicted"
KERNEL_NAME_HELP = (
    "Kernel: a schedule such as vthread; a schedule with knobs such as tiling:tile_rc=-1,1,4:tile_rh=-1,1,1; "
    f"{TUNED} for the fastest kernel of the logs; direct:{TUNED} for the fastest of one schedule; "
    f"{PREDICTED} for the kernel that the cost model predicts to be the fastest"
)


def add_log_option(parser: OptionGroup, help_prefix: str = "") -> None:
    """Add `--log`: the logs in which the kernel `tuned` is looked up."""
    text = f"Log, or folder of logs, for {help_prefix}{TUNED} (default: the logs that come with tvmconv)"
    add_option(parser, "--log", "F", text, repeat=True)


def build_named_kernel(
    name: str, workload: Workload, device: Device, knobs: Mapping[str, Value], logs: list[str]
) -> Kernel:
    """Build the kernel that a command line names, as `KERNEL_NAME_HELP` describes; `knobs` replace those of the name.
    `tuned` is looked up in `logs`, by default in those that come with tvmconv.
    """
    schedule_name, _, config_text = name.partition(":")
    if name == PREDICTED:
        named_kernel = build_predicted(workload, device, time_candidates=False)
        if not named_kernel.prediction and not recommend_configs(workload, device, 1):
            raise Error(f"the cost model has no prediction for {workload} on {device.text}")
    elif TUNED in (name, config_text):
        named_kernel = _build_tuned(workload, device, schedule_name if config_text else None, logs)
    else:
        schedule = registry.find_schedule(workload, schedule_name)
        config = dict(map(parse_assignment, config_text.split(":"))) if config_text else {}
        config = {**rename_requested_config(schedule_name, config), **rename_requested_config(schedule_name, knobs)}
        return kernel.build(workload, schedule, device=device, config=config)
    if not knobs:
        return named_kernel
    schedule = named_kernel.schedule
    config = {**named_kernel.config, **rename_requested_config(schedule.name, knobs)}
    return kernel.build(workload, schedule, device=device, config=config)


def _build_tuned(workload: Workload, device: Device, schedule_name: str | None, logs: list[str]) -> Kernel:
    schedule = registry.find_schedule(workload, schedule_name) if schedule_name else None
    record_index = RecordIndex(list_log_files(logs) if logs else packaged_logs(), workload)
    if next(record_index.iterate_by_device_match(workload, device, schedule_name), None) is None:
        schedule_text = f" by {schedule_name}" if schedule_name else ""
        log_names = ", ".join(logs) or "the logs that come with tvmconv"
        raise Error(f"{log_names}: no record of {workload}{schedule_text} on a device like {device.text}")
    with report_fallbacks():
        return build(workload, schedule, device=device, log=record_index)
