"""Performance counters of a GPU, read by Nsight Compute while a command runs."""

from __future__ import annotations

import csv
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from tvmconv.analysis.nsight.source_view import ProfiledInstruction, parse_source_view
from tvmconv.errors import DeviceError, Error

KERNEL_NAME = "main_kernel"  # name of every device kernel that tvmconv generates


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
    """Run ncu and return the lines of its output."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise DeviceError("ncu is not on the PATH: install Nsight Compute, which comes with the CUDA toolkit")
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
