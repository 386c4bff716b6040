"""How long the stages of a trial take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

STAGES = ("apply", "lower", "codegen", "compile", "queue", "load", "verify", "time")


class Stopwatch:
    """Milliseconds by stage.

    Attributes:
        milliseconds: of every stage that was entered, also of one that failed.
    """

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.milliseconds[name] = (time.perf_counter() - start) * 1e3


class Means:
    """Mean milliseconds by stage over many trials."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, milliseconds: Mapping[str, float]) -> None:
        """Count one trial's stages in."""
        for stage, took in milliseconds.items():
            self._sums[stage] += took
            self._counts[stage] += 1

    def means(self) -> dict[str, float]:
        """Mean over the trials that came to the stage, in the order in which a trial passes them."""
        return {stage: self._sums[stage] / self._counts[stage] for stage in STAGES if self._counts[stage]}
