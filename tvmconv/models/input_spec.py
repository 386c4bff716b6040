"""The option `--input`: shapes of a model's inputs as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvmconv.errors import ModelError
from tvmconv.workloads.text import join_sizes, parse_integers, quote, validate_integers

DTYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f64": "float64",
    "i64": "int64",
    "i32": "int32",
    "bool": "bool",
}
EXAMPLE_TEXT = "1x3x224x224"
EXPECTED = f"[NAME=]SIZES[,DTYPE], as in {EXAMPLE_TEXT}"
MAX_AXES = 16


@dataclass(frozen=True)
class InputSpec:
    """The shape of one input of a model."""

    shape: tuple[int, ...]
    name: str | None = None  # name of the input in the model; None for a positional input
    dtype: str | None = None  # dtype of its elements, a value of `DTYPES`; None for the default

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """Read `1x3x224x224`, `image=1x3x224x224` or `tokens=1x77,i64`; raise Error if the text is malformed."""
        name, equals, sizes_and_dtype = text.rpartition("=")
        sizes, comma, dtype = sizes_and_dtype.partition(",")
        if (equals and not name) or (comma and dtype not in DTYPES):
            raise ModelError(f"{quote(text)}: expected {EXPECTED}; a dtype is one of {', '.join(DTYPES)}")
        axes = range(1, MAX_AXES + 1)
        shape = validate_integers("input", parse_integers(sizes, axes, EXPECTED), axes)
        return cls(shape, name or None, DTYPES[dtype] if comma else None)

    @property
    def text(self) -> str:
        """Text of the sizes, such as `1x3x224x224`."""
        return join_sizes(self.shape)


def assign_names(inputs: Iterable[InputSpec], names: Sequence[str]) -> dict[str, InputSpec]:
    """Return input shapes by the names of a model's inputs; shapes without a name are assigned in order.

    Raises ModelError if there are too many shapes, a name is unknown, or an input has two shapes.
    """
    spec_by_name: dict[str, InputSpec] = {}
    remaining_names = iter(names)
    expected = f"the model's inputs are {', '.join(names) or 'none'}"
    for spec in inputs:
        name = spec.name if spec.name is not None else next(remaining_names, None)
        if name is None:
            raise ModelError(f"--input {spec.text} is one too many: {expected}")
        if name not in names:
            raise ModelError(f"no input {quote(name)}: {expected}")
        if name in spec_by_name:
            raise ModelError(f"input {quote(name)} is given twice")
        spec_by_name[name] = spec
    return spec_by_name
