"""How commands and scripts end when something is wrong: one line on stderr and an exit status, never a traceback."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from tvmconv.errors import Error
from tvmconv.lean import own_process

REFUSED = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 141  # 128 + SIGPIPE


class UsageError(Error):
    """A command line that does not parse."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors instead of printing pages of usage."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` with the message and where to read on."""
        raise UsageError(f"{message}; see {self.prog} --help")


def guarded(prog: str, command: Callable[[], int]) -> int:
    """Run a command; its exit status, or that of the error that ended it.

    Args:
        prog: what the line on stderr begins with.
        command: returns an exit status.
    """
    own_process()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: not every encoding has a µ
    try:
        status = command()
        sys.stdout.flush()  # a closed pipe is noticed here at the latest
    except SystemExit as finished:  # argparse, after --help and --version
        return int(finished.code or 0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when the interpreter exits
        return BROKEN_PIPE
    except KeyboardInterrupt:
        # One that came up in text that a library executes, as dataclasses do, counts as not handled, and Python would
        # end by the signal in the end, unless text is executed after it (CPython, run_eval_code_obj).
        exec("")
        return INTERRUPTED
    except Error as error:
        return _refuse(prog, str(error))
    except OSError as error:
        return _refuse(prog, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    return status


def _refuse(prog: str, message: str) -> int:
    print(f"{prog}: {' '.join(message.split())}", file=sys.stderr)
    return REFUSED
