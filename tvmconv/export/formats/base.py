"""Description of an export format, and what its writers and examples share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvmconv.kernel import Kernel


@dataclass(frozen=True)
class ExportFormat:
    """One file of an export."""

    name: str  # file name
    description: str  # short description for the README
    kinds: tuple[str, ...]  # kinds of devices that have such a file
    write: Callable[[Kernel, Path], None]  # raises `CompileError` if the file cannot be made for the kernel
    # Function from the content of `kernel.json` to Markdown paragraphs with an example of a call; None for no example.
    example: Callable[[Mapping[str, Any]], list[str]] | None
    order: int  # position among the files; examples appear in reverse order, so that the simplest call is the first
    optional: bool = False  # whether the export continues if the file cannot be made


def write_source(kernel: Kernel, path: Path) -> None:
    """Write the generated source of a kernel."""
    path.write_text(kernel.source, encoding="utf-8")


def fill_example(
    template: str,
    description: Mapping[str, Any],
    *,
    input_format: str = "{}",
    memory: Mapping[str, str] | None = None,
    steps: Sequence[Any] = (),
    **fields: str,
) -> str:
    """Return the example of a call as a fenced code block.

    `input_format`: format that converts an input from a NumPy expression to the library of the example.
    `memory`: expressions by name, for the lines of a dict literal.
    `steps`: values for the lines of a list literal.
    """
    arguments = description["arguments"]
    *inputs, output = arguments
    lines = [
        f"{argument['name']} = "
        + input_format.format(f'random.standard_normal({tuple(argument["shape"])}).astype("{argument["dtype"]}")')
        for argument in inputs
    ]
    has_bfloat16 = any(argument["dtype"] == "bfloat16" for argument in arguments)
    text = template.format(
        imports="import ml_dtypes  # registers bfloat16 with NumPy\n" if has_bfloat16 else "",
        inputs="\n".join(lines),
        output=output["name"],
        output_shape=tuple(output["shape"]),
        dtype=output["dtype"],
        arguments=", ".join(argument["name"] for argument in arguments),
        memory=format_dict_lines(memory or {}),
        steps="\n".join(f"    {step!r}," for step in steps),
        **fields,
    )
    return f"```python\n{text}```"


def format_dict_lines(entries: Mapping[str, str]) -> str:
    """Return the lines of a dict literal, whose values are expressions."""
    return "\n".join(f'    "{name}": {value},' for name, value in entries.items())
