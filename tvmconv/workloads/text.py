"""The words and numbers that the texts of all workloads are made of."""

from __future__ import annotations

from collections.abc import Container, Sequence

from tvmconv.errors import WorkloadError

MAX_ELEMENTS = 2**31 - 1  # of a tensor: TVM indexes buffers with int32
QUOTED_LENGTH = 60
MAX_DIGITS = 10  # enough for every number that a 32-bit index reaches


def by(numbers: Sequence[int]) -> str:
    """(1, 64, 56, 56) as `1x64x56x56`."""
    return "x".join(map(str, numbers))


def quote(value: object) -> str:
    """What was given, as Python would print it, in one line and shortened so that a message stays readable."""
    if isinstance(value, str):
        value = value if len(value) <= QUOTED_LENGTH else value[:QUOTED_LENGTH] + "…"
        return repr(value)
    printed = repr(value)
    return printed if len(printed) <= QUOTED_LENGTH else printed[:QUOTED_LENGTH] + "…"


def integers(piece: str, lengths: Container[int], expected: str) -> tuple[int, ...]:
    """Read integers joined by `x`, such as `1x64x56x56`.

    Args:
        piece: the text to read.
        lengths: how many integers there may be.
        expected: what would be right, for the message.

    Raises:
        WorkloadError: `piece` holds anything but ASCII digits and `x`, or another number of integers.
    """
    fields = piece.split("x")
    if len(fields) not in lengths or not all(field.isascii() and field.isdigit() for field in fields):
        raise WorkloadError(f"{quote(piece)}: expected {expected}")
    if any(len(field) > MAX_DIGITS for field in fields):
        raise WorkloadError(f"{quote(piece)}: expected numbers of at most {MAX_DIGITS} digits")
    return tuple(int(field) for field in fields)
