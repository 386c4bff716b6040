"""Baselines: libraries that kernels are compared with; each module of this package registers some by `@baseline`."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping

from tvmconv.baselines.base import MODULES, REGISTRY, TimeLibrary


def load_baselines() -> Mapping[str, TimeLibrary]:
    """Return the registered baselines by name in alphabetical order, without importing the libraries."""
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        importlib.import_module(module.name)
    return dict(sorted(REGISTRY.items()))


def import_modules(names: Iterable[str]) -> None:
    """Import the libraries of the named baselines whose import takes seconds; a missing one is not an error here."""
    load_baselines()
    for module in dict.fromkeys(MODULES[name] for name in names if name in MODULES):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
