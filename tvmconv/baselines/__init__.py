"""What our kernels are compared with: libraries, each in a file of this folder that says `@baseline`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from tvmconv.baselines.base import REGISTRY, TimeLibrary


def load_baselines() -> Mapping[str, TimeLibrary]:
    """The libraries there are, by name, in alphabetical order; imports their files, but none of the libraries."""
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        importlib.import_module(module.name)
    return dict(sorted(REGISTRY.items()))
