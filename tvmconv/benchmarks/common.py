"""What benchmarks share: options that mean the same everywhere, and how results are shown and written."""

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
        "--device", default="auto", metavar="D", help="device to measure on: cuda:N, opencl:N or auto (default: auto)"
    )


def find_device(args: argparse.Namespace, cuda_for: str = "") -> Device:
    """Return the device that `--device` names, and say on stderr which one `auto` chose.

    Args:
        args: What `add_device` read.
        cuda_for: What needs an NVIDIA GPU, for the message; empty if any device will do.

    Raises:
        DeviceError: There is no such device, or it is no NVIDIA GPU and has to be one.
    """
    device = devices.find_device(args.device)
    if cuda_for and (device.kind != "cuda" or isinstance(device, devices.Arch)):
        raise DeviceError(f"{cuda_for}: expected --device cuda:N instead of {device.text}")
    print_auto_device(args.device, device)
    return device


def add_output(parser: argparse.ArgumentParser, default: Path | None = RESULTS, metavar: str = "DIR") -> None:
    """Add `-o`, `--output`: a folder, or for one page a file."""
    what = "folder that results are written to" if metavar == "DIR" else f"write the table to {metavar}"
    shown = f" (default: {default})" if default else ""
    parser.add_argument("-o", "--output", dest="out", type=Path, default=default, metavar=metavar, help=what + shown)


def add_archive(parser: argparse.ArgumentParser) -> None:
    """Add `--kernel-archive`, a file of `tvmconv bench prebuild`; `--archive` is its old name."""
    add_renamed_option(
        parser,
        "--kernel-archive",
        "--archive",
        dest="archive",
        type=Path,
        metavar="FILE",
        help="take the kernels from this file of `tvmconv bench prebuild build`; TVM is not needed",
    )


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the logs that a benchmark reads, in `args.logs`."""
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="tuning logs, also .gz, or folders of logs")


def add_min_configs(parser: argparse.ArgumentParser, default: int) -> None:
    """Add `--min-configs`; `--least` is its old name."""
    add_renamed_option(
        parser,
        "--min-configs",
        "--least",
        dest="min_configs",
        type=parse_count,
        default=default,
        metavar="N",
        help="leave out layers with fewer measured configs (default: %(default)s)",
    )


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    """Add `--repetitions`, how often each kernel is timed."""
    add_renamed_option(
        parser,
        "--repetitions",
        "--rounds",
        type=parse_count,
        default=default,
        metavar="N",
        help="rounds of timing in turn (default: %(default)s)",
    )


def show(table: Table, args: argparse.Namespace, section: str, legend: str) -> None:
    """Print a table, and put it with its legend into the page that `--update-page` names."""
    print(table.format_text())
    update_page(args.page, section, f"{table.format_markdown()}\n\n{legend}")


def micros(seconds: float | None) -> str:
    """Return microseconds in three significant digits; a dash for no time."""
    return format_significant(seconds * 1e6) if seconds else EMPTY_CELL


def make_table(rows: Iterable[Any], columns: Mapping[str, Callable[[Any], str]], left: Iterable[str] = ()) -> Table:
    """Return a table with one line per row.

    Args:
        rows: What the lines are about.
        columns: Headers, and what gives a row's cell.
        left: Headers of the columns that are aligned to the left.
    """
    return Table([*columns], [[cell(row) for cell in columns.values()] for row in rows], left_aligned=frozenset(left))


def report(
    folder: Path | None, name: str, tables: Sequence[Table], notes: Sequence[str], data: Any, title: str
) -> None:
    """Print tables and notes; write NAME.md and NAME.json to a folder, which is made, if one was named."""
    print("\n\n".join([title, *(table.format_text() for table in tables), "\n".join(notes)]), flush=True)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        page = "\n\n".join([f"# {title}", *(table.format_markdown() for table in tables), *notes])
        (folder / f"{name}.md").write_text(f"{page}\n", encoding="utf-8")
        text = json.dumps(data, indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
