"""NVIDIA GPUs through the CUDA driver and runtime, whose bindings are imported on first use."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Return the module `driver` or `runtime` of cuda-bindings."""
    if name in ("driver", "runtime"):
        return importlib.import_module(f"cuda.bindings.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
