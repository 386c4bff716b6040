"""Output of commands: tables that fit the terminal, JSON and CSV.

A table is fitted only where the output is a terminal, so that files and pipes get the same text everywhere.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from tvmconv.cli.colors import BOLD, paint
from tvmconv.reports.tables import Table, TableFormatter

WIDE_HELP = "Print all columns, also where the terminal is narrow."


def add_table_options(parser: argparse.ArgumentParser, *, json_help: str = "Print JSON.") -> None:
    """Add `--json`, `--csv` and `--wide`, of which at most one may be given."""
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help=json_help)
    formats.add_argument("--csv", action="store_true", help="Print the table as CSV.")
    formats.add_argument("--wide", action="store_true", help=WIDE_HELP)


def find_width(*, is_wide: bool = False) -> int | None:
    """Return the number of columns of the terminal; None without a terminal, or where all columns are wanted."""
    is_fitted = not is_wide and sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_fitted else None


def format_table(table: Table, *, is_wide: bool = False) -> str:
    """Return a table as text, fitted to the terminal, with bold headers."""
    header, *lines = table.format_text(find_width(is_wide=is_wide)).split("\n")
    return "\n".join([paint(header, BOLD), *lines])


def make_table_formatter(args: argparse.Namespace) -> TableFormatter:
    """Return `format_table` with the option `--wide` of a command."""
    return partial(format_table, is_wide=args.wide)


def print_table(table: Table, args: argparse.Namespace, json_data: Any) -> None:
    """Print a table as the options of `add_table_options` say; `json_data` is what `--json` prints."""
    if args.json:
        print(json.dumps(json_data))
    elif args.csv:
        print(table.format_csv(), end="")
    else:
        print(format_table(table, is_wide=args.wide))


def print_report(
    args: argparse.Namespace,
    tables: Sequence[Table],
    notes: Sequence[str] = (),
    *,
    title: str = "",
    json_data: Any = None,
) -> None:
    """Print tables with a title before them and notes after them, as the options of `add_table_options` say. CSV has an
    empty line between tables, and neither title nor notes. JSON is `json_data`, or else the rows of the tables.
    """
    if args.json:
        rows = [table.list_rows() for table in tables]
        data = json_data if json_data is not None else rows[0] if len(rows) == 1 else rows
        print(json.dumps(data, ensure_ascii=False))
    elif args.csv:
        print("\n".join(table.format_csv() for table in tables), end="")
    else:
        texts = [title, *map(make_table_formatter(args), tables), "\n".join(notes)]
        print("\n\n".join(filter(None, texts)), flush=True)


def print_intermediate(args: argparse.Namespace, text: str) -> None:
    """Print a result that precedes the report, on stderr where stdout is for another program."""
    print(text, end="\n\n", flush=True, file=sys.stderr if args.json or args.csv else sys.stdout)
