"""Common parts of benchmarks: their options, and functions that print and write results."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvmconv import devices
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError
from tvmconv.devices import Device
from tvmconv.errors import DeviceError
from tvmconv.files import read_bytes
from tvmconv.reports.tables import Table

RESULTS = Path("results")
BEST_FRACTION = 0.1  # fraction of the configs with the best estimates, whose fastest one is compared


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`, for `find_device`."""
    options.add_device_option(parser, "Device to measure on: cuda:N, opencl:N or auto")


def find_device(args: argparse.Namespace, cuda_for: str = "") -> Device:
    """Return the device that `--device` names, and print on stderr which one `auto` chose. The text `cuda_for` says why
    an NVIDIA GPU is needed, for the message of DeviceError; it is empty if none is needed.
    """
    device = devices.find_device(args.device)
    if cuda_for and (device.kind != "cuda" or isinstance(device, devices.Arch)):
        raise DeviceError(f"{cuda_for}: expected --device cuda:N instead of {device.text}")
    options.print_auto_device(args.device, device)
    return device


def add_gpu_lock(parser: argparse.ArgumentParser) -> None:
    """Add `--gpu-lock`, for `hold_gpu`."""
    text = "Share the device with other benchmarks that name the same file: only one of them uses it at a time"
    options.add_option(parser, "--gpu-lock", "FILE", text, type=Path)


@contextlib.contextmanager
def hold_gpu(lock: Path | None, *, is_shared: bool = False) -> Iterator[None]:
    """Wait until no other process holds the file `lock`, and hold it within the block; None for no file.

    With `is_shared`, other processes that share the lock may hold it at the same time, for work that would disturb the
    timings of others.
    """
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
        try:
            yield
        finally:  # processes that were forked within the block have the file open still
            fcntl.flock(file, fcntl.LOCK_UN)


def add_output(parser: argparse.ArgumentParser, default: Path | None = RESULTS, metavar: str = "DIR") -> None:
    """Add `-o`, `--output`: a folder, or a file for benchmarks that write one page."""
    text = "Folder to write results to" if metavar == "DIR" else f"Write the table to {metavar}"
    text += f" (default: {default})." if default else "."
    parser.add_argument("-o", "--output", dest="out", type=Path, default=default, metavar=metavar, help=text)


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `args.logs`, the logs that a benchmark reads."""
    parser.add_argument(
        "logs", nargs="+", type=Path, metavar="LOG", help="Tuning logs, also .gz and .xz, or folders of logs."
    )


def show(table: Table, args: argparse.Namespace, section: str, legend: str) -> None:
    """Print a table, and write it with its legend into a section of the page that `--update-page` names."""
    output.print_report(args, [table])
    options.update_page(args.page, section, f"{table.format_markdown()}\n\n{legend}")


def report(
    args: argparse.Namespace, name: str, tables: Sequence[Table], notes: Sequence[str], data: Any, title: str
) -> None:
    """Print tables and notes, and write NAME.md and NAME.json to the folder `args.out`, which is created, if one was
    named.
    """
    output.print_report(args, tables, notes, title=title, json_data=data)
    if args.out:
        write_report(args.out, name, tables, notes, data, title)


def write_report(folder: Path, name: str, tables: Sequence[Table], notes: Sequence[str], data: Any, title: str) -> None:
    """Write tables and notes to NAME.md, and the data to NAME.json, in a folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    page = "\n\n".join([f"# {title}", *(table.format_markdown() for table in tables), *notes])
    (folder / f"{name}.md").write_text(f"{page}\n", encoding="utf-8")
    text = json.dumps(data, indent=1, ensure_ascii=False)
    partial_file = folder / f"{name}.json.part"
    partial_file.write_text(f"{text}\n", encoding="utf-8")
    partial_file.replace(folder / f"{name}.json")  # an interruption leaves the earlier measurements intact


def compare_ranks(estimates: np.ndarray, seconds: np.ndarray) -> tuple[float | None, float]:
    """Compare estimates with measured times.

    Returns:
        Spearman's rank correlation, None if all estimates are equal; and the time of the fastest config among the
        `BEST_FRACTION` with the best estimates, divided by that of the fastest config.
    """
    from scipy.stats import spearmanr

    best = np.argsort(estimates, kind="stable")[: max(1, round(BEST_FRACTION * len(estimates)))]
    correlation = float(spearmanr(estimates, seconds).statistic) if np.ptp(estimates) else None
    return correlation, float(seconds[best].min() / seconds.min())


def read_lines(file: Path) -> list[str]:
    """Return the lines of a text file; raise UsageError if it cannot be read."""
    try:
        return read_bytes(file).decode().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {file}: expected a text in UTF-8") from error


def read_results(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Read JSON files of a benchmark's results, compressed (.gz) or not.

    Raises:
        UsageError: A file cannot be read, or is not JSON.
    """
    results = []
    for file in files:
        try:
            results.append(json.loads(read_bytes(file, unpack=True)))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {file}: {error}") from error
    return results


@contextlib.contextmanager
def require_files_of(benchmark: str) -> Iterator[None]:
    """Raise UsageError if the block finds that results lack keys or have other types than a benchmark writes."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the files were not written by tvmconv bench {benchmark}: {error!r}") from error
