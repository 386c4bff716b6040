"""How commands and scripts end when something is wrong: one line on stderr and an exit status, never a traceback."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tvmconv.errors import Error, escape_unprintable, log_traceback

USAGE_ERROR = 2
INTERRUPTED_STATUS = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE_STATUS = 141  # 128 + SIGPIPE


class UsageError(Error):
    """A command line that does not parse."""


class _LogTracebacks(argparse.Action):
    """Has tracebacks of errors logged until the command ends; takes effect as it is read."""

    def __call__(self, *_: object) -> None:
        logging.getLogger("tvmconv").setLevel(logging.DEBUG)


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises its errors instead of printing pages of usage, and knows `--verbose`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_argument(
            "--verbose",
            action=_LogTracebacks,
            nargs=0,
            default=argparse.SUPPRESS,  # a nested parser would overwrite what the outer one has read
            help="print the tracebacks of errors as well",
        )

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` with the message and where to read on."""
        raise UsageError(f"{message}; see {self.prog} --help")


def run_guarded(prog: str, command: Callable[[], int]) -> int:
    """Run a command; its exit status, or that of the error that ended it.

    Args:
        prog: what the line on stderr begins with.
        command: returns an exit status.
    """
    with _log_to_stderr(prog):
        return _run_guarded(prog, command)


@contextlib.contextmanager
def _log_to_stderr(prog: str) -> Iterator[None]:
    """Print what the package logs on stderr: warnings in a line each, and with `--verbose` tracebacks."""
    logger = logging.getLogger("tvmconv")
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter(f"{prog}: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _run_guarded(prog: str, command: Callable[[], int]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr: not every encoding has a µ, and that of C has no ×
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = command()
        if sys.stdout:  # it is None where the process was started without one
            sys.stdout.flush()  # a closed pipe is noticed here at the latest
    except SystemExit as exit_request:  # argparse, after --help and --version
        return int(exit_request.code or 0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when the interpreter exits
        return BROKEN_PIPE_STATUS
    except KeyboardInterrupt:
        # One that came up in text that a library executes, as dataclasses do, counts as not handled, and Python would
        # end by the signal in the end, unless text is executed after it (CPython, run_eval_code_obj).
        exec("")
        return INTERRUPTED_STATUS
    except Error as error:
        log_traceback(error)
        return _print_refusal(prog, str(error))
    except MemoryError:
        return _print_refusal(prog, "there is not enough memory: free some, or raise the limit (ulimit -v)")
    except OSError as error:
        log_traceback(error)
        return _print_refusal(prog, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    return status


def _print_refusal(prog: str, message: str) -> int:
    print_note(message, prog)
    return USAGE_ERROR


def print_note(message: str, prog: str = "tvmconv") -> None:
    """Print a line on stderr, in which nothing reaches the terminal that is not printable.

    Args:
        message: may have names and contents of files in it.
        prog: what the line begins with.
    """
    print(f"{prog}: {escape_unprintable(' '.join(message.split()))}", file=sys.stderr)
