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
    """One file of an export."""

    name: str
    description: str  # short description for the README
    kinds: tuple[str, ...]  # kinds of devices that have such a file
    # Function `f(kernel, path)`; raises `CompileError` if the file cannot be made for the kernel.
    write: Callable[[Kernel, Path], None]
    # Function `f(description)` from the content of `kernel.json` to Markdown paragraphs with an example of a call;
    # None for no example.
    example: Callable[[Mapping[str, Any]], list[str]] | None
    order: int  # position among the files. Examples appear in reverse order, so that the simplest call is the first
    optional: bool = False  # whether the export continues if the file cannot be made
