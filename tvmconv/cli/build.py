"""`tvmconv build`: export a kernel as files that other programs can use without tvmconv."""

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
        help="export a kernel as source, library and examples",
        description="Build a kernel and write it to a folder: the source, for CUDA also the machine code and a shared "
        "library, and a README with complete examples of calls, which do not need tvmconv.",
        usage="%(prog)s WORKLOAD [SCHEDULE] [options] -o DIR",
    )
    parser.add_argument(
        "words",
        metavar="WORKLOAD SCHEDULE",
        nargs="*",
        help=f"Workload and schedule, such as {EXAMPLE_WORKLOAD} vthread (default: the fastest schedule of the log, "
        "else the predicted one).",
    )
    parser.add_argument("--log", metavar="F", action="append", help="Log, or folder of logs, with the kernel to build.")
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", required=True, help="Folder to write to.")
    add_device_options(parser)
    add_cost_model_option(parser)
    add_set_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build a kernel, verify it where it can run, write it to files, and print their names."""
    if not 1 <= len(args.words) <= 2:
        raise UsageError("expected a workload and at most one schedule; see tvmconv build --help")
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
    """Return the verification of a kernel, None if it cannot run here; raise CompileError if its results are wrong."""
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
