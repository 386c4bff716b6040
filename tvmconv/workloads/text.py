"""The words and numbers that the texts of all workloads are made of."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from numbers import Integral

from tvmconv.errors import WorkloadError

MAX_ELEMENTS = 2**31 - 1  # of a tensor: TVM indexes buffers with int32
QUOTED_LENGTH = 60
MAX_DIGITS = 10  # enough for every number that a 32-bit index reaches


def join_sizes(numbers: Sequence[int]) -> str:
    """(1, 64, 56, 56) as `1x64x56x56`."""
    return "x".join(map(str, numbers))


def quote(value: object) -> str:
    """What was given, as Python would print it, in one line and shortened so that a message stays readable."""
    if isinstance(value, str):
        value = value if len(value) <= QUOTED_LENGTH else value[:QUOTED_LENGTH] + "…"
        return repr(value)
    printed = repr(value)
    return printed if len(printed) <= QUOTED_LENGTH else printed[:QUOTED_LENGTH] + "…"


def parse_integers(text: str, lengths: Container[int], expected: str) -> tuple[int, ...]:
    """Read integers joined by `x`, such as `1x64x56x56`.

    Args:
        text: the text to read.
        lengths: how many integers there may be.
        expected: what would be right, for the message.

    Raises:
        WorkloadError: `text` holds anything but ASCII digits and `x`, or another number of integers.
    """
    fields = text.split("x")
    if len(fields) not in lengths or not all(field.isascii() and field.isdigit() for field in fields):
        raise WorkloadError(f"{quote(text)}: expected {expected}")
    if any(len(field) > MAX_DIGITS for field in fields):
        raise WorkloadError(f"{quote(text)}: expected numbers of at most {MAX_DIGITS} digits")
    return tuple(int(field) for field in fields)


def validate_integers(name: str, value: object, lengths: Sequence[int] = (1,), minimum: int = 1) -> tuple[int, ...]:
    """The integers of a workload's field, as plain ints.

    Args:
        name: of the field.
        value: an integer, also one of NumPy's, or a tuple or list of them.
        lengths: how many there may be, in ascending order.
        minimum: the smallest that each may be.

    Raises:
        WorkloadError: it is something else, or a number is out of range.
    """
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(values) not in lengths or any(isinstance(v, bool) or not isinstance(v, Integral) for v in values):
        raise WorkloadError(f"{name}={quote(value)}: expected {describe_count(lengths)}")
    if any(abs(number) > MAX_ELEMENTS for number in values):
        raise WorkloadError(f"{name} is past {MAX_ELEMENTS}, the largest that TVM's 32-bit index reaches")
    if min(values) < minimum:
        raise WorkloadError(f"{name}={quote(value)}: expected at least {minimum}")
    return tuple(int(number) for number in values)


def describe_count(lengths: Sequence[int]) -> str:
    """(1, 2) as `1 or 2 parse_integers`."""
    return f"{' or '.join(map(str, lengths))} integer{'s' if lengths[-1] > 1 else ''}"


def check_elements(name: str, shape: Sequence[int]) -> None:
    """Raise WorkloadError for a tensor with more elements than TVM indexes."""
    if math.prod(shape) > MAX_ELEMENTS:
        raise WorkloadError(
            f"{name} of {join_sizes(shape)} has {math.prod(shape)} elements: expected at most {MAX_ELEMENTS}, "
            "which TVM's 32-bit index reaches"
        )
