"""Strict decoding of untrusted JSON to typed values, with the path of each fault.

sweep = jsonfile.parse_json(data)
for layer in sweep["layers"].elements():
    label = layer["label"].decode(str)  # raises JsonError: "layers[0].label: expected a text, got null"
    row = layer["row"].decode(Row)  # a dataclass, whose fields are checked by their annotations
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, Union

from tvmconv.errors import Error, escape_unprintable
from tvmconv.files import MAX_BYTES, read_bytes

MAX_BITS = 63  # bits of an integer without its sign, as in NumPy's int64
MAX_TEXT_LENGTH = 100_000  # characters
MAX_DEPTH = 64  # levels of nested lists and objects
MAX_SHOWN_LENGTH = 60  # characters of a value in a message
_NAME_PATTERN = re.compile(r"[A-Za-z_]\w*", re.ASCII)

T = TypeVar("T")


class JsonError(Error, ValueError):
    """A text is not JSON, or a value in it is not of the expected kind; the message gives the path."""


def parse_json(data: bytes | str) -> JsonValue:
    """Parse a JSON text.

    Examples:
        >>> parse_json('{"sizes": [1, 2]}')["sizes"].decode(list[int])
        [1, 2]
    """
    try:
        value = _DECODER.decode(data if isinstance(data, str) else data.decode())
    except UnicodeDecodeError as error:
        raise JsonError(f"expected UTF-8, got another encoding at byte {error.start}") from error
    except RecursionError as error:
        raise JsonError("expected JSON: lists or objects are nested too deeply") from error
    except (ValueError, MemoryError) as error:  # an integer of thousands of digits raises ValueError too
        raise JsonError(f"expected JSON: {error}" if str(error) else "expected JSON") from error
    if _is_too_deep(value):
        raise JsonError(f"expected lists and objects of at most {MAX_DEPTH} levels")
    return JsonValue(value)


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for container in level
            if isinstance(container, (list, dict))
            for inner in (container.values() if isinstance(container, dict) else container)
            if isinstance(inner, (list, dict))
        ]
        if not level:
            return False
    return True


def read_json(file: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> JsonValue:
    """Parse a JSON file, plain or compressed by gzip."""
    return parse_json(read_bytes(file, max_bytes, unpack=True))


@contextlib.contextmanager
def translate_json_errors(prefix: str, kind: type[Error] = Error) -> Iterator[None]:
    """Translate a `JsonError` of the block to another error with the message "PREFIX (REASON)"."""
    try:
        yield
    except JsonError as error:
        raise kind(f"{prefix} ({error})") from error


@dataclass(frozen=True)
class JsonValue:
    """A JSON value with its path."""

    value: Any  # value as `json` returns it
    path: str = ""  # path from the root, such as `layers[0].label`; "" for the root

    def __getitem__(self, name: str) -> JsonValue:
        """Return a member of an object; raises `JsonError` if it is missing."""
        member = self.get(name)
        if member is None:
            self.refuse(f"an object with {json.dumps(name)}")
        return member

    def get(self, name: str) -> JsonValue | None:
        """Return a member of an object, or None if it is missing; raises `JsonError` if the value is not an object."""
        members = self._get_object()
        return JsonValue(members[name], self._make_member_path(name)) if name in members else None

    def elements(self) -> list[JsonValue]:
        """Return the elements of a list; raises `JsonError` if the value is not a list."""
        if not isinstance(self.value, list):
            self.refuse("a list")
        return [JsonValue(element, f"{self.path}[{index}]") for index, element in enumerate(self.value)]

    def members(self) -> dict[str, JsonValue]:
        """Return the members of an object by name; raises `JsonError` if the value is not an object."""
        return {name: JsonValue(member, self._make_member_path(name)) for name, member in self._get_object().items()}

    def rename_members(self, new_by_old: Mapping[str, str]) -> JsonValue:
        """Return this object with members renamed by a table; raise `JsonError` if it has one by both names."""
        members = self._get_object()
        for old, new in new_by_old.items():
            self.check(
                not (old in members and new in members), f"an object with {json.dumps(new)} once, not as {old} too"
            )
        return JsonValue({new_by_old.get(name, name): member for name, member in members.items()}, self.path)

    def _get_object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            self.refuse("an object")
        return self.value

    def _make_member_path(self, name: str) -> str:
        segment = name if _NAME_PATTERN.fullmatch(name) else f"[{abbreviate_value(name)}]"
        return f"{self.path}.{segment}" if self.path and segment == name else self.path + segment

    def decode(self, kind: Any, provided_fields: Mapping[str, Any] | None = None) -> Any:
        """Return the value, checked and converted to a type.

        `kind`: str, int, float (accepts integers, must be finite), bool, an `Enum` (by value), a list, tuple, dict or
            `Mapping` of these, a union of these and None, a `TypedDict`, or a dataclass. A `TypedDict` may have further
            members; a dataclass may not, and its `__post_init__` may raise `Error`.
        `provided_fields`: fields of a dataclass that are not read from the object.
        """
        return _decode_dataclass(self, kind, provided_fields) if provided_fields else _decode(self, kind)

    def convert(self, function: Callable[[str], T]) -> T:
        """Return a function's result for this text; raises `JsonError` if the function raises `Error`."""
        text = self.decode(str)
        try:
            return function(text)
        except Error as error:
            raise JsonError(f"{self.path}: {error}") from error

    def check(self, condition: bool, expected: str) -> JsonValue:
        """Return this value, or raise `JsonError` with what is expected if a condition is false."""
        if not condition:
            self.refuse(expected)
        return self

    def decode_line(self, max_length: int = MAX_TEXT_LENGTH) -> str:
        """Return a text with only printable characters and a maximum length, or raise `JsonError`."""
        text = self.decode(str)
        self.check(text.isprintable(), "a text without control characters")
        self.check(len(text) <= max_length, f"a text of at most {max_length} characters")
        return text

    def decode_number(self, minimum: float = -math.inf, maximum: float = math.inf) -> float:
        """Return a number from `minimum` to `maximum`, or raise `JsonError`."""
        number = self.decode(float)
        if not minimum <= number <= maximum:
            self.refuse(_describe_range("a number", minimum, maximum))
        return number

    def decode_integer(self, minimum: int = -(1 << MAX_BITS), maximum: int = 1 << MAX_BITS) -> int:
        """Return an integer from `minimum` to `maximum`, or raise `JsonError`."""
        number = self.decode(int)
        if not minimum <= number <= maximum:
            self.refuse(_describe_range("an integer", minimum, maximum))
        return number

    def refuse(self, expected: str) -> NoReturn:
        """Raise `JsonError` with what is expected instead of this value."""
        raise JsonError(f"{self.path}: " * bool(self.path) + f"expected {expected}, got {abbreviate_value(self.value)}")


def _describe_range(noun: str, minimum: float, maximum: float) -> str:
    if math.isinf(maximum) or maximum >= 1 << MAX_BITS:
        return f"{noun} of at least {minimum:.12g}"
    return f"{noun} from {minimum:.12g} to {maximum:.12g}"


def abbreviate_value(value: object) -> str:
    """Return a value as JSON in one shortened line, or only its type if it is too deep or too large to print."""
    if isinstance(value, str):
        text = value if len(value) <= MAX_SHOWN_LENGTH else value[:MAX_SHOWN_LENGTH] + "…"
        return escape_unprintable(json.dumps(text, ensure_ascii=False))
    if isinstance(value, list) and value:
        return f"a list of {len(value)}"
    if isinstance(value, dict) and value:
        return f"an object of {len(value)}"
    try:
        text = json.dumps(value)
    except (ValueError, TypeError):
        return f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= MAX_SHOWN_LENGTH else text[:MAX_SHOWN_LENGTH] + "…"


_SCALARS: Mapping[Any, str] = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    types.NoneType: "null",
}
_get_type_hints = functools.cache(typing.get_type_hints)


def _decode(value: JsonValue, kind: Any) -> Any:
    """Return a value as `JsonValue.decode` does."""
    if kind is Any:
        return value.value
    if kind in _SCALARS:
        return _decode_scalar(value, kind)
    origin, kinds = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        for member_kind in kinds:
            if member_kind is Any or _has_json_type(value.value, member_kind):
                return _decode(value, member_kind)
        value.refuse(" or ".join(map(_describe_kind, kinds)))
    if origin in (list, tuple, Sequence):
        elements = value.elements()
        if origin is tuple and kinds[-1] is not ...:
            value.check(len(elements) == len(kinds), f"a list of {len(kinds)}")
            return tuple(map(_decode, elements, kinds))
        decoded = [_decode(element, kinds[0]) for element in elements]
        return tuple(decoded) if origin is tuple else decoded
    if origin in (dict, Mapping):
        members = value.members().items()
        return {_decode(JsonValue(name, value.path), str): _decode(member, kinds[1]) for name, member in members}
    if typing.is_typeddict(kind):
        return _decode_typed_dict(value, kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(value, kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _decode_enum(value, kind)
    raise TypeError(f"cannot decode {kind} from JSON")


def _decode_scalar(value: JsonValue, kind: Any) -> Any:
    raw_value = value.value
    value.check(_has_json_type(raw_value, kind), _SCALARS[kind])
    if kind is str:
        value.check(len(raw_value) <= MAX_TEXT_LENGTH, f"a text of at most {MAX_TEXT_LENGTH} characters")
        # Lone surrogates are not valid in UTF-8.
        value.check(not any("\ud800" <= letter <= "\udfff" for letter in raw_value), "a text of whole characters")
    if kind is int:
        value.check(raw_value.bit_length() <= MAX_BITS, f"an integer of at most {MAX_BITS} bits")
    if kind is float and not (isinstance(raw_value, int) and raw_value.bit_length() <= MAX_BITS):
        try:
            raw_value = float(raw_value)
        except OverflowError:
            raw_value = math.inf
        value.check(math.isfinite(raw_value), "a finite number")
    return raw_value


def _has_json_type(raw_value: object, kind: Any) -> bool:
    """Return whether a value has the JSON type that a Python type is decoded from."""
    if kind is float:
        return isinstance(raw_value, (int, float)) and not isinstance(raw_value, bool)
    if kind in _SCALARS:
        return type(raw_value) is kind
    if typing.get_origin(kind) in (list, tuple, Sequence):
        return isinstance(raw_value, list)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return not isinstance(raw_value, (list, dict))
    return isinstance(raw_value, dict)


def _describe_kind(kind: Any) -> str:
    if kind in _SCALARS:
        return _SCALARS[kind]
    return "a list" if typing.get_origin(kind) in (list, tuple, Sequence) else "an object"


def _decode_typed_dict(value: JsonValue, kind: Any) -> dict[str, Any]:
    hints = _get_type_hints(kind)
    for name in sorted(kind.__required_keys__):
        value[name]
    members = value.members().items()
    return {name: _decode(member, hints[name]) if name in hints else member.value for name, member in members}


def _decode_dataclass(value: JsonValue, kind: Any, provided_fields: Mapping[str, Any] | None = None) -> Any:
    members, arguments = value.members(), dict(provided_fields or {})
    for field in dataclasses.fields(kind):
        if field.name in arguments or not field.init:
            members.pop(field.name, None)
        elif field.name in members:
            arguments[field.name] = _decode(members.pop(field.name), _get_type_hints(kind)[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            value[field.name]
    if members:
        value.refuse(f"an object without {abbreviate_value(next(iter(members)))}")
    try:
        return kind(**arguments)
    except Error as error:
        raise JsonError(f"{value.path}: {error}" if value.path else str(error)) from error


def _decode_enum(value: JsonValue, kind: Any) -> Any:
    raw_value = value.value
    if isinstance(raw_value, (int, str)) and not isinstance(raw_value, bool):
        with contextlib.suppress(ValueError):
            return kind(raw_value)
    value.refuse(f"one of {', '.join(abbreviate_value(member.value) for member in kind)}")


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)
