"""`tvmconv build`: a kernel as files that another program can call without tvmconv."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tvmconv import registry, workloads
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.options import (
    EXAMPLE_WORKLOAD,
    add_cost_model_option,
    add_device_options,
    add_set_option,
    find_target_device,
    print_device,
    report_fallbacks,
)
from tvmconv.devices import Arch
from tvmconv.devices.rpc import RPCDevice
from tvmconv.errors import CompileError
from tvmconv.export import ExportResult, export
from tvmconv.kernel import Kernel
from tvmconv.logs.build import build
from tvmconv.tvm_import import import_tvm
from tvmconv.verification import Verification


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "build",
        help="export a kernel: library, source, and how to call it",
        description="Build a kernel and write it to a folder: the source, for CUDA the machine code and a shared "
        "library, and a README with complete examples of the call, which need no tvmconv.",
        usage="%(prog)s WORKLOAD [SCHEDULE] [options] -o DIR",
    )
    parser.add_argument(
        "words",
        metavar="WORKLOAD SCHEDULE",
        nargs="*",
        help=f"such as {EXAMPLE_WORKLOAD} vthread; without a schedule, the fastest of the log, else the one for tuning",
    )
    parser.add_argument(
        "--log", metavar="F", action="append", help="a log, or a folder of logs, whose fastest kernel is built"
    )
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", required=True, help="the folder to write to")
    add_device_options(parser)
    add_cost_model_option(parser)
    add_set_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build, verify where the kernel can run, write; print what was written."""
    if not 1 <= len(args.words) <= 2:
        raise UsageError("expected a workload, and perhaps a schedule; see tvmconv build --help")
    workload = workloads.parse(args.words[0])
    import_tvm()
    schedule = registry.find_schedule(workload, args.words[1]) if len(args.words) > 1 else None
    target_device = find_target_device(args)
    with report_fallbacks():
        built_kernel = build(workload, schedule, device=target_device, config=dict(args.set) or None, log=args.log)
        exported = export(built_kernel, args.out, verification=_verify_kernel(built_kernel))
    print_device(args, target_device)
    _print_files(exported)
    return 0


def _verify_kernel(built_kernel: Kernel) -> Verification | None:
    """The verification of a kernel that can run here; raises CompileError if its results are wrong."""
    if isinstance(built_kernel.device, (Arch, RPCDevice)):
        return None
    verification = built_kernel.verify()
    if not verification.ok:
        raise CompileError(
            f"{built_kernel} is wrong by {verification.error:.2g} (relative L2) and is not exported: "
            f"{verification.fault}"
        )
    return verification


def _print_files(exported: ExportResult) -> None:
    for file in exported.files:
        print(file)
    if exported.library_error:
        print_note(f"kernel.so was left out, as {exported.library_error}")
