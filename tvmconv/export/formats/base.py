"""What a format of an export is."""

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
        name: of the file.
        description: what it is, for the README.
        kinds: of devices whose kernels have it.
        write: `f(kernel, path)`; raises `CompileError` where the kernel has no such file.
        example: `f(facts)`, paragraphs of Markdown on a call with the file, of what `kernel.json` has; None for none.
        order: its place among the files; of the examples, the last comes first, which asks least of the caller.
        optional: whether the export goes on without it where it cannot be written.
    """

    name: str
    description: str
    kinds: tuple[str, ...]
    write: Callable[[Kernel, Path], None]
    example: Callable[[Mapping[str, Any]], list[str]] | None
    order: int
    optional: bool = False
