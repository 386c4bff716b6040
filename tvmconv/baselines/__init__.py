"""Baselines: libraries that kernels are compared with; each module of this package registers some by `@baseline`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from tvmconv.baselines.base import REGISTRY, TimeLibrary


def load_baselines() -> Mapping[str, TimeLibrary]:
    """Return the registered baselines by name in alphabetical order, without importing the libraries."""
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        importlib.import_module(module.name)
    return dict(sorted(REGISTRY.items()))
