"""Integer arithmetic that schedules, cost models and reports share."""

from __future__ import annotations

from typing import Any


def ceil_div(dividend: Any, divisor: Any) -> Any:
    """Return the quotient, rounded up to the next integer.

    Args:
        dividend: an integer, an array of integers or a TIR expression.
        divisor: the same; positive.

    Example:
        >>> ceil_div(7, 2)
        4
    """
    return -(-dividend // divisor)


def round_up(value: Any, multiple: Any) -> Any:
    """Return the smallest multiple that is no less than the value.

    Args:
        value: an integer, an array of integers or a TIR expression.
        multiple: the same; positive.

    Example:
        >>> round_up(7, 4)
        8
    """
    return ceil_div(value, multiple) * multiple
