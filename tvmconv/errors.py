"""The exceptions of tvmconv: one tree, so that `except tvmconv.Error` catches every refusal and nothing else.

Each message is one line that quotes what was given and says what would be right; the command line prints it as it is
and exits with status 2.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_logger = logging.getLogger("tvmconv")
MAX_REASON_CHARACTERS = 300  # characters that an error of other code adds to a message


class Error(Exception):
    """Anything that tvmconv refuses or cannot do, with a message of one line for the user."""


class WorkloadError(Error, ValueError):
    """A workload's text or numbers are malformed or contradict each other."""


class ScheduleError(Error, LookupError):
    """A schedule is unknown, or does not apply to the workload."""


class ScheduleFailure(ScheduleError):  # noqa: N818  (a failure of the schedule's own code, told apart from a refusal)
    """The code of a schedule raised an exception, or returned what a schedule may not return.

    The exception itself is the `__cause__`.

    Attributes:
        name: what failed, such as "schedule bad".
        reason: the exception with its type and, in parentheses, where it was raised; one line.
        location: file and line of the schedule's own code, such as "bad.py:4"; "" if they are not known.
    """

    def __init__(self, name: str, reason: str, location: str = "") -> None:
        super().__init__(name, reason, location)
        self.name = name
        self.reason = f"{reason} ({location})" if location else reason
        self.location = location

    def __str__(self) -> str:
        return f"{self.name} failed: {self.reason}"


class KnobError(Error, ValueError):
    """A knob is unknown, or its value is not one that the schedule can take."""


class DeviceError(Error, RuntimeError):
    """A device is unknown or absent, or cannot do what was asked; the message names the remedy."""


class HostError(Error, RuntimeError):
    """The host or a device lets no program run: no space, no memory, no compiler, a lost device.

    It says nothing about the config that was being measured, which is recorded nowhere and is tried again.
    """


class CompileError(Error, RuntimeError):
    """Generated code did not compile, or a compiler that is needed is not installed."""


class AnalysisError(Error, ValueError):
    """A kernel has something that an analysis does not cover."""


class RecordError(Error, ValueError):
    """A line of a log is no record, or is one of something that there is no schedule for.

    Attributes:
        reason: what is wrong with the line, the same for all lines of that kind, to count them by; the message is the
            reason and, after a colon, the detail.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class RecordingError(Error, ValueError):
    """A file is no recorded space, or nothing in it can be replayed."""


class TunerError(Error, LookupError):
    """There is no tuner of that name."""


class TuningError(Error, ValueError):
    """What was asked of a tuning makes no sense."""


class ModelError(Error, ValueError):
    """A model cannot be read, or does not run on the inputs that it was given."""


def log_traceback(error: BaseException) -> None:
    """Log the traceback of an error whose one-line message is reported elsewhere, at level DEBUG (`--verbose`)."""
    _logger.debug("traceback of: %s", error, exc_info=error)


def get_reason(error: Error) -> str:
    """Return the message of an error for a line that names the schedule already."""
    return error.reason if isinstance(error, ScheduleFailure) else str(error)


def describe_error(error: BaseException) -> str:
    """Return an error in one line, with its type unless it is an `Error`, whose message speaks for itself."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if isinstance(error, Error):
        return lines[0].strip() if lines else type(error).__name__
    return ": ".join([type(error).__name__, *(line.strip() for line in lines[:1])])


@contextlib.contextmanager
def translate_to_model_error(prefix: str) -> Iterator[None]:
    """Raise whatever goes wrong in the code of others as ModelError, in one line; errors of ours stay what they are.

    Args:
        prefix: the message begins with it.
    """
    try:
        yield
    except Error:
        raise
    except (Exception, SystemExit) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = [
            line if len(line) <= MAX_REASON_CHARACTERS else line[:MAX_REASON_CHARACTERS] + "…" for line in lines[:1]
        ]
        raise ModelError(": ".join([prefix, type(error).__name__, *reason])) from error


def escape_unprintable(text: str) -> str:
    """Return a text for a terminal, in which all that is not printable but newlines is escaped, as Python spells it.

    Names and contents of files may have control characters, which a terminal obeys, and marks that reorder what is
    shown.
    """
    if text.isprintable():
        return text
    characters = (
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )
    return "".join(characters)


class FallbackWarning(UserWarning):
    """A log has no record for this very device, or one that no longer applies, and something slower may be built."""
