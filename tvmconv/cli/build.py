"""Export a kernel as source, library and examples.

Build a kernel and write it to a folder: the source, for CUDA also the machine code and a shared library, and a README
with complete examples of calls, which do not need tvmconv.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tvmconv import registry, workloads
from tvmconv.cli import options
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.devices import Arch
from tvmconv.devices.rpc import RPCDevice
from tvmconv.errors import CompileError
from tvmconv.export import export
from tvmconv.kernel import Kernel
from tvmconv.logs.build import build
from tvmconv.reports.tables import format_micros
from tvmconv.tvm_import import import_tvm
from tvmconv.verification import Verification

USAGE = "%(prog)s WORKLOAD [SCHEDULE] [options] -o DIR"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    text = (
        f"Workload and schedule, such as {options.EXAMPLE_WORKLOAD} vthread (default: the fastest schedule of the log, "
    )
    parser.add_argument("words", metavar="WORKLOAD SCHEDULE", nargs="*", help=f"{text}else the predicted one).")
    options.add_option(parser, "--log", "F", "Log, or folder of logs, with the kernel to build", repeat=True)
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", required=True, help="Folder to write to.")
    options.add_device_options(parser)
    options.add_cost_model_option(parser)
    options.add_set_option(parser)


def run(args: argparse.Namespace) -> int:
    """Build a kernel, verify it where it can run, write it to files, and print their names."""
    if not 1 <= len(args.words) <= 2:
        raise UsageError("expected a workload and at most one schedule; see tvmconv build --help")
    workload = workloads.parse(args.words[0])
    import_tvm()
    schedule = registry.find_schedule(workload, args.words[1]) if len(args.words) > 1 else None
    target_device = options.find_target_device(args)
    config, log = dict(args.set) or None, args.log or None
    with options.report_fallbacks():
        built_kernel = build(workload, schedule, device=target_device, config=config, log=log)
        exported = export(built_kernel, args.out, verification=_verify_kernel(built_kernel))
    if len(args.words) == 1:
        _print_choice(built_kernel)
    options.print_device(args, target_device)
    for file in exported.files:
        print(file)
    if exported.library_error:
        print_note(f"kernel.so was left out, as {exported.library_error}")
    return 0


def _print_choice(built_kernel: Kernel) -> None:
    """Print which schedule was chosen, and where its knobs come from."""
    record = built_kernel.record
    if record:
        source = f"the knobs of a record, {format_micros(record.cost)} µs on {record.device}"
    else:
        source = f"{'predicted' if built_kernel.prediction else 'default'} knobs"
    print_note(f"built is {built_kernel.schedule.name} with {source}")


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
