"""Processes that compile kernels for benchmarks. The module imports nothing that takes long, as each process does so
before it can react to Ctrl-C.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def start_builders(num_workers: int, niceness: int = 0) -> ProcessPoolExecutor:
    """Return processes that Ctrl-C ends without a traceback, with a lower priority if `niceness` is positive."""
    return ProcessPoolExecutor(num_workers, get_context("spawn"), initializer=_prepare_builder, initargs=(niceness,))


def _prepare_builder(niceness: int) -> None:
    os.nice(niceness)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
