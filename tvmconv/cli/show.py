"""`tvmconv show`: a kernel at any stage of its way from the tensor expression to machine code."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tvmconv import devices, kernel, library, workloads
from tvmconv.cli.options import EXAMPLE, add_set, tell_choice
from tvmconv.devices import AbsentError, Arch, Device

ARCH = "sm_90"  # to compile for where no GPU says otherwise


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("show", help="a kernel at one of its stages, as text")
    parser.add_argument("workload", metavar="WORKLOAD", help=f"such as {EXAMPLE}")
    parser.add_argument("schedule", metavar="SCHEDULE", help="such as vthread; tvmconv schedules lists them")
    parser.add_argument("--stage", choices=kernel.STAGES, default="source", help="which (default: %(default)s)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--device", metavar="D", help="for this device: cuda:N, opencl:N or auto")
    place.add_argument(
        "--arch", metavar="A", help=f"for this architecture: {ARCH}, say (default: the GPU's, or {ARCH})"
    )
    add_set(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a stage of a kernel."""
    workload = workloads.parse(args.workload)
    device = _device(args)
    schedule = library.find(workload, args.schedule)
    built = kernel.build(workload, schedule, device=device, config=dict(args.set))
    print(built.stage(args.stage))
    if args.device:
        tell_choice(args.device, device)
    elif not args.arch:
        print(f"tvmconv: compiled for {device.text}; --arch or --device choose another", file=sys.stderr)
    return 0


def _device(args: argparse.Namespace) -> Device:
    if args.arch:
        return Arch(args.arch)
    if args.device:
        return devices.find(args.device)
    try:
        return devices.find("cuda")
    except AbsentError:
        return Arch(ARCH)
