"""Errors of an emulated kernel's behavior."""

from __future__ import annotations

from tvmconv.errors import AnalysisError


class ExecutionError(AnalysisError):
    """Illegal behavior of a kernel: a race, an access out of bounds, or a misaligned access."""


class RaceError(ExecutionError):
    """Accesses of threads that are not ordered, an asynchronous copy without a wait, or an incomplete barrier."""


class DeadlockError(RaceError):
    """Threads of which none can continue."""
