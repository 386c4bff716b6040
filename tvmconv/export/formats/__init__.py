"""The files that an export writes, a format a module; a new one is a new module here with a `FORMAT`."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from tvmconv.export.formats.base import Format


@functools.cache
def formats() -> tuple[Format, ...]:
    """All formats, by their rank."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    found = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    return tuple(sorted(found, key=lambda each: each.rank))
