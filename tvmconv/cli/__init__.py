"""The command line: one module a command, each with `add_parser` and a `run(args) -> exit status`.

Nothing here imports TVM before a command needs it, so that `--help` and a mistyped word are answered at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.cli import build, devices, log, plot, run, schedules, show, simulate, suites, tune, worker
from tvmconv.cli.errors import Parser, guarded
from tvmconv.version import VERSION

COMMANDS = (devices, suites, schedules, show, run, tune, build, log, plot, simulate, worker)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: the words after `tvmconv`; those of the process by default.

    Returns:
        The exit status: 0, 1 if a schedule failed, 2 if the request cannot be served.
    """
    return guarded("tvmconv", lambda: _dispatch(argv))


def _dispatch(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if any(word.startswith("-") for word in rest) or (rest and "words" not in args):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.words += rest  # argparse ends a list of words at the first option, and leaves the others over
    return args.run(args)


def _parser() -> Parser:
    parser = Parser(prog="tvmconv", description="Explore schedules of GPU convolutions on Apache TVM.")
    parser.add_argument("--version", action="version", version=f"tvmconv {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
