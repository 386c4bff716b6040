"""TVM without PyTorch: TVM's FFI imports PyTorch where it is installed, which takes seconds and is not needed here."""

from __future__ import annotations

import sys

PYTORCH = "torch"


def load_tvm() -> None:
    """Import TVM; if PyTorch was not imported before, without it. What is imported later may import both.

    Raises:
        ImportError: TVM cannot be imported.
    """
    if "tvm" in sys.modules or PYTORCH in sys.modules:
        import tvm

        return
    sys.modules[PYTORCH] = None  # type: ignore[assignment]  # so that `import torch` raises ImportError
    try:
        import tvm  # noqa: F401
    finally:
        del sys.modules[PYTORCH]
