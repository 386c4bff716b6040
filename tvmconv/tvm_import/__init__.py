"""Import of TVM without PyTorch."""

from __future__ import annotations

import sys
import threading

from tvmconv.errors import HostError, describe_error

STUB_FOLDER = __path__[0]


def import_tvm() -> None:
    """Import TVM while a stub module in this folder makes its `import torch` fail.

    `tvm_ffi` 0.1.14 imports PyTorch if it is installed, in `__init__.py`, `_translate_cvt.py` and `stream.py`, and no
    environment variable disables this. The import takes two to four seconds, which is longer than TVM's own import. TVM
    needs PyTorch only for conversions between their types, which tvmconv does not use.

    No thread can import PyTorch during this call. It is therefore called only in the main thread of command-line and
    builder processes, and of a library user's program if `can_leave_out_torch` holds. PyTorch can be imported
    afterwards, but TVM then lacks its conversions of PyTorch's dtypes and streams. A program that needs them must
    import PyTorch or TVM first.

    Raises:
        HostError: TVM is not installed, or the process has too little memory for it.
    """
    sys.path.insert(0, STUB_FOLDER)
    try:
        import tvm  # noqa: F401
    except (ImportError, AttributeError, MemoryError, OSError, RuntimeError) as error:
        # With too little address space, the libraries do not load and various errors follow.
        reason = describe_error(error) if str(error) else "no memory"
        raise HostError(f"TVM cannot be imported; is it installed, and is there enough memory? {reason}") from error
    finally:
        sys.path.remove(STUB_FOLDER)


def can_leave_out_torch() -> bool:
    """Return whether `import_tvm` is safe in a program that uses tvmconv as a library, and saves time.

    It is safe in the main thread of a process without other Python threads, because nothing else can then import
    PyTorch meanwhile. `sys._current_frames` includes threads that `threading` does not know. Threads that tvmconv
    starts before the import do not import PyTorch. It saves no time if PyTorch is already loaded.
    """
    is_loaded = any(name in sys.modules for name in ("torch", "tvm", "tvm_ffi"))
    is_main = threading.current_thread() is threading.main_thread()
    return not is_loaded and is_main and len(sys._current_frames()) == 1
