"""`kernel.cu`: the generated CUDA text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tvmconv.export.formats.base import Format

if TYPE_CHECKING:
    from tvmconv.kernel import Kernel


def write(kernel: Kernel, path: Path) -> None:
    """Write the text."""
    path.write_text(kernel.source, encoding="utf-8")


FORMAT = Format("kernel.cu", "the device function, CUDA C++", ("cuda",), write, None, rank=0)
