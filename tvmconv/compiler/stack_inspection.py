"""Inspection of the stack by TVM's script parser, which takes minutes in processes with many modules."""

from __future__ import annotations

import inspect
import os

FRAMES_WITHOUT_MODULES = (
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
    "<ast>",
    "<string>",
)


def cache_frames_without_modules() -> None:
    """Let `inspect` know the frames of imports, of TVM's evaluated expressions and of `python -c`, in a process
    in which TVM schedules functions.

    For each function in its script language, TVM calls `inspect.stack`. For each frame whose file is no module's,
    `inspect.getmodule` looks through all modules three times. The first matrix product in float16 makes dlight and
    MetaSchedule import some 180 tensor intrinsics, with ten such frames in the stack: that took more than 130 s in a
    process with PyTorch's 2,000 modules, and takes 8 s with entries for these frames in the cache of `inspect`. The
    sources of the frames are unknown with and without the entries.
    """
    for name in FRAMES_WITHOUT_MODULES:
        inspect.modulesbyfile[os.path.normcase(os.path.abspath(name))] = __name__
