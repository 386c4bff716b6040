"""`tvmconv explain`: why a kernel takes what it takes, from its code alone; no GPU is needed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tvmconv import devices, kernel, library, workloads
from tvmconv.cli.errors import UsageError, note
from tvmconv.cli.kernels import NAMED, add_log, named
from tvmconv.cli.options import EXAMPLE, add_place, add_set, find_place, tell_place, told_fallbacks
from tvmconv.cli.progress import progress_line
from tvmconv.cli.run import FAILED
from tvmconv.errors import ScheduleFailure, log_traceback
from tvmconv.knowledge.features import Machine
from tvmconv.logs.best import log_files
from tvmconv.logs.shipped import shipped_logs
from tvmconv.without_torch import import_tvm

if TYPE_CHECKING:
    from tvmconv.devices import Device
    from tvmconv.workloads import Workload


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "explain",
        help="why a kernel takes what it takes",
        description="Occupancy, waves, the wavefronts and sectors of each access, and the least time of each unit: "
        "counted from a kernel's code. Of several schedules, what differs.",
    )
    parser.add_argument("workload", metavar="WORKLOAD", help=f"such as {EXAMPLE}")
    parser.add_argument("schedules", metavar="SCHEDULE", nargs="+", help=f"{NAMED}; several to compare them")
    parser.add_argument("--steps", action="store_true", help="of one schedule: what one step of each knob would change")
    parser.add_argument(
        "--waterfall", action="store_true", help="of one schedule: what each knob buys, from the default to the best"
    )
    add_log(parser, "of the best of --waterfall and ")
    add_place(parser)
    add_set(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a page."""
    workload = workloads.parse(args.workload)
    import_tvm()
    from tvmconv.analysis.machine_code.linked import begin

    device = find_place(args)
    if device.arch is None:
        raise UsageError(f"what is counted is of NVIDIA's architectures: {device.text} is none, try --arch")
    machine = machine_of(device)
    for option in ("steps", "waterfall"):
        if getattr(args, option) and (len(args.schedules) > 1 or machine is None):
            raise UsageError(f"--{option} is for one schedule, on a GPU whose numbers are known")
    if args.waterfall and args.steps:
        raise UsageError("--steps and --waterfall are two pages: ask for one of them")
    if args.waterfall and machine:
        _print_waterfall(args, workload, device, machine)
        tell_place(args, device)
        return 0
    built, names, failures = [], [], []
    for name in args.schedules:
        try:
            built.append(named(name, workload, device, dict(args.set), args.log))
        except ScheduleFailure as failure:
            failures.append(failure)
            continue
        names.append(name)
        begin(built[-1])  # while the next one is built, and what follows is imported
    if not built:
        raise failures[0]
    for error in failures:
        log_traceback(error)
        note(str(error))
    from tvmconv.reports.comparison import comparison
    from tvmconv.reports.explain import explanation, knob_steps

    print(explanation(built[0], machine) if len(built) == 1 else comparison(built, machine, names))
    if args.steps and machine:
        with progress_line("explain: ") as show:
            table = knob_steps(built[0], machine, show)
        print(f"\n{table}")
    tell_place(args, device)
    return FAILED if failures else 0


def _print_waterfall(args: argparse.Namespace, workload: Workload, device: Device, machine: Machine) -> None:
    """Print the way from the default config to what `--set` says, or else to the log's fastest."""
    from tvmconv.analysis.waterfall import waterfall
    from tvmconv.reports.gather import fastest, read_logs
    from tvmconv.reports.waterfall import known_times, waterfall_text

    schedule = library.find(workload, args.schedules[0])
    found = read_logs(log_files(args.log) if args.log else shipped_logs(), [workload], device)
    with told_fallbacks(), progress_line("explain: ") as show:
        if args.set:
            best = kernel.build(workload, schedule, device=device, config=dict(args.set))
        else:
            best = fastest(workload, schedule.name, found, device)
        known = known_times(found.records.get(workload, []), schedule.name)
        way = waterfall(best, machine, known, show)
    print(waterfall_text(best, way))


def machine_of(device: Device) -> Machine | None:
    """A device's numbers; of an architecture alone, those of the GPU that the model was taught on, if it is of it."""
    from tvmconv.knowledge.model import known_for

    if isinstance(device, devices.Arch):
        known = known_for(device.arch)
        return known.machine if known else None
    if not (device.arch and device.multiprocessors and device.peak_flops and device.peak_bandwidth):
        return None
    return Machine(device.name, device.arch, device.multiprocessors, device.peak_flops, device.peak_bandwidth)
