"""JSON that anyone may have written: strictly parsed, and read by types, with the path of what is wrong.

sweep = jsonfile.parse(data)
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

from tvmconv.errors import Error, printable
from tvmconv.files import MAX_BYTES, read_bytes

MAX_BITS = 63  # of an integer, as NumPy's have room for
MAX_TEXT = 100_000  # characters
MAX_DEPTH = 64  # lists and objects within one another
SHOWN_LENGTH = 60
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)

T = TypeVar("T")


class JsonError(Error, ValueError):
    """JSON that is none, or that has something else than what is expected, with its place."""


def parse(data: bytes | str) -> Value:
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
    if _is_deep(value):
        raise JsonError(f"lists or objects are nested more than {MAX_DEPTH} deep")
    return Value(value)


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for each in level
            if isinstance(each, (list, dict))
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, (list, dict))
        ]
        if not level:
            return False
    return True


def read(file: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> Value:
    """The value in a JSON file, plain or compressed by gzip.

    Args:
        file: its path.
        max_bytes: the most that it may have, unpacked.

    Raises:
        JsonError: it holds no JSON.
        OSError: it cannot be read, is no regular file, or is larger.
    """
    return parse(read_bytes(file, max_bytes, unpack=True))


@contextlib.contextmanager
def refused(what: str, kind: type[Error] = Error) -> Iterator[None]:
    """Raise a `JsonError` of the block as an error of a kind: "WHAT (why)"."""
    try:
        yield
    except JsonError as error:
        raise kind(f"{what} ({error})") from error


@dataclass(frozen=True)
class Value:
    """A value of JSON, and where it is.

    Attributes:
        value: as `json` gives it.
        path: such as `layers[0].label`; "" for the whole.
    """

    value: Any
    path: str = ""

    def __getitem__(self, name: str) -> Value:
        """A member of an object; raises `JsonError` if there is none of that name."""
        found = self.get(name)
        if found is None:
            self.refuse(f"an object with {json.dumps(name)}")
        return found

    def get(self, name: str) -> Value | None:
        """A member of an object, or None; raises `JsonError` if this is no object."""
        members = self._table()
        return Value(members[name], self._inside(name)) if name in members else None

    def elements(self) -> list[Value]:
        """The elements of a list; raises `JsonError` if it is none."""
        if not isinstance(self.value, list):
            self.refuse("a list")
        return [Value(each, f"{self.path}[{place}]") for place, each in enumerate(self.value)]

    def members(self) -> dict[str, Value]:
        """The members of an object by name; raises `JsonError` if it is none."""
        return {name: Value(each, self._inside(name)) for name, each in self._table().items()}

    def _table(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            self.refuse("an object")
        return self.value

    def _inside(self, name: str) -> str:
        step = name if _NAME.fullmatch(name) else f"[{shown(name)}]"
        return f"{self.path}.{step}" if self.path and step == name else self.path + step

    def decode(self, kind: Any, given: Mapping[str, Any] | None = None) -> Any:
        """The value as something of a type.

        Args:
            kind: str, int, float (also of an integer; never infinite), bool, an `Enum` by its values, a list, tuple,
                dict or `Mapping` of such, a union of these and None, a `TypedDict`, which may have more members, or a
                dataclass, which may not, and whose `__post_init__` may raise `Error`.
            given: fields of a dataclass that are not read from the object.

        Raises:
            JsonError: it is something else.
        """
        return _decoder(kind)(self, given or {})

    def convert(self, function: Callable[[str], T]) -> T:
        """What a function makes of a text; raises `JsonError` where it raises `Error`."""
        text = self.decode(str)
        try:
            return function(text)
        except Error as error:
            raise JsonError(f"{self.path}: {error}") from error

    def check(self, good: bool, expected: str) -> Value:
        """This value, unless a condition is false: then raise `JsonError`."""
        if not good:
            self.refuse(expected)
        return self

    def line(self, max_length: int = MAX_TEXT) -> str:
        """A text of so many characters at most, all of them printable; raises `JsonError`."""
        text = self.decode(str)
        self.check(text.isprintable(), "a text without control characters")
        self.check(len(text) <= max_length, f"a text of at most {max_length} characters")
        return text

    def number(self, least: float = -math.inf, most: float = math.inf) -> float:
        """A number from `least` to `most`; raises `JsonError`."""
        number = self.decode(float)
        self.check(least <= number <= most, _range("a number", least, most))
        return number

    def integer(self, least: int = -(1 << MAX_BITS), most: int = 1 << MAX_BITS) -> int:
        """An integer from `least` to `most`; raises `JsonError`."""
        number = self.decode(int)
        self.check(least <= number <= most, _range("an integer", least, most))
        return number

    def refuse(self, expected: str) -> NoReturn:
        """Raise `JsonError`, as something else is expected here."""
        raise JsonError(f"{self.path}: " * bool(self.path) + f"expected {expected}, got {shown(self.value)}")


def _range(what: str, least: float, most: float) -> str:
    if math.isinf(most) or most >= 1 << MAX_BITS:
        return f"{what} of at least {least:.12g}"
    return f"{what} from {least:.12g} to {most:.12g}"


def shown(value: object) -> str:
    """A value as JSON has it, in one line and shortened; one that is too deep or too large to print by its type."""
    if isinstance(value, str):
        text = value if len(value) <= SHOWN_LENGTH else value[:SHOWN_LENGTH] + "…"
        return printable(json.dumps(text, ensure_ascii=False))
    if isinstance(value, list) and value:
        return f"a list of {len(value)}"
    if isinstance(value, dict) and value:
        return f"an object of {len(value)}"
    try:
        text = json.dumps(value)
    except (ValueError, TypeError):
        return f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= SHOWN_LENGTH else text[:SHOWN_LENGTH] + "…"


_Decoder = Callable[[Value, Mapping[str, Any]], Any]
_SCALARS: Mapping[Any, str] = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    types.NoneType: "null",
}


@functools.cache
def _decoder(kind: Any) -> _Decoder:
    """The function that reads a value of a type."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return lambda value, given: value.value
    if kind in _SCALARS:
        return functools.partial(_scalar, kind)
    if origin in (Union, types.UnionType):
        return functools.partial(_union, typing.get_args(kind))
    if origin in (list, tuple, Sequence):
        return functools.partial(_sequence, origin, typing.get_args(kind))
    if origin in (dict, Mapping):
        return functools.partial(_mapping, typing.get_args(kind)[1])
    if typing.is_typeddict(kind):
        return functools.partial(_typed_dict, kind, typing.get_type_hints(kind))
    if dataclasses.is_dataclass(kind):
        return functools.partial(_dataclass, kind, typing.get_type_hints(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return functools.partial(_enum, kind)
    raise TypeError(f"no way to read {kind} from JSON")


def _scalar(kind: Any, value: Value, given: Mapping[str, Any]) -> Any:
    got = value.value
    if not _fits(got, kind):
        value.refuse(_SCALARS[kind])
    if kind is str:
        if len(got) > MAX_TEXT:
            value.refuse(f"a text of at most {MAX_TEXT} characters")
        if any("\ud800" <= character <= "\udfff" for character in got):  # half of a pair, which UTF-8 cannot have
            value.refuse("a text of whole characters")
    if kind is int and got.bit_length() > MAX_BITS:
        value.refuse(f"an integer of at most {MAX_BITS} bits")
    if kind is float and not (isinstance(got, int) and got.bit_length() <= MAX_BITS):
        return _finite(value)
    return got


def _finite(value: Value) -> float:
    try:
        number = float(value.value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        value.refuse("a finite number")
    return number


def _fits(got: object, kind: Any) -> bool:
    """Whether a value is of the kind of JSON that a type is read from."""
    if kind is float:
        return isinstance(got, (int, float)) and not isinstance(got, bool)
    if kind in _SCALARS:
        return type(got) is kind
    origin = typing.get_origin(kind)
    if origin in (list, tuple, Sequence):
        return isinstance(got, list)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return not isinstance(got, (list, dict))
    return isinstance(got, dict)


def _union(kinds: Sequence[Any], value: Value, given: Mapping[str, Any]) -> Any:
    for kind in kinds:
        if kind is Any or _fits(value.value, kind):
            return value.decode(kind)
    value.refuse(" or ".join(map(_named, kinds)))


def _named(kind: Any) -> str:
    if kind in _SCALARS:
        return _SCALARS[kind]
    return "a list" if typing.get_origin(kind) in (list, tuple, Sequence) else "an object"


def _sequence(origin: Any, kinds: Sequence[Any], value: Value, given: Mapping[str, Any]) -> Any:
    elements = value.elements()
    if origin is tuple and kinds[-1] is not ...:
        if len(elements) != len(kinds):
            value.refuse(f"a list of {len(kinds)}")
        return tuple(each.decode(kind) for each, kind in zip(elements, kinds, strict=True))
    read = _decoder(kinds[0])
    found = [read(each, {}) for each in elements]
    return tuple(found) if origin is tuple else found


def _mapping(kind: Any, value: Value, given: Mapping[str, Any]) -> dict[str, Any]:
    return {Value(name, value.path).decode(str): each.decode(kind) for name, each in value.members().items()}


def _typed_dict(kind: Any, hints: Mapping[str, Any], value: Value, given: Mapping[str, Any]) -> dict[str, Any]:
    for name in sorted(kind.__required_keys__):
        value[name]
    return {name: each.decode(hints[name]) if name in hints else each.value for name, each in value.members().items()}


def _dataclass(kind: Any, hints: Mapping[str, Any], value: Value, given: Mapping[str, Any]) -> Any:
    members, found = value.members(), dict(given)
    for field in dataclasses.fields(kind):
        if field.name in given or not field.init:
            members.pop(field.name, None)
        elif field.name in members:
            found[field.name] = members.pop(field.name).decode(hints[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            value[field.name]
    if members:
        name = next(iter(members))
        value.refuse(f"an object without {shown(name)}")
    try:
        return kind(**found)
    except Error as error:
        raise JsonError(f"{value.path}: {error}" if value.path else str(error)) from error


def _enum(kind: Any, value: Value, given: Mapping[str, Any]) -> Any:
    got = value.value
    if isinstance(got, (int, str)) and not isinstance(got, bool):
        with contextlib.suppress(ValueError):
            return kind(got)
    value.refuse(f"one of {', '.join(shown(each.value) for each in kind)}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
