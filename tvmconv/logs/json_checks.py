"""Checks of the JSON values of a log line, which may come from any source.

Each check returns the value, or raises RecordError with the name of the value.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from tvmconv.errors import RecordError
from tvmconv.workloads.text import quote

MAX_BITS = 63
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def parse_object(line: str | bytes) -> dict[str, Any]:
    """Parse the JSON object of a line."""
    if not isinstance(line, (str, bytes)):
        raise RecordError("the line is not a text", f"expected a line of a log, not {abbreviate(line)}")
    try:
        value = _DECODER.decode(line if isinstance(line, str) else line.decode())
    except (ValueError, RecursionError) as error:  # ValueError also for bad UTF-8, or integers of thousands of digits
        raise RecordError("the line is not JSON", f"expected an object, not {abbreviate(line)}") from error
    if not isinstance(value, dict):
        raise RecordError("the line is not a JSON object", abbreviate(line))
    return value


def check_list(value: object, name: str, length: int | None = None) -> list[Any]:
    """Check that a value is a list, and return it; with `length`, its length is checked as well."""
    if not isinstance(value, list) or length not in (None, len(value)):
        _fail(name, value, "a list" if length is None else f"a list of {length}")
    return value


def check_object(value: object, name: str) -> dict[str, Any]:
    """Check that a value is a JSON object, and return it."""
    if not isinstance(value, dict):
        _fail(name, value, "an object")
    return value


def check_text(value: object, name: str) -> str:
    """Check that a value is a string that UTF-8 can encode, and return it; JSON also has lone surrogates."""
    if not isinstance(value, str):
        _fail(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        _fail(name, value, "a string of whole characters")
    return value


def check_line(value: object, name: str) -> str:
    """Check that a value is a string without control characters, which is safe on a terminal, and return it."""
    checked_text = check_text(value, name)
    if _CONTROL.search(checked_text):
        _fail(name, value, "a string without control characters")
    return checked_text


def check_integer(value: object, name: str) -> int:
    """Check that a value is an integer of at most 63 bits, which fits in NumPy's int64, and return it."""
    if not isinstance(value, int) or isinstance(value, bool):
        _fail(name, value, "an integer")
    if value.bit_length() > MAX_BITS:
        _fail(name, value, f"an integer of at most {MAX_BITS} bits")
    return value


def check_number(value: object, name: str) -> float:
    """Check that a value is a finite number, and return it."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        _fail(name, value, "a number")
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted):
        _fail(name, value, "a finite number")
    return converted


def _fail(name: str, value: object, expected: str) -> NoReturn:
    raise RecordError(f"{name} is not {expected}", abbreviate(value))


def abbreviate(value: object) -> str:
    """Return the value as a short text; the name of its type if Python cannot print it (too deep, too many digits)."""
    if isinstance(value, (str, bytes)):
        return quote(value[:100])
    try:
        return quote(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to print"


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)
