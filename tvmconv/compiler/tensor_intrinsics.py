"""The import of TVM's tensor intrinsics in seconds rather than minutes."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import sys
from collections.abc import Iterator


def import_tensor_intrinsics() -> None:
    """Import TVM's tensor intrinsics, as its rule for tensor cores does when it first schedules a product in float16,
    but in seconds instead of minutes.

    The import parses some 180 functions, and TVM asks `inspect.stack` for the stack of calls of each. `inspect` looks
    through all imported modules for every frame of the import system, because these frames have no file. Meanwhile,
    `list_frames` stands in for it, which knows what TVM asks for without that: the import took 77 s of processor time,
    and takes 6 s.

    Examples:
        >>> tvmconv.relax.import_tensor_intrinsics()  # before TVM compiles a model in float16  # doctest: +SKIP
    """
    with _replace_stack():
        import tvm.s_tir.tensor_intrin  # noqa: F401


@contextlib.contextmanager
def _replace_stack() -> Iterator[None]:
    """Let `list_frames` be `inspect.stack`."""
    stack = inspect.stack
    inspect.stack = list_frames
    try:
        yield
    finally:
        inspect.stack = stack


def list_frames(context: int = 1) -> list[inspect.FrameInfo]:
    """Return the frames of the caller's stack as `inspect.stack` does, with at most one line of context, which is
    None for a frame without a file.
    """
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        line = linecache.getline(code.co_filename, frame.f_lineno) if context else ""
        lines, index = ([line], 0) if line else (None, None)
        frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, lines, index))
        frame = frame.f_back  # type: ignore[assignment]
    return frames
