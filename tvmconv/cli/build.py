"""`tvmconv build`: a kernel as files that another program can call without tvmconv."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tvmconv import library, workloads
from tvmconv.cli.errors import UsageError, note
from tvmconv.cli.options import EXAMPLE, add_knowledge, add_place, add_set, find_place, tell_place, told_fallbacks
from tvmconv.devices import Arch
from tvmconv.devices.rpc import Remote
from tvmconv.errors import CompileError
from tvmconv.export import Exported, export
from tvmconv.kernel import Kernel
from tvmconv.logs.build import build
from tvmconv.verify import Verification
from tvmconv.without_torch import import_tvm


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
        help=f"such as {EXAMPLE} vthread; without a schedule, the fastest of the log, else the one for tuning",
    )
    parser.add_argument(
        "--log", metavar="F", action="append", help="a log, or a folder of logs, whose fastest kernel is built"
    )
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", required=True, help="the folder to write to")
    add_place(parser)
    add_knowledge(parser)
    add_set(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build, verify where the kernel can run, write; print what was written."""
    if not 1 <= len(args.words) <= 2:
        raise UsageError("expected a workload, and perhaps a schedule; see tvmconv build --help")
    workload = workloads.parse(args.words[0])
    import_tvm()
    schedule = library.find(workload, args.words[1]) if len(args.words) > 1 else None
    place = find_place(args)
    with told_fallbacks():
        built = build(workload, schedule, device=place, config=dict(args.set) or None, log=args.log)
        exported = export(built, args.out, verification=_verify(built))
    tell_place(args, place)
    _print(exported)
    return 0


def _verify(built: Kernel) -> Verification | None:
    """The verification of a kernel that can run here; raises CompileError if its results are wrong."""
    if isinstance(built.device, (Arch, Remote)):
        return None
    verification = built.verify()
    if not verification.ok:
        raise CompileError(
            f"{built} is wrong by {verification.error:.2g} (relative L2) and is not exported: {verification.fault}"
        )
    return verification


def _print(exported: Exported) -> None:
    for file in exported.files:
        print(file)
    if exported.no_library:
        note(f"kernel.so was left out, as {exported.no_library}")
