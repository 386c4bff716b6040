"""File formats of an export; each module of this package with a `FORMAT` adds one."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from tvmconv.export.formats.base import ExportFormat


@functools.cache
def list_formats() -> tuple[ExportFormat, ...]:
    """Return all formats, sorted by `order`."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    all_formats = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    return tuple(sorted(all_formats, key=lambda file_format: file_format.order))
