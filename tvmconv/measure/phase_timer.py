"""Timing of the phases of a trial."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PHASES = ("apply", "lower", "codegen", "compile", "queue", "load", "verify", "time")


class PhaseTimer:
    """A timer of phases.

    `milliseconds`: duration of every entered phase by name, including failed ones.
    """

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.milliseconds[name] = (time.perf_counter() - start) * 1e3


class PhaseMeans:
    """Mean milliseconds by phase over many trials."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, milliseconds: Mapping[str, float]) -> None:
        """Add the phases of one trial."""
        for phase, phase_ms in milliseconds.items():
            self._sums[phase] += phase_ms
            self._counts[phase] += 1

    def compute_means(self) -> dict[str, float]:
        """Return the mean over the trials that reached a phase, by phase in the order of `PHASES`."""
        return {phase: self._sums[phase] / self._counts[phase] for phase in PHASES if self._counts[phase]}
