"""Check what works on this machine, what is missing, and how to get it.

Check what works on this machine: devices, compilers, libraries and tools. For each part that is missing, the table says
what it is for and how to get it. A small kernel is built, run and verified on the first device. The exit status is 1 if
no kernel runs.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path

from tvmconv.cli import output
from tvmconv.cli.colors import GREEN, RED, YELLOW, paint
from tvmconv.cli.progress import progress_line
from tvmconv.compiler.sass import find_disassembler
from tvmconv.devices import list_devices
from tvmconv.errors import Error
from tvmconv.kernel import build
from tvmconv.optional_packages import format_install_command
from tvmconv.reports.tables import EMPTY_CELL, Table
from tvmconv.tvm_import import import_tvm
from tvmconv.version import VERSION

PROBE = "conv2d:1x4x8x8,4x4x3x3,s1,p1"  # the workload of the kernel that is run
PROBE_SCHEDULE = "tiling"
OK, MISSING, FAULT = "ok", "missing", "fault"  # a fault keeps kernels from running; what is missing is optional
STATE_STYLES = {OK: GREEN, MISSING: YELLOW, FAULT: RED}
MIN_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Check:
    """What was found of one part of the machine."""

    part: str
    state: str  # one of `STATE_STYLES`
    found: str  # version or name; the reason if the state is not `OK`
    purpose: str  # what it is for
    remedy: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    output.add_table_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the checks and the remedies, and return 1 if one found a fault."""
    checks = []
    with progress_line("doctor: ") as show:
        for check in examine_machine(show):
            checks.append(check)
    headers = ("part", "state", "for", "found")
    rows = [(check.part, check.state, check.purpose, check.found or EMPTY_CELL) for check in checks]
    output.print_table(Table(headers, rows, frozenset(headers)), args, list(map(asdict, checks)))
    if not (args.json or args.csv):
        for check in checks:
            if check.remedy:
                print(f"\n{paint(check.part, STATE_STYLES[check.state])}: {check.remedy}")
    return int(any(check.state == FAULT for check in checks))


def examine_machine(on_progress: Callable[[str], None] = lambda text: None) -> Iterator[Check]:
    """Yield the checks; `on_progress` receives what is checked next."""
    yield Check("tvmconv", OK, f"{VERSION}, Python {platform.python_version()}", "everything")
    on_progress("TVM")
    import_tvm()
    yield Check("TVM", OK, metadata.version("apache-tvm"), "everything")
    on_progress("devices")
    first_device = ""
    for status in list_devices():
        purpose = "compiling CUDA" if status.text == "sm_NN" else "running kernels"
        if status.reason:
            yield Check(status.text, MISSING, status.reason.partition(" (")[0], purpose, status.remedy or "")
            continue
        first_device = first_device or ("" if status.device is None else status.text)
        yield Check(status.text, OK, status.name or "", purpose)
    on_progress("a kernel")
    yield _run_probe(first_device)
    yield from _find_tools()
    yield from _find_packages()
    yield _check_folder()


def _run_probe(device: str) -> Check:
    """Build, run and verify a small kernel."""
    part, purpose = "a kernel", "verification"
    if not device:
        remedy = "install PoCL: pip install 'pyopencl[pocl]'; or use a machine with an NVIDIA GPU"
        return Check(part, FAULT, "no device runs kernels", purpose, remedy)
    try:
        verification = build(PROBE, PROBE_SCHEDULE, device=device).verify()
    except (Error, OSError) as error:
        return Check(part, FAULT, str(error), purpose, f"tvmconv --verbose run {PROBE} {PROBE_SCHEDULE} shows more")
    if not verification.ok:
        return Check(part, FAULT, f"wrong on {device}: {verification.fault}", purpose, "update the device's driver")
    return Check(part, OK, f"relative error {verification.error:.1e} on {device}", purpose)


def _find_tools() -> Iterator[Check]:
    """Yield the checks of NVIDIA's tools."""
    purpose = "explain, report"
    try:
        yield Check("nvdisasm", OK, find_disassembler(with_lines=True)[0], purpose)
    except Error as error:
        yield Check("nvdisasm", MISSING, "no disassembler", purpose, str(error))
    path = shutil.which("ncu")
    remedy = "" if path else "install Nsight Compute on the GPU host: https://developer.nvidia.com/nsight-compute"
    yield Check("ncu", OK if path else MISSING, path or "no Nsight Compute", "counters", remedy)


def _find_packages() -> Iterator[Check]:
    """Yield the checks of optional Python packages."""
    for name, purpose in (
        ("torch", "PyTorch models, cuDNN"),
        ("onnx", "ONNX models"),
        ("argcomplete", "completion"),
    ):
        if util.find_spec(name):
            yield Check(name, OK, metadata.version(name), purpose)
        else:
            yield Check(name, MISSING, "not installed", purpose, format_install_command(name))


def _check_folder() -> Check:
    """Check the folder of temporary files, in which kernels are compiled."""
    folder, purpose = tempfile.gettempdir(), "temporary files"
    free_bytes = shutil.disk_usage(folder).free
    cores = f"{len(os.sched_getaffinity(0))} cores"
    found = f"{folder}, {free_bytes / 1e9:.1f} GB free; {cores}"
    if not os.access(Path(folder), os.W_OK) or free_bytes < MIN_FREE_BYTES:
        return Check("folder", FAULT, found, purpose, "free some space, or set TMPDIR to another folder")
    return Check("folder", OK, found, purpose)
