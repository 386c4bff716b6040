"""Format `kernel.cu`: generated CUDA source."""

from __future__ import annotations

from tvmconv.export.formats.base import ExportFormat, write_source

FORMAT = ExportFormat("kernel.cu", "the device function, CUDA C++", ("cuda",), write_source, None, order=0)
