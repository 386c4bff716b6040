"""Error handling of commands and scripts: one line on stderr and an exit status instead of a traceback."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from tvmconv.cli.colors import RED, YELLOW, paint
from tvmconv.errors import Error, escape_unprintable, log_traceback

USAGE_ERROR = 2
INTERRUPTED_STATUS = 130  # 128 + SIGINT, the convention of shells
BROKEN_PIPE_STATUS = 141  # 128 + SIGPIPE


class UsageError(Error):
    """A command line that is not valid."""


class _LogTracebacks(argparse.Action):
    """An option that enables the logging of tracebacks as soon as it is parsed."""

    def __call__(self, *_: object) -> None:
        logging.getLogger("tvmconv").setLevel(logging.DEBUG)


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` instead of printing its usage, and that has `--verbose`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_argument(
            "--verbose",
            action=_LogTracebacks,
            nargs=0,
            default=argparse.SUPPRESS,  # with a default, a nested parser would overwrite the outer parser's value
            help="Print the tracebacks of errors as well.",
        )

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` with the message and the command that prints help."""
        raise UsageError(f"{message}; see {self.prog} --help")


def run_guarded(prog: str, command: Callable[[], int]) -> int:
    """Run a command, and return its exit status or that of the error that ended it. Errors, and the package's log, are
    lines on stderr that begin with `prog`; `--verbose` adds tracebacks.
    """
    logger = logging.getLogger("tvmconv")
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter(f"{prog}: %(message)s"))
    logger.addHandler(handler)
    try:
        return _run_guarded(prog, command)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _run_guarded(prog: str, command: Callable[[], int]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # some encodings lack µ and ×; stderr escapes them by default
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = command()
        if sys.stdout:  # None where the process was started without a standard output
            sys.stdout.flush()  # raises BrokenPipeError here instead of at exit
        return status
    except SystemExit as exit_request:  # argparse exits after --help and --version
        return int(exit_request.code or 0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout when it exits
        return BROKEN_PIPE_STATUS
    except KeyboardInterrupt:
        # An interrupt inside code that a library passes to exec(), as dataclasses does, marks the interpreter as
        # interrupted: it would end by SIGINT at exit. A further exec() clears the mark (CPython, run_eval_code_obj).
        exec("")
        return INTERRUPTED_STATUS
    except MemoryError:
        message = "there is not enough memory: free some memory, or raise the limit (ulimit -v)"
    except (Error, OSError) as error:
        log_traceback(error)
        message = str(error)
        if isinstance(error, OSError) and error.strerror:  # without the number of the error
            message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    print_note(message, prog, is_error=True)
    return USAGE_ERROR


def print_note(message: str, prog: str = "tvmconv", *, is_error: bool = False) -> None:
    """Print a message in one line on stderr, behind the name `prog`, with unprintable characters escaped. On a terminal
    the name is colored.
    """
    name = paint(f"{prog}:", RED if is_error else YELLOW, sys.stderr)
    print(f"{name} {escape_unprintable(' '.join(message.split()))}", file=sys.stderr)
