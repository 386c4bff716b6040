"""JSON that anyone may have written: strictly parsed, and read by types, with the path of what is wrong.

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

MAX_BITS = 63  # of an integer, as NumPy's have room for
MAX_TEXT_LENGTH = 100_000  # characters
MAX_DEPTH = 64  # lists and objects within one another
MAX_SHOWN_LENGTH = 60
_NAME_PATTERN = re.compile(r"[A-Za-z_]\w*", re.ASCII)

T = TypeVar("T")


class JsonError(Error, ValueError):
    """JSON that is none, or that has something else than what is expected, with its place."""


def parse_json(data: bytes | str) -> JsonValue:
    """The value of a JSON text.

    Raises:
        JsonError: the text is not UTF-8, no JSON, or nested too deeply; NaN and Infinity are no JSON.
    """
    try:
        value = _DECODER.decode(data if isinstance(data, str) else data.decode())
    except UnicodeDecodeError as error:
        raise JsonError(f"it is not UTF-8: byte {error.start}") from error
    except RecursionError as error:
        raise JsonError("it is no JSON: lists or objects are nested too deeply") from error
    except (ValueError, MemoryError) as error:  # also of an integer of thousands of digits
        raise JsonError(f"it is no JSON: {error}" if str(error) else "it is no JSON") from error
    if _is_too_deep(value):
        raise JsonError(f"lists or objects are nested more than {MAX_DEPTH} deep")
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
    """The value in a JSON file, plain or compressed by gzip.

    Args:
        file: its path.
        max_bytes: the most that it may have, unpacked.

    Raises:
        JsonError: it holds no JSON.
        OSError: it cannot be read, is no regular file, or is larger.
    """
    return parse_json(read_bytes(file, max_bytes, unpack=True))


@contextlib.contextmanager
def translate_json_errors(prefix: str, kind: type[Error] = Error) -> Iterator[None]:
    """Raise a `JsonError` of the block as an error of a kind: "WHAT (why)"."""
    try:
        yield
    except JsonError as error:
        raise kind(f"{prefix} ({error})") from error


@dataclass(frozen=True)
class JsonValue:
    """A value of JSON, and where it is.

    Attributes:
        value: as `json` gives it.
        path: such as `layers[0].label`; "" for the whole.
    """

    value: Any
    path: str = ""

    def __getitem__(self, name: str) -> JsonValue:
        """A member of an object; raises `JsonError` if there is none of that name."""
        member = self.get(name)
        if member is None:
            self.refuse(f"an object with {json.dumps(name)}")
        return member

    def get(self, name: str) -> JsonValue | None:
        """A member of an object, or None; raises `JsonError` if this is no object."""
        members = self._get_object()
        return JsonValue(members[name], self._make_member_path(name)) if name in members else None

    def elements(self) -> list[JsonValue]:
        """The elements of a list; raises `JsonError` if it is none."""
        if not isinstance(self.value, list):
            self.refuse("a list")
        return [JsonValue(element, f"{self.path}[{index}]") for index, element in enumerate(self.value)]

    def members(self) -> dict[str, JsonValue]:
        """The members of an object by name; raises `JsonError` if it is none."""
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
        """The value as something of a type.

        Args:
            kind: str, int, float (also of an integer; never infinite), bool, an `Enum` by its values, a list, tuple,
                dict or `Mapping` of such, a union of these and None, a `TypedDict`, which may have more members, or a
                dataclass, which may not, and whose `__post_init__` may raise `Error`.
            provided_fields: fields of a dataclass that are not read from the object.

        Raises:
            JsonError: it is something else.
        """
        return _make_decoder(kind)(self, provided_fields or {})

    def convert(self, function: Callable[[str], T]) -> T:
        """What a function makes of a text; raises `JsonError` where it raises `Error`."""
        text = self.decode(str)
        try:
            return function(text)
        except Error as error:
            raise JsonError(f"{self.path}: {error}") from error

    def check(self, condition: bool, expected: str) -> JsonValue:
        """This value, unless a condition is false: then raise `JsonError`."""
        if not condition:
            self.refuse(expected)
        return self

    def decode_line(self, max_length: int = MAX_TEXT_LENGTH) -> str:
        """A text of so many characters at most, all of them printable; raises `JsonError`."""
        text = self.decode(str)
        self.check(text.isprintable(), "a text without control characters")
        self.check(len(text) <= max_length, f"a text of at most {max_length} characters")
        return text

    def decode_number(self, minimum: float = -math.inf, maximum: float = math.inf) -> float:
        """A number from `minimum` to `maximum`; raises `JsonError`."""
        number = self.decode(float)
        self.check(minimum <= number <= maximum, _describe_range("a number", minimum, maximum))
        return number

    def decode_integer(self, minimum: int = -(1 << MAX_BITS), maximum: int = 1 << MAX_BITS) -> int:
        """An integer from `minimum` to `maximum`; raises `JsonError`."""
        number = self.decode(int)
        self.check(minimum <= number <= maximum, _describe_range("an integer", minimum, maximum))
        return number

    def refuse(self, expected: str) -> NoReturn:
        """Raise `JsonError`, as something else is expected here."""
        raise JsonError(f"{self.path}: " * bool(self.path) + f"expected {expected}, got {abbreviate_value(self.value)}")


def _describe_range(noun: str, minimum: float, maximum: float) -> str:
    if math.isinf(maximum) or maximum >= 1 << MAX_BITS:
        return f"{noun} of at least {minimum:.12g}"
    return f"{noun} from {minimum:.12g} to {maximum:.12g}"


def abbreviate_value(value: object) -> str:
    """A value as JSON has it, in one line and shortened; one that is too deep or too large to print by its type."""
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


_Decoder = Callable[[JsonValue, Mapping[str, Any]], Any]
_SCALARS: Mapping[Any, str] = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    types.NoneType: "null",
}


@functools.cache
def _make_decoder(kind: Any) -> _Decoder:
    """The function that reads a value of a type."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return lambda value, provided_fields: value.value
    if kind in _SCALARS:
        return functools.partial(_decode_scalar, kind)
    if origin in (Union, types.UnionType):
        return functools.partial(_decode_union, typing.get_args(kind))
    if origin in (list, tuple, Sequence):
        return functools.partial(_decode_sequence, origin, typing.get_args(kind))
    if origin in (dict, Mapping):
        return functools.partial(_decode_mapping, typing.get_args(kind)[1])
    if typing.is_typeddict(kind):
        return functools.partial(_decode_typed_dict, kind, typing.get_type_hints(kind))
    if dataclasses.is_dataclass(kind):
        return functools.partial(_decode_dataclass, kind, typing.get_type_hints(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return functools.partial(_decode_enum, kind)
    raise TypeError(f"no way to read {kind} from JSON")


def _decode_scalar(kind: Any, value: JsonValue, provided_fields: Mapping[str, Any]) -> Any:
    raw_value = value.value
    if not _has_json_type(raw_value, kind):
        value.refuse(_SCALARS[kind])
    if kind is str:
        if len(raw_value) > MAX_TEXT_LENGTH:
            value.refuse(f"a text of at most {MAX_TEXT_LENGTH} characters")
        if any("\ud800" <= character <= "\udfff" for character in raw_value):  # half of a pair, which UTF-8 cannot have
            value.refuse("a text of whole characters")
    if kind is int and raw_value.bit_length() > MAX_BITS:
        value.refuse(f"an integer of at most {MAX_BITS} bits")
    if kind is float and not (isinstance(raw_value, int) and raw_value.bit_length() <= MAX_BITS):
        return _decode_finite(value)
    return raw_value


def _decode_finite(value: JsonValue) -> float:
    try:
        number = float(value.value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        value.refuse("a finite number")
    return number


def _has_json_type(raw_value: object, kind: Any) -> bool:
    """Whether a value is of the kind of JSON that a type is read from."""
    if kind is float:
        return isinstance(raw_value, (int, float)) and not isinstance(raw_value, bool)
    if kind in _SCALARS:
        return type(raw_value) is kind
    origin = typing.get_origin(kind)
    if origin in (list, tuple, Sequence):
        return isinstance(raw_value, list)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return not isinstance(raw_value, (list, dict))
    return isinstance(raw_value, dict)


def _decode_union(kinds: Sequence[Any], value: JsonValue, provided_fields: Mapping[str, Any]) -> Any:
    for kind in kinds:
        if kind is Any or _has_json_type(value.value, kind):
            return value.decode(kind)
    value.refuse(" or ".join(map(_describe_kind, kinds)))


def _describe_kind(kind: Any) -> str:
    if kind in _SCALARS:
        return _SCALARS[kind]
    return "a list" if typing.get_origin(kind) in (list, tuple, Sequence) else "an object"


def _decode_sequence(origin: Any, kinds: Sequence[Any], value: JsonValue, provided_fields: Mapping[str, Any]) -> Any:
    elements = value.elements()
    if origin is tuple and kinds[-1] is not ...:
        if len(elements) != len(kinds):
            value.refuse(f"a list of {len(kinds)}")
        return tuple(element.decode(kind) for element, kind in zip(elements, kinds, strict=True))
    decode_element = _make_decoder(kinds[0])
    decoded = [decode_element(element, {}) for element in elements]
    return tuple(decoded) if origin is tuple else decoded


def _decode_mapping(kind: Any, value: JsonValue, provided_fields: Mapping[str, Any]) -> dict[str, Any]:
    return {JsonValue(name, value.path).decode(str): member.decode(kind) for name, member in value.members().items()}


def _decode_typed_dict(
    kind: Any, hints: Mapping[str, Any], value: JsonValue, provided_fields: Mapping[str, Any]
) -> dict[str, Any]:
    for name in sorted(kind.__required_keys__):
        value[name]
    return {
        name: member.decode(hints[name]) if name in hints else member.value for name, member in value.members().items()
    }


def _decode_dataclass(kind: Any, hints: Mapping[str, Any], value: JsonValue, provided_fields: Mapping[str, Any]) -> Any:
    members, arguments = value.members(), dict(provided_fields)
    for field in dataclasses.fields(kind):
        if field.name in provided_fields or not field.init:
            members.pop(field.name, None)
        elif field.name in members:
            arguments[field.name] = members.pop(field.name).decode(hints[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            value[field.name]
    if members:
        name = next(iter(members))
        value.refuse(f"an object without {abbreviate_value(name)}")
    try:
        return kind(**arguments)
    except Error as error:
        raise JsonError(f"{value.path}: {error}" if value.path else str(error)) from error


def _decode_enum(kind: Any, value: JsonValue, provided_fields: Mapping[str, Any]) -> Any:
    raw_value = value.value
    if isinstance(raw_value, (int, str)) and not isinstance(raw_value, bool):
        with contextlib.suppress(ValueError):
            return kind(raw_value)
    value.refuse(f"one of {', '.join(abbreviate_value(member.value) for member in kind)}")


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)
