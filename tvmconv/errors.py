"""The exception hierarchy of tvmconv.

`except tvmconv.Error` catches every error that the package raises on purpose. Each message is one line that quotes the
wrong value and says what is accepted. The command line prints the message and exits with status 2.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_logger = logging.getLogger("tvmconv")
MAX_REASON_CHARACTERS = 300  # length limit for the text that a foreign exception contributes to a message


class Error(Exception):
    """Base class of all errors that tvmconv raises, with a one-line message for the user.

    Examples:
        >>> import tvmconv as tc
        >>> try:
        ...     tc.parse("conv2d")
        ... except tc.Error as error:
        ...     print(type(error).__name__)
        WorkloadError
    """


class WorkloadError(Error, ValueError):
    """A workload's text or numbers are malformed or contradict each other.

    Examples:
        >>> import tvmconv as tc
        >>> tc.parse("conv9d:1x2")
        Traceback (most recent call last):
        ...
        tvmconv.errors.WorkloadError: unknown operator 'conv9d': expected one of ...
    """


class ScheduleError(Error, LookupError):
    """A schedule is unknown or does not apply to the workload.

    Examples:
        >>> import tvmconv as tc
        >>> tc.build("conv2d:1x8x8x8,8x8x3x3,s1,p1", "unknown", arch="sm_90")
        Traceback (most recent call last):
        ...
        tvmconv.errors.ScheduleError: no schedule 'unknown' for conv2d in float32; there are: ...
    """


class ScheduleFailure(ScheduleError):  # noqa: N818  (the schedule's own code failed, which is no misuse)
    """The code of a schedule raised an exception, or returned something that a schedule must not return.

    The original exception is the `__cause__`.

    Attributes:
        name: Name of the failed part, such as "schedule bad".
        reason: Type and message of the exception in one line, followed by the location in parentheses.
        location: File and line in the schedule's code, such as "bad.py:4"; "" if unknown.
    """

    def __init__(self, name: str, reason: str, location: str = "") -> None:
        super().__init__(name, reason, location)
        self.name = name
        self.reason = f"{reason} ({location})" if location else reason
        self.location = location

    def __str__(self) -> str:
        return f"{self.name} failed: {self.reason}"


class KnobError(Error, ValueError):
    """A knob is unknown, or the schedule does not accept its value.

    Examples:
        >>> import tvmconv as tc
        >>> tc.build("conv2d:1x8x8x8,8x8x3x3,s1,p1", "tiling", config={"unknown": 1}, arch="sm_90")
        Traceback (most recent call last):
        ...
        tvmconv.errors.KnobError: ...
    """


class DeviceError(Error, RuntimeError):
    """A device is unknown, absent, or unable to run the request; the message names the remedy.

    Examples:
        >>> import tvmconv as tc
        >>> tc.build("conv2d:1x8x8x8,8x8x3x3,s1,p1", "tiling", device="abacus:0")
        Traceback (most recent call last):
        ...
        tvmconv.errors.DeviceError: ...
    """


class HostError(Error, RuntimeError):
    """The host or a device can run no program, for want of disk space, memory or a compiler, or after a lost device.

    The error says nothing about the measured config, which is therefore not recorded and is tried again.

    Examples:
        >>> import tvmconv as tc
        >>> issubclass(tc.HostError, RuntimeError)
        True
    """


class CompileError(Error, RuntimeError):
    """Generated code did not compile, or a required compiler is not installed.

    Examples:
        >>> import tvmconv as tc
        >>> tc.build("conv2d:1x8x8x8,8x8x3x3,s1,p1", "tiling", device="opencl:0").ptx
        Traceback (most recent call last):
        ...
        tvmconv.errors.CompileError: PTX exists for CUDA only, not for opencl:0: build with arch='sm_90', say
    """


class AnalysisError(Error, ValueError):
    """A kernel uses a feature that an analysis does not cover.

    Examples:
        >>> import tvmconv as tc
        >>> issubclass(tc.AnalysisError, ValueError)
        True
    """


class RecordError(Error, ValueError):
    """A line of a log is not a valid record, or no schedule exists for its record.

    Attributes:
        reason: Kind of fault, equal for all lines with the same fault so that they can be counted. The message is the
            reason followed by a colon and the detail.

    Examples:
        >>> import tvmconv as tc
        >>> tc.Record.parse('{"v": 0.1}')
        Traceback (most recent call last):
        ...
        tvmconv.errors.RecordError: ...
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class RecordingError(Error, ValueError):
    """A file is not a recorded search space, or none of its entries can be replayed.

    Examples:
        >>> import tvmconv as tc
        >>> issubclass(tc.RecordingError, tc.Error)
        True
    """


class TunerError(Error, LookupError):
    """A tuner name is unknown.

    Examples:
        >>> import tvmconv as tc
        >>> tc.tune("conv2d:1x8x8x8,8x8x3x3,s1,p1", tuner="oracle", device="opencl:0")  # doctest: +SKIP
        Traceback (most recent call last):
        ...
        tvmconv.errors.TunerError: ...
    """


class TuningError(Error, ValueError):
    """The options of a search are invalid or contradict each other.

    Examples:
        >>> import tvmconv as tc
        >>> tc.tune("conv2d:1x8x8x8,8x8x3x3,s1,p1", seconds=-1, device="opencl:0")
        Traceback (most recent call last):
        ...
        tvmconv.errors.TuningError: ...
    """


class ModelError(Error, ValueError):
    """A model cannot be read, or it rejects the given inputs.

    Examples:
        >>> import tvmconv as tc
        >>> issubclass(tc.ModelError, ValueError)
        True
    """


def log_traceback(error: BaseException) -> None:
    """Log the traceback of an error whose one-line message is reported elsewhere, at level DEBUG (`--verbose`)."""
    _logger.debug("traceback of: %s", error, exc_info=error)


def get_reason(error: Error) -> str:
    """Return the message of an error for an output line that already names the schedule."""
    return error.reason if isinstance(error, ScheduleFailure) else str(error)


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has no message.

    Example:
        >>> get_first_line(ValueError("a message")), get_first_line(RuntimeError())
        ('a message', 'RuntimeError')
    """
    return next(iter(str(error).splitlines()), type(error).__name__)


def describe_error(error: BaseException) -> str:
    """Return an error in one line, prefixed by its type unless it is an `Error`.

    A first line that ends with a colon is followed by the second one.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    if isinstance(error, Error):
        return lines[0].strip() if lines else type(error).__name__
    count = 2 if lines and lines[0].rstrip().endswith(":") else 1
    return ": ".join([type(error).__name__, *(line.strip().removesuffix(":") for line in lines[:count])])


@contextlib.contextmanager
def translate_to_model_error(prefix: str) -> Iterator[None]:
    """Translate foreign exceptions of the block to a one-line ModelError; an `Error` passes unchanged."""
    try:
        yield
    except Error:
        raise
    except (Exception, SystemExit) as error:
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        reason = line if len(line) <= MAX_REASON_CHARACTERS else f"{line[:MAX_REASON_CHARACTERS]}…"
        raise ModelError(": ".join(filter(None, [prefix, type(error).__name__, reason]))) from error


def escape_unprintable(text: str) -> str:
    r"""Return a text for a terminal, with unprintable characters other than newlines as Python escapes.

    File names and contents may include terminal control characters and marks that reorder the displayed text.

    Examples:
        >>> escape_unprintable("bad\x1bname")
        'bad\\x1bname'
    """
    if text.isprintable():
        return text
    characters = (
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )
    return "".join(characters)


class FallbackWarning(UserWarning):
    """A log has no usable record for this device, so the built kernel may be slower than the best one.

    Examples:
        >>> import tempfile, warnings
        >>> import tvmconv as tc
        >>> with tempfile.NamedTemporaryFile(suffix=".jsonl") as log, warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     kernel = tc.build("conv2d:1x8x8x8,8x8x3x3,s1,p1", "tiling", arch="sm_90", log=log.name)
        >>> caught[0].category.__name__
        'FallbackWarning'
    """
