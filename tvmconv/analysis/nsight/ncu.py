"""Performance counters of a GPU, read by Nsight Compute while a command runs."""

from __future__ import annotations

import csv
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tvmconv.devices import sharing
from tvmconv.errors import DeviceError, Error

KERNEL_NAME = "main_kernel"  # name of every device kernel that tvmconv generates
_SECTORS_COLUMN = "L2 Theoretical Sectors Global"
_TAGS_COLUMN = "L1 Tag Requests Global"
_WAVEFRONTS_COLUMN = "L1 Wavefronts Shared"


@dataclass(frozen=True)
class ProfiledInstruction:
    """Measured counts of one instruction of a launch, over all warps."""

    text: str  # text of the instruction, such as `@!P0 LDS.128 R4, [R2]`
    num_executed: int  # times that a warp executed it, including those with no active thread
    num_sectors: int  # sectors that it would request from L2 if L1 held none of them
    num_tags: int  # lines that L1 looked up for it
    num_wavefronts: int  # shared-memory wavefronts


def profile_command(command: Sequence[str], metrics: Mapping[str, str]) -> Iterator[dict[str, float]]:
    """Run a command, and read counters for each kernel of tvmconv that it launches.

    Nsight Compute (ncu) replays a launch until all metrics are read, each time with empty caches. The GPU's clocks stay
    as they are.
    """
    options = ["--csv", "--page", "raw", "--print-units", "base"]
    metric_options = ["--metrics", ",".join(dict.fromkeys(metrics.values()))]
    lines = _run_ncu([*options, *_KERNEL_FILTER, *metric_options, *command])
    header_index = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header_index is None:
        raise _make_error(lines)
    for row in csv.DictReader(lines[header_index:]):
        if row["ID"]:  # the row below the header names the units
            values = {name: _parse_number(row.get(metric)) for name, metric in metrics.items()}
            yield {name: value for name, value in values.items() if value is not None}


def read_source_view(command: Sequence[str]) -> list[list[ProfiledInstruction]]:
    """Run a command, and return each instruction's counts for each kernel launch; see `profile_command`."""
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/source.ncu-rep"
        _run_ncu(["--set", "none", "--section", "SourceCounters", *_KERNEL_FILTER, "--export", report, *command])
        lines = _run_ncu(["--import", report, "--page", "source", "--csv"])
    try:
        return parse_source_view(lines)
    except Error as error:
        raise DeviceError(str(error)) from error


_KERNEL_FILTER = ("--clock-control", "none", "--kernel-name", f"regex:{KERNEL_NAME}")


def _run_ncu(arguments: Sequence[str]) -> list[str]:
    ncu = shutil.which("ncu")
    if ncu is None:
        raise DeviceError("ncu is not on the PATH: install Nsight Compute, which comes with the CUDA toolkit")
    with sharing.hold_gpu():
        process = subprocess.run([ncu, *arguments], capture_output=True, text=True, check=False)
    if process.returncode:
        raise _make_error((process.stderr.strip() or process.stdout.strip()).splitlines())
    return process.stdout.splitlines()


def _make_error(output_lines: Sequence[str]) -> DeviceError:
    return DeviceError(f"ncu failed: {output_lines[-1] if output_lines else 'it printed nothing'}")


def _parse_number(cell: str | None) -> float | None:
    """Return the number in a cell such as "1,024.50"; None for `n/a` or an absent column."""
    try:
        return float((cell or "").replace(",", ""))
    except ValueError:
        return None


def parse_source_view(lines: Iterable[str]) -> list[list[ProfiledInstruction]]:
    """Return the instructions of each launch in order, those of a launch in the order of the machine code.

    The input is the output of `ncu --import REPORT --page source --csv` for a report with the section SourceCounters.
    Each kernel begins with its name and a header of its own, because ncu leaves out columns that are empty for it.
    Columns: Nsight Compute, Kernel Profiling Guide, "Source Counters".
    """
    launches: list[list[ProfiledInstruction]] = []
    header: list[str] = []
    try:
        for row in csv.reader(lines):
            if row[:1] == ["Kernel Name"]:
                launches.append([])
                header = []
            elif row[:1] == ["Address"]:
                header = row
            elif header and row:
                launches[-1].append(_parse_instruction(dict(zip(header, row, strict=True))))
    except (ValueError, LookupError) as error:
        raise Error(f"ncu's output cannot be parsed as its source view in CSV: {error}") from error
    return launches


def _parse_instruction(row: dict[str, str]) -> ProfiledInstruction:
    def parse_cell(column: str) -> int:
        cell = row.get(column, "0").replace(",", "")
        return int(cell) if cell not in ("", "-") else 0

    return ProfiledInstruction(
        text=" ".join(row["Source"].split()),
        num_executed=parse_cell("Instructions Executed"),
        num_sectors=parse_cell(_SECTORS_COLUMN),
        num_tags=parse_cell(_TAGS_COLUMN),
        num_wavefronts=parse_cell(_WAVEFRONTS_COLUMN),
    )
