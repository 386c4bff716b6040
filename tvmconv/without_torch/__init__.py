"""Import TVM without PyTorch, in processes that belong to tvmconv alone."""

from __future__ import annotations

import sys

FOLDER = __path__[0]


def import_tvm() -> None:
    """Import TVM; while it loads, its `import torch` finds the module `torch` of this folder, which does not import.

    The defect of TVM: `tvm_ffi` (0.1.14) imports PyTorch wherever it is installed, in `__init__.py`, `_convert.py` and
    `stream.py`. That takes two to four seconds, which is longer than TVM's own import, and no variable switches it off.
    Only conversions between its types and PyTorch's need it, and tvmconv uses none.

    Only a process of the command line and a process that builds kernels call this, in their main thread: for the time
    of the import PyTorch cannot be imported in any thread. Afterwards PyTorch is imported as ever. A program that uses
    tvmconv as a library imports TVM as TVM is.

    Raises:
        ImportError: TVM cannot be imported.
    """
    sys.path.insert(0, FOLDER)
    try:
        import tvm  # noqa: F401
    finally:
        sys.path.remove(FOLDER)
