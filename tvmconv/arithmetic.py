"""Integer arithmetic that schedules, cost models and reports use."""

from __future__ import annotations

from typing import Any


def ceil_div(dividend: Any, divisor: Any) -> Any:
    """Return the quotient rounded up to the next integer.

    The numbers are integers, arrays of integers or TIR expressions.

    Examples:
        >>> ceil_div(7, 2)
        4
    """
    return -(-dividend // divisor)


def round_up(value: Any, multiple: Any) -> Any:
    """Return the smallest multiple of `multiple` that is at least `value`.

    The numbers are integers, arrays of integers or TIR expressions.

    Examples:
        >>> round_up(7, 4)
        8
    """
    return ceil_div(value, multiple) * multiple
