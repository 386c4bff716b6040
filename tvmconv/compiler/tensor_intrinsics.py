"""The import of TVM's tensor intrinsics, early enough to be fast."""

from __future__ import annotations


def import_tensor_intrinsics() -> None:
    """Import the tensor intrinsics, as TVM's rule for tensor cores does when it first schedules a product in float16.

    The import parses some 180 functions, and TVM asks `inspect.stack` for the stack of calls of each. `inspect` looks
    through all imported modules for every frame of the import system, because these frames have no file. The import
    takes less time in a process that has not imported PyTorch's exporter and networks yet.
    """
    import tvm.s_tir.tensor_intrin  # noqa: F401
