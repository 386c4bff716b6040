"""What examples of the call of an exported kernel have in common, whatever they call it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def fill(example: str, facts: Mapping[str, Any], wrap: str, **parts: str) -> str:
    """An example for a kernel, in a fence.

    Args:
        example: the text, with places for `parts` and for what is known of all examples.
        facts: as `kernel.json` has them.
        wrap: takes an input from NumPy to where the example wants it.
        parts: of the text, of this example alone.
    """
    *inputs, output = facts["arguments"]
    lines = [
        f"{argument['name']} = "
        + wrap.format(f'random.standard_normal({tuple(argument["shape"])}).astype("{argument["dtype"]}")')
        for argument in inputs
    ]
    bfloat16 = any(argument["dtype"] == "bfloat16" for argument in facts["arguments"])
    text = example.format(
        imports="import ml_dtypes  # lets NumPy know bfloat16\n" if bfloat16 else "",
        inputs="\n".join(lines),
        output=output["name"],
        output_shape=tuple(output["shape"]),
        dtype=output["dtype"],
        arguments=", ".join(argument["name"] for argument in facts["arguments"]),
        **parts,
    )
    return f"```python\n{text}```"


def as_table(entries: Mapping[str, str]) -> str:
    """The lines of a dict of expressions."""
    return "\n".join(f'    "{name}": {value},' for name, value in entries.items())


def as_list(entries: Sequence[Any]) -> str:
    """The lines of a list of values."""
    return "\n".join(f"    {entry!r}," for entry in entries)
