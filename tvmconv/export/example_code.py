"""What examples of the call of an exported kernel have in common, whatever they call it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def fill_example(example: str, description: Mapping[str, Any], input_format: str, **fields: str) -> str:
    """An example for a kernel, in a fence.

    Args:
        example: the text, with places for `fields` and for what is known of all examples.
        description: as `kernel.json` has them.
        input_format: takes an input from NumPy to where the example wants it.
        fields: of the text, of this example alone.
    """
    *inputs, output = description["arguments"]
    lines = [
        f"{argument['name']} = "
        + input_format.format(f'random.standard_normal({tuple(argument["shape"])}).astype("{argument["dtype"]}")')
        for argument in inputs
    ]
    has_bfloat16 = any(argument["dtype"] == "bfloat16" for argument in description["arguments"])
    text = example.format(
        imports="import ml_dtypes  # lets NumPy know bfloat16\n" if has_bfloat16 else "",
        inputs="\n".join(lines),
        output=output["name"],
        output_shape=tuple(output["shape"]),
        dtype=output["dtype"],
        arguments=", ".join(argument["name"] for argument in description["arguments"]),
        **fields,
    )
    return f"```python\n{text}```"


def format_dict_lines(entries: Mapping[str, str]) -> str:
    """The lines of a dict of expressions."""
    return "\n".join(f'    "{name}": {value},' for name, value in entries.items())


def format_list_lines(entries: Sequence[Any]) -> str:
    """The lines of a list of values."""
    return "\n".join(f"    {entry!r}," for entry in entries)
