"""The command line: one module per command, each with `add_parser(commands)` and `run(args) -> exit status`.

TVM is imported only when a command needs it, so that `--help` and mistyped words are answered at once. For `tvmconv
tune`, the process that builders are forked from starts before the modules of the commands are imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from tvmconv.cli.errors import INTERRUPTED_STATUS, CommandParser, run_guarded
from tvmconv.version import VERSION

COMMANDS = (
    "devices",
    "suites",
    "schedules",
    "show",
    "explain",
    "report",
    "counters",
    "run",
    "tune",
    "build",
    "log",
    "plot",
    "simulate",
    "train",
    "optimize",
    "worker",
    "bench",
)
SEARCH_COMMAND = "tune"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: Words after `tvmconv`. By default, the arguments of this process.

    Returns:
        The exit status: 0 for success, 1 if a schedule failed, 2 if the command line cannot be carried out.
    """
    words = sys.argv[1:] if argv is None else argv
    return run_guarded("tvmconv", lambda: _dispatch(words))


def command_line() -> NoReturn:
    """Run the command line of this process, and end the process with its exit status.

    An interrupted process ends at once, without waiting for its threads.
    """
    status = main()
    if status == INTERRUPTED_STATUS:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def _dispatch(words: Sequence[str]) -> int:
    is_search = [*words[:1]] == [SEARCH_COMMAND] and not {"-h", "--help"} & {*words}
    with _prestart_builders() if is_search else contextlib.nullcontext():
        return _run(words)


@contextlib.contextmanager
def _prestart_builders() -> Iterator[None]:
    from tvmconv.measure.workers import pool

    with pool.keep_workers_alive():
        pool.shared.prestart_fork_server()
        yield


def _run(words: Sequence[str]) -> int:
    args = parse_words(words)
    return args.run(args)


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line without running the command.

    Args:
        words: Words after `tvmconv`.

    Returns:
        The arguments of the command. Their attribute `run` is the function that runs the command on them.

    Raises:
        UsageError: The words are not a valid command line.
    """
    parser, commands = _make_parser([word for word in words[:1] if word in COMMANDS] or COMMANDS)
    args, unparsed = parser.parse_known_args(words)
    if any(word.startswith("-") for word in unparsed) or (unparsed and "words" not in args):
        commands.get(words[0], parser).error(f"unrecognized arguments: {' '.join(unparsed)}")
    if unparsed:
        args.words += unparsed  # argparse ends a list of words at the first option and does not parse the later words
    return args


def _make_parser(command_names: Sequence[str]) -> tuple[CommandParser, dict[str, CommandParser]]:
    """Return the parser for these commands, and the parser of each command by its name."""
    parser = CommandParser(prog="tvmconv", description="Explore schedules of GPU convolutions on Apache TVM.")
    parser.add_argument("--version", action="version", version=f"tvmconv {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in command_names:
        importlib.import_module(f"tvmconv.cli.{command}").add_parser(commands)
    return parser, commands.choices
