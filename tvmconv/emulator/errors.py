"""The errors of a kernel that does what no kernel may."""

from __future__ import annotations

from tvmconv.errors import AnalysisError


class ExecutionError(AnalysisError):
    """A kernel does what no kernel may: it races, leaves its arrays, or is misaligned."""


class RaceError(ExecutionError):
    """Threads race for memory, do not wait for a copy, or do not all reach a barrier."""


class DeadlockError(RaceError):
    """Nobody can go on."""
