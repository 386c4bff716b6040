"""Description of an export format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvmconv.kernel import Kernel


@dataclass(frozen=True)
class ExportFormat:
    """One file of an export.

    Attributes:
        name: File name.
        description: Short description for the README.
        kinds: Kinds of devices that have such a file.
        write: Function `f(kernel, path)`; raises `CompileError` if the file cannot be made for the kernel.
        example: Function `f(description)` from the content of `kernel.json` to Markdown paragraphs with an example of
            a call; None for no example.
        order: Position among the files. Examples appear in reverse order, so that the simplest call is the first.
        optional: Whether the export continues if the file cannot be made.
    """

    name: str
    description: str
    kinds: tuple[str, ...]
    write: Callable[[Kernel, Path], None]
    example: Callable[[Mapping[str, Any]], list[str]] | None
    order: int
    optional: bool = False
