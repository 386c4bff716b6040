"""Parsing and formatting helpers for the texts of all workloads."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from numbers import Integral

from tvmconv.errors import WorkloadError

MAX_INTEGER = 2**31 - 1  # limit of a size: coordinates and numbers of pixels are int32
MAX_INT32_ELEMENTS = 2**31 - 1  # largest tensor whose offsets are int32
MAX_PIXELS = 2**31 - 2**16  # limit of the pixels of a tensor, so that the pixels of tiles that overhang are int32
MAX_ELEMENTS = 2**40  # limit of a tensor, more than a GPU's memory holds
QUOTED_LENGTH = 60
MAX_DIGITS = 10  # number of digits of MAX_INTEGER


def join_sizes(numbers: Sequence[int]) -> str:
    """Return (1, 64, 56, 56) as `1x64x56x56`."""
    return "x".join(map(str, numbers))


def quote(value: object) -> str:
    """Return the `repr` of a value, cut to `QUOTED_LENGTH` characters so that a message stays readable."""
    if isinstance(value, str):
        return repr(value if len(value) <= QUOTED_LENGTH else value[:QUOTED_LENGTH] + "…")
    printed = repr(value)
    return printed if len(printed) <= QUOTED_LENGTH else printed[:QUOTED_LENGTH] + "…"


def parse_integers(text: str, lengths: Container[int], expected: str) -> tuple[int, ...]:
    """Read integers joined by `x`, such as `1x64x56x56`; raise WorkloadError saying what is expected."""
    fields = text.split("x")
    if len(fields) not in lengths or not all(field.isascii() and field.isdigit() for field in fields):
        raise WorkloadError(f"{quote(text)}: expected {expected}")
    if any(len(field) > MAX_DIGITS for field in fields):
        raise WorkloadError(f"{quote(text)}: expected numbers of at most {MAX_DIGITS} digits")
    return tuple(int(field) for field in fields)


def validate_integers(name: str, value: object, lengths: Sequence[int] = (1,), minimum: int = 1) -> tuple[int, ...]:
    """Return an integer (Python's or NumPy's), or a tuple or list of integers, of a workload's field as plain ints.
    Raises WorkloadError if the value has another type, a length not in `lengths`, or a number out of range.
    """
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(values) not in lengths or any(isinstance(v, bool) or not isinstance(v, Integral) for v in values):
        raise WorkloadError(f"{name}={quote(value)}: expected {describe_count(lengths)}")
    if any(abs(number) > MAX_INTEGER for number in values):
        raise WorkloadError(f"{name} is out of range: expected at most {MAX_INTEGER}, the largest int32")
    if min(values) < minimum:
        raise WorkloadError(f"{name}={quote(value)}: expected at least {minimum}")
    return tuple(int(number) for number in values)


def describe_count(lengths: Sequence[int]) -> str:
    """Return (1, 2) as `1 or 2 integers`."""
    return f"{' or '.join(map(str, lengths))} integer{'s' if lengths[-1] > 1 else ''}"


def check_elements(name: str, shape: Sequence[int], max_elements: int = MAX_ELEMENTS) -> None:
    """Raise WorkloadError for a tensor with more elements than kernels can index."""
    if math.prod(shape) > max_elements:
        raise WorkloadError(
            f"{name} of {join_sizes(shape)} has {math.prod(shape)} elements: expected at most {max_elements}"
        )
