"""Import TVM without PyTorch, in processes that belong to tvmconv alone."""

from __future__ import annotations

import sys
import threading

from tvmconv.errors import HostError, describe_error

STUB_FOLDER = __path__[0]


def import_tvm() -> None:
    """Import TVM; while it loads, its `import torch` finds the module `torch` of this folder, which does not import.

    The defect of TVM: `tvm_ffi` (0.1.14) imports PyTorch wherever it is installed, in `__init__.py`,
    `_translate_cvt.py` and `stream.py`. That takes two to four seconds, which is longer than TVM's own import, and no
    variable switches it off. Only conversions between its types and PyTorch's need it, and tvmconv uses none.

    For the time of the import PyTorch cannot be imported in any thread. Therefore only processes of the command line
    and processes that build kernels call this, in their main thread, and a search in a program that uses tvmconv as a
    library where `can_leave_out_torch` holds. Afterwards PyTorch is imported as ever. In such a program TVM's own
    conversions of PyTorch's dtypes and streams are then missing: one that wants them imports PyTorch or TVM first.

    Raises:
        HostError: TVM cannot be imported: it is not installed, or the process has too little memory for it.
    """
    sys.path.insert(0, STUB_FOLDER)
    try:
        import tvm  # noqa: F401
    except (ImportError, AttributeError, MemoryError, OSError, RuntimeError) as error:
        # With too little address space its libraries do not load, and what fails next varies from run to run.
        reason = describe_error(error) if str(error) else "no memory"
        raise HostError(f"TVM cannot be imported; is it installed, and is there enough memory? {reason}") from error
    finally:
        sys.path.remove(STUB_FOLDER)


def can_leave_out_torch() -> bool:
    """Return whether `import_tvm` is safe in a program that uses tvmconv as a library, and saves time.

    It is safe in the main thread of a process that has no other Python thread: then nothing else can import PyTorch
    during TVM's import. `sys._current_frames` has all threads of the interpreter, also those that `threading` does not
    know. Threads that tvmconv starts between this call and the import do not import PyTorch. Where PyTorch is
    loaded, TVM's own import of it takes no time.
    """
    is_loaded = any(name in sys.modules for name in ("torch", "tvm", "tvm_ffi"))
    is_main = threading.current_thread() is threading.main_thread()
    return not is_loaded and is_main and len(sys._current_frames()) == 1
