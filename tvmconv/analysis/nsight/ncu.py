"""A GPU's counters, read by Nsight Compute while a command runs."""

from __future__ import annotations

import csv
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from tvmconv.analysis.nsight.source_view import Executed, parse
from tvmconv.errors import DeviceError, Error

KERNEL = "main_kernel"  # what every kernel of this project is called on the device


def profile(command: Sequence[str], metrics: Mapping[str, str]) -> Iterator[dict[str, float]]:
    """Run a command, and read counters for each of the kernels of this project that it launches.

    Nsight Compute (ncu) replays a launch until all metrics are read, each time with empty caches, and leaves the GPU's
    clocks alone.

    Args:
        command: program and arguments.
        metrics: ncu's metrics, such as `dram__bytes_read.sum`, each under a name of one's own.

    Yields:
        For each launch, in order, the metrics by these names, in ncu's base units: bytes, nanoseconds, percent. Those
        that ncu does not have for the GPU are left out.

    Raises:
        DeviceError: ncu is not installed, or fails: it may lack the right to read the counters.
    """
    options = ["--csv", "--page", "raw", "--print-units", "base"]
    asked = ["--metrics", ",".join(dict.fromkeys(metrics.values()))]
    lines = _run([*options, *_OURS, *asked, *command])
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise _failed(lines)
    for row in csv.DictReader(lines[start:]):
        if row["ID"]:  # the line below the header has the units
            read = {name: _number(row.get(metric)) for name, metric in metrics.items()}
            yield {name: value for name, value in read.items() if value is not None}


def source_view(command: Sequence[str]) -> list[list[Executed]]:
    """Run a command, and read of each instruction of the kernels that it launches what it took; see `profile`.

    Raises:
        DeviceError: ncu is not installed, or fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/source.ncu-rep"
        _run(["--set", "none", "--section", "SourceCounters", *_OURS, "--export", report, *command])
        lines = _run(["--import", report, "--page", "source", "--csv"])
    try:
        return parse(lines)
    except Error as error:
        raise DeviceError(str(error)) from error


_OURS = ("--clock-control", "none", "--kernel-name", f"regex:{KERNEL}")


def _run(arguments: Sequence[str]) -> list[str]:
    """The lines that ncu prints."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise DeviceError("ncu is not on the PATH: install Nsight Compute, which comes with the CUDA toolkit")
    done = subprocess.run([ncu, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise _failed((done.stderr.strip() or done.stdout.strip()).splitlines())
    return done.stdout.splitlines()


def _failed(told: Sequence[str]) -> DeviceError:
    return DeviceError(f"ncu failed: {[*told, 'it printed nothing'][len(told) - 1 if told else 0]}")


def _number(cell: str | None) -> float | None:
    """A cell's number, such as 1,024.50; None where ncu has none (`n/a`, or no such column)."""
    try:
        return float((cell or "").replace(",", ""))
    except ValueError:
        return None
