"""Common parts of benchmarks: their options, and functions that print and write results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tvmconv import devices
from tvmconv.cli.options import add_renamed_option, parse_count, print_auto_device, update_page
from tvmconv.devices import Device
from tvmconv.errors import DeviceError
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant

RESULTS = Path("results")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`, for `find_device`."""
    parser.add_argument(
        "--device", default="auto", metavar="D", help="Device to measure on: cuda:N, opencl:N or auto (default: auto)."
    )


def find_device(args: argparse.Namespace, cuda_for: str = "") -> Device:
    """Return the device that `--device` names, and print on stderr which one `auto` chose.

    Args:
        args: Values of the options of `add_device`.
        cuda_for: Reason why an NVIDIA GPU is needed, for the message; empty if any device is accepted.

    Raises:
        DeviceError: There is no such device, or it is not an NVIDIA GPU although one is needed.
    """
    device = devices.find_device(args.device)
    if cuda_for and (device.kind != "cuda" or isinstance(device, devices.Arch)):
        raise DeviceError(f"{cuda_for}: expected --device cuda:N instead of {device.text}")
    print_auto_device(args.device, device)
    return device


def add_output(parser: argparse.ArgumentParser, default: Path | None = RESULTS, metavar: str = "DIR") -> None:
    """Add `-o`, `--output`: a folder, or a file for benchmarks that write one page."""
    text = "Folder to write results to" if metavar == "DIR" else f"Write the table to {metavar}"
    text += f" (default: {default})." if default else "."
    parser.add_argument("-o", "--output", dest="out", type=Path, default=default, metavar=metavar, help=text)


def add_archive(parser: argparse.ArgumentParser) -> None:
    """Add `--kernel-archive`, and its old name `--archive`, for a file of `tvmconv bench prebuild`."""
    add_renamed_option(
        parser,
        "--kernel-archive",
        "--archive",
        dest="archive",
        type=Path,
        metavar="FILE",
        help="File of kernels that `tvmconv bench prebuild build` wrote; then TVM is not needed.",
    )


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `args.logs`, the logs that a benchmark reads."""
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="Tuning logs, also .gz, or folders of logs.")


def add_min_configs(parser: argparse.ArgumentParser, default: int) -> None:
    """Add `--min-configs`, and its old name `--least`."""
    add_renamed_option(
        parser,
        "--min-configs",
        "--least",
        dest="min_configs",
        type=parse_count,
        default=default,
        metavar="N",
        help="Leave out layers with fewer measured configs (default: %(default)s).",
    )


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    """Add `--repetitions`, the number of times that each kernel is timed."""
    add_renamed_option(
        parser,
        "--repetitions",
        "--rounds",
        type=parse_count,
        default=default,
        metavar="N",
        help="Number of rounds in which all kernels are timed in turn (default: %(default)s).",
    )


def show(table: Table, args: argparse.Namespace, section: str, legend: str) -> None:
    """Print a table, and write it with its legend into a section of the page that `--update-page` names."""
    print(table.format_text())
    update_page(args.page, section, f"{table.format_markdown()}\n\n{legend}")


def micros(seconds: float | None) -> str:
    """Return microseconds with three significant digits; a dash for no time."""
    return format_significant(seconds * 1e6) if seconds else EMPTY_CELL


def make_table(rows: Iterable[Any], columns: Mapping[str, Callable[[Any], str]], left: Iterable[str] = ()) -> Table:
    """Return a table with one line per row.

    Args:
        rows: Objects that the columns' functions take.
        columns: Headers, each with the function that returns a row's cell.
        left: Headers of the columns that are aligned to the left.
    """
    return Table([*columns], [[cell(row) for cell in columns.values()] for row in rows], left_aligned=frozenset(left))


def report(
    folder: Path | None, name: str, tables: Sequence[Table], notes: Sequence[str], data: Any, title: str
) -> None:
    """Print tables and notes, and write NAME.md and NAME.json to `folder`, which is created, if one was named."""
    print("\n\n".join([title, *(table.format_text() for table in tables), "\n".join(notes)]), flush=True)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        page = "\n\n".join([f"# {title}", *(table.format_markdown() for table in tables), *notes])
        (folder / f"{name}.md").write_text(f"{page}\n", encoding="utf-8")
        text = json.dumps(data, indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
