"""The command line: one module per command, each with `add_options(parser)` and `run(args) -> exit status`.

TVM is imported only when a command needs it, so that `--help` and mistyped words are answered at once. For `tvmconv
tune` and `tvmconv bench tune-suite`, the process that builders are forked from starts before the modules of the
commands are imported.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from tvmconv.cli.errors import INTERRUPTED_STATUS, CommandParser, run_guarded
from tvmconv.version import VERSION

COMMANDS = (
    "doctor",
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
    "relax",
    "worker",
    "bench",
    "completion",
)
# First words of the commands that search, and words with which they do not.
SEARCH_COMMANDS, WORDS_WITHOUT_SEARCH = (
    (("tune",), ("bench", "tune-suite"), ("bench", "layouts")),
    ("-h", "--help", "--compare-only", "--configs"),
)
COMPLETION_VARIABLE = "_ARGCOMPLETE"  # the shell function of argcomplete sets it
# The 90,000 objects that TVM's modules create are never garbage. At Python's threshold of 700 new objects, the
# collector would traverse them so often that it takes a fifth of a short command's time.
COLLECTOR_THRESHOLDS = (50_000, 20, 20)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of these words, by default those of this process, and return the exit status: 0 for success,
    1 if a schedule failed, 2 if the command line cannot be carried out.
    """
    words = sys.argv[1:] if argv is None else argv
    return run_guarded("tvmconv", lambda: _dispatch(words))


def command_line() -> NoReturn:
    """Run the command line of this process, and end the process with its exit status. An interrupted process ends at
    once, without waiting for its threads.
    """
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    if COMPLETION_VARIABLE in os.environ:
        complete_words()
    status = main()
    if status == INTERRUPTED_STATUS:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    gc.freeze()  # spares the collections at exit
    sys.exit(status)


def complete_words() -> None:
    """Print the completions of the words that the shell asks about, and end the process."""
    completion = importlib.import_module("tvmconv.cli.completion")
    completion.complete(make_parser(COMMANDS)[0])


def _dispatch(words: Sequence[str]) -> int:
    with prestart_search(words):
        args = parse_words(words)
        return args.run(args)


def prestart_search(words: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Return a block in which processes of searches stay alive; they start with it if the command of these words, such
    as `tune` or `bench tune-suite`, searches.
    """
    is_search = any((*words[: len(command)],) == command for command in SEARCH_COMMANDS)
    if not is_search or {*WORDS_WITHOUT_SEARCH} & {*words}:
        return contextlib.nullcontext()
    from tvmconv.measure.workers.pool import keep_workers_alive

    return keep_workers_alive(starts_fork_server=True)


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; the attribute `run` of the result is the function that runs the command on it."""
    parser, commands = make_parser([word for word in words[:1] if word in COMMANDS] or COMMANDS)
    args, unparsed = parser.parse_known_args(words)
    if any(word.startswith("-") for word in unparsed) or (unparsed and "words" not in args):
        commands.get(words[0], parser).error(f"unrecognized arguments: {' '.join(unparsed)}")
    if unparsed:
        args.words += unparsed  # argparse ends a list of words at the first option and does not parse the later words
    return args


def make_parser(command_names: Sequence[str]) -> tuple[CommandParser, dict[str, CommandParser]]:
    """Return the parser for these commands, and the parser of each command by its name."""
    parser = CommandParser(prog="tvmconv", description="Explore schedules of GPU convolutions on Apache TVM.")
    parser.add_argument("--version", action="version", version=f"tvmconv {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in command_names:
        module = importlib.import_module(f"tvmconv.cli.{name}")
        summary, _, description = (module.__doc__ or "").partition("\n\n")
        brief = summary[0].lower() + summary[1:].removesuffix(".")
        command = commands.add_parser(name, help=brief, description=description or summary)
        command.usage = getattr(module, "USAGE", None)
        command.set_defaults(run=getattr(module, "run", None))  # `log` and `bench` have a function for each part
        module.add_options(command)
    return parser, commands.choices
