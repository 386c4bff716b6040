"""Format `kernel.cu`: generated CUDA source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tvmconv.export.formats.base import ExportFormat

if TYPE_CHECKING:
    from tvmconv.kernel import Kernel


def write_file(kernel: Kernel, path: Path) -> None:
    """Write the CUDA source."""
    path.write_text(kernel.source, encoding="utf-8")


FORMAT = ExportFormat("kernel.cu", "the device function, CUDA C++", ("cuda",), write_file, None, order=0)
