"""Kernels as a command line names them: a schedule, a config of it, the fastest of the logs, or the predicted one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from tvmconv import kernel, library
from tvmconv.cli.options import assignment, told_fallbacks
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.kernel import Kernel
from tvmconv.knobs import Value
from tvmconv.knowledge.choose import promising
from tvmconv.logs.best import Rankings, log_files
from tvmconv.logs.build import build
from tvmconv.logs.shipped import shipped_logs
from tvmconv.predicted import build_predicted
from tvmconv.workloads import Workload

TUNED, PREDICTED = "tuned", "predicted"
NAMED = (
    f"such as vthread; tiling:tile_rc=-1,1,4:tile_rh=-1,1,1 with these knobs; {TUNED}, the fastest of the logs; "
    f"direct:{TUNED}, that of a schedule; {PREDICTED}, what the model takes to be the fastest"
)


def add_log(parser: argparse.ArgumentParser, what: str = "") -> None:
    """Add `--log`, any number of times, where `tuned` looks."""
    parser.add_argument(
        "--log",
        metavar="F",
        action="append",
        default=[],
        help=f"a log, or a folder of logs, {what}of {TUNED} (default: the logs that come with tvmconv)",
    )


def named(
    name: str, workload: Workload, device: Device, knobs: Mapping[str, Value], logs: list[str] | None = None
) -> Kernel:
    """Build the kernel of a name.

    Args:
        name: as `NAMED` has it.
        workload: what to compute.
        device: where it is to run.
        knobs: values that it gets whatever its name says of them.
        logs: of `tuned`, by default those that come with tvmconv.

    Raises:
        Error: no schedule, knob or value is called so, the logs have no record or the model knows nothing of the
            workload, or it cannot be built.
    """
    schedule, _, rest = name.partition(":")
    if schedule == PREDICTED and not rest:
        found = build_predicted(workload, device, check=False)
        if not found.prediction and not promising(workload, device, 1):
            raise Error(f"the model knows nothing of {workload} on {device.text}")
    elif TUNED in (name, rest):
        found = _tuned(workload, device, schedule if rest else None, logs)
    else:
        config = dict(map(_assigned, rest.split(":"))) if rest else {}
        return kernel.build(workload, library.find(workload, schedule), device=device, config={**config, **knobs})
    if not knobs:
        return found
    return kernel.build(workload, found.schedule, device=device, config={**found.config, **knobs})


def _tuned(workload: Workload, device: Device, schedule: str | None, logs: list[str] | None) -> Kernel:
    chosen = library.find(workload, schedule) if schedule else None
    rankings = Rankings(log_files(logs) if logs else shipped_logs(), workload)
    if next(rankings.nearest_first(workload, device, schedule), None) is None:
        of = f" by {schedule}" if schedule else ""
        where = ", ".join(logs) if logs else "the logs that come with tvmconv"
        raise Error(f"{where}: no record of {workload}{of} on a device like {device.text}")
    with told_fallbacks():
        return build(workload, chosen, device=device, log=rankings)


def _assigned(text: str) -> tuple[str, Value]:
    try:
        return assignment(text)
    except argparse.ArgumentTypeError as error:
        raise Error(str(error)) from error
