"""The import of TVM's tensor intrinsics in processes that compile TVM's own code."""

from __future__ import annotations

from tvmconv.compiler.import_frames import stand_for_frames
from tvmconv.tvm_import import import_tvm


def import_tensor_intrinsics() -> None:
    """Import the tensor intrinsics, as TVM's rule for tensor cores does when it first schedules a product in float16.

    The import parses some 180 functions, and TVM asks `inspect.stack` for the stack of calls of each, which takes half
    a minute or more in all; see `tvmconv.compiler.import_frames` for the reason and the remedy.
    """
    stand_for_frames()
    import tvm.s_tir.tensor_intrin  # noqa: F401


def prepare_process() -> None:
    """Import TVM, without PyTorch, and its tensor intrinsics in the main thread of a process that builds with TVM."""
    import_tvm()
    import_tensor_intrinsics()
