"""`--input`: what a model is given, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvmconv.errors import ModelError
from tvmconv.workloads.text import by, checked_integers, integers, quote

DTYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f64": "float64",
    "i64": "int64",
    "i32": "int32",
    "bool": "bool",
}
EXAMPLE = "1x3x224x224"
EXPECTED = f"[NAME=]SIZES[,DTYPE], as in {EXAMPLE}"
MOST_AXES = 16


@dataclass(frozen=True)
class Input:
    """The shape of an input of a model.

    Attributes:
        shape: its sizes.
        name: what the model calls it; None for one that is given in order.
        dtype: of its elements, a value of `DTYPES`; None if unsaid.
    """

    shape: tuple[int, ...]
    name: str | None = None
    dtype: str | None = None

    @classmethod
    def parse(cls, text: str) -> Input:
        """Read `1x3x224x224`, `image=1x3x224x224` or `tokens=1x77,i64`; raises Error."""
        name, equals, rest = text.rpartition("=")
        sizes, comma, dtype = rest.partition(",")
        if (equals and not name) or (comma and dtype not in DTYPES):
            kinds = ", ".join(DTYPES)
            raise ModelError(
                f"{quote(text)}: expected [NAME=]SIZES[,DTYPE], as in {EXAMPLE}; a dtype is one of {kinds}"
            )
        axes = range(1, MOST_AXES + 1)
        shape = checked_integers("input", integers(sizes, axes, f"[NAME=]SIZES[,DTYPE], as in {EXAMPLE}"), axes)
        return cls(shape, name or None, DTYPES[dtype] if comma else None)

    @property
    def text(self) -> str:
        """The sizes: `1x3x224x224`."""
        return by(self.shape)


def by_name(inputs: Iterable[Input], names: Sequence[str]) -> dict[str, Input]:
    """Inputs by what a model calls them; those without a name are the model's first, in order.

    Raises:
        ModelError: there are too many, or one of a name that the model does not know, or two for one.
    """
    given: dict[str, Input] = {}
    rest = iter(names)
    there = f"the model's inputs are {', '.join(names) or 'none'}"
    for each in inputs:
        name = each.name if each.name is not None else next(rest, None)
        if name is None:
            raise ModelError(f"--input {each.text} is one too many: {there}")
        if name not in names:
            raise ModelError(f"no input {quote(name)}: {there}")
        if name in given:
            raise ModelError(f"input {quote(name)} is given twice")
        given[name] = each
    return given
