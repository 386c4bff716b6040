"""Common parts of the example calls in an exported README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def fill_example(example: str, description: Mapping[str, Any], input_format: str, **fields: str) -> str:
    """Return the example for a kernel as a fenced code block.

    `example`: template with the fields of all examples and the given `fields`.
    `input_format`: format that converts an input from a NumPy expression to the library of the example.
    """
    *inputs, output = description["arguments"]
    lines = [
        f"{argument['name']} = "
        + input_format.format(f'random.standard_normal({tuple(argument["shape"])}).astype("{argument["dtype"]}")')
        for argument in inputs
    ]
    has_bfloat16 = any(argument["dtype"] == "bfloat16" for argument in description["arguments"])
    text = example.format(
        imports="import ml_dtypes  # registers bfloat16 with NumPy\n" if has_bfloat16 else "",
        inputs="\n".join(lines),
        output=output["name"],
        output_shape=tuple(output["shape"]),
        dtype=output["dtype"],
        arguments=", ".join(argument["name"] for argument in description["arguments"]),
        **fields,
    )
    return f"```python\n{text}```"


def format_dict_lines(entries: Mapping[str, str]) -> str:
    """Return the lines of a dict literal, whose values are expressions."""
    return "\n".join(f'    "{name}": {value},' for name, value in entries.items())


def format_list_lines(entries: Sequence[Any]) -> str:
    """Return the lines of a list literal."""
    return "\n".join(f"    {entry!r}," for entry in entries)
