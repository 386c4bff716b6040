"""Kernels by their names on command lines: a schedule, a config, the fastest of the logs, or the predicted one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from tvmconv import kernel, registry
from tvmconv.cli.options import parse_assignment, report_fallbacks
from tvmconv.compat import rename_requested_config as _rename
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


def add_log_option(parser: argparse.ArgumentParser, help_prefix: str = "") -> None:
    """Add `--log`, which may be repeated: the logs in which the kernel `tuned` is looked up."""
    parser.add_argument(
        "--log",
        metavar="F",
        action="append",
        default=[],
        help=f"Log, or folder of logs, for {help_prefix}{TUNED} (default: the logs that come with tvmconv).",
    )


def build_named_kernel(
    name: str, workload: Workload, device: Device, knobs: Mapping[str, Value], logs: list[str] | None = None
) -> Kernel:
    """Build the kernel that a command line names.

    Args:
        name: Name of the kernel, in the form that `KERNEL_NAME_HELP` describes.
        workload: Workload that the kernel computes.
        device: Device that the kernel is built for.
        knobs: Values of knobs, which replace those of the name.
        logs: Files and folders in which `tuned` is looked up. By default, the logs that come with tvmconv.

    Raises:
        Error: There is no such schedule, knob or value, the logs have no record of the workload, the cost model does
            not cover the workload, or the kernel cannot be built.
    """
    schedule, _, config_text = name.partition(":")
    if schedule == PREDICTED and not config_text:
        named_kernel = build_predicted(workload, device, time_candidates=False)
        if not named_kernel.prediction and not recommend_configs(workload, device, 1):
            raise Error(f"the cost model has no prediction for {workload} on {device.text}")
    elif TUNED in (name, config_text):
        named_kernel = _build_tuned(workload, device, schedule if config_text else None, logs)
    else:
        config = dict(map(_parse_assignment, config_text.split(":"))) if config_text else {}
        return kernel.build(
            workload,
            registry.find_schedule(workload, schedule),
            device=device,
            config={**_rename(schedule, config), **_rename(schedule, knobs)},
        )
    if not knobs:
        return named_kernel
    renamed_knobs = _rename(named_kernel.schedule.name, knobs)
    return kernel.build(workload, named_kernel.schedule, device=device, config={**named_kernel.config, **renamed_knobs})


def _build_tuned(workload: Workload, device: Device, schedule: str | None, logs: list[str] | None) -> Kernel:
    chosen_schedule = registry.find_schedule(workload, schedule) if schedule else None
    record_index = RecordIndex(list_log_files(logs) if logs else packaged_logs(), workload)
    if next(record_index.iterate_by_device_match(workload, device, schedule), None) is None:
        schedule_text = f" by {schedule}" if schedule else ""
        log_names = ", ".join(logs) if logs else "the logs that come with tvmconv"
        raise Error(f"{log_names}: no record of {workload}{schedule_text} on a device like {device.text}")
    with report_fallbacks():
        return build(workload, chosen_schedule, device=device, log=record_index)


def _parse_assignment(text: str) -> tuple[str, Value]:
    try:
        return parse_assignment(text)
    except argparse.ArgumentTypeError as error:
        raise Error(str(error)) from error
