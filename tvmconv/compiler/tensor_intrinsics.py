"""The import of TVM's tensor intrinsics, early enough to be fast."""

from __future__ import annotations


def import_tensor_intrinsics() -> None:
    """Import the tensor intrinsics, as TVM's rule for tensor cores does when it first schedules a product in float16.

    The import parses some 180 functions, and TVM asks `inspect.stack` for the stack of calls of each. `inspect` looks
    through all imported modules for every frame that has no file, as frames of the import system, of Cython and of
    calls from C++ have none. Inside `tvm.compile` there are so many of them that the import takes minutes; from a
    function that few others have called, it takes a fraction of that.
    """
    import tvm.s_tir.tensor_intrin  # noqa: F401
