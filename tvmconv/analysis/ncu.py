"""A GPU's counters, read by Nsight Compute while a command runs."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from tvmconv.errors import DeviceError

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
    ncu = shutil.which("ncu")
    if ncu is None:
        raise DeviceError("ncu is not on the PATH: install Nsight Compute, which comes with the CUDA toolkit")
    options = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    asked = ["--kernel-name", f"regex:{KERNEL}", "--metrics", ",".join(dict.fromkeys(metrics.values()))]
    done = subprocess.run([ncu, *options, *asked, *command], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or start is None:
        reason = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
        raise DeviceError(f"ncu failed: {reason}")
    for row in csv.DictReader(lines[start:]):
        if row["ID"]:  # the line below the header has the units
            read = {name: _number(row.get(metric)) for name, metric in metrics.items()}
            yield {name: value for name, value in read.items() if value is not None}


def _number(cell: str | None) -> float | None:
    """A cell's number, such as 1,024.50; None where ncu has none (`n/a`, or no such column)."""
    try:
        return float((cell or "").replace(",", ""))
    except ValueError:
        return None
