"""Threads that wait for each other: parts of blocks that are executed in turns, each in lock step in itself.

A strand is a generator that executes some lanes and yields what they wait for: a `Wait`, or a `Fork` into strands of
the two sides of a branch, behind which it goes on. That nobody can go on is found, and told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tvmconv.analysis.emulation.errors import DeadlockError

MAX_TURNS = 100_000  # of loops in a row in which nothing else happens
MAX_TOLD = 8  # who waits for what, in a message


class Wait(Protocol):
    """What a strand waits for."""

    def ready(self) -> bool:
        """Whether all lanes of the strand can go on."""

    def __str__(self) -> str:
        """Who waits for what, of those that cannot."""


class Turn:
    """Others may go on: what a loop waits for before it looks again."""

    def ready(self) -> bool:
        """Always."""
        return True

    def __str__(self) -> str:
        return "a while loop does not end"


Steps: TypeAlias = "Iterator[Wait | Fork]"


@dataclass(frozen=True)
class Fork:
    """Strands that are executed before the one that yields this goes on."""

    strands: tuple[Steps, ...]


class _Strand:
    """Some lanes.

    Args:
        steps: what they do.
        family: the strand that is none of a fork's, or that this is a branch of.
        above: the strand that waits for it.
    """

    def __init__(self, steps: Steps, family: int, above: _Strand | None = None) -> None:
        self.steps, self.family, self.above = steps, family, above
        self.waits: Wait | None = None
        self.branches = 0  # that have not ended

    def ready(self) -> bool:
        """Whether it can go on."""
        return not self.branches and (self.waits is None or self.waits.ready())


def run(roots: Sequence[Steps], switch: Callable[[int], None], land: Callable[[], bool]) -> None:
    """Execute strands to their ends.

    What is under way lands as late as it can: when nobody can go on without it.

    Args:
        roots: the strands to begin with.
        switch: is told which of them, or a branch of which, is executed from now on.
        land: lets something land that is under way, and tells whether there was anything.

    Raises:
        DeadlockError: nobody can go on.
    """
    strands = [_Strand(steps, family) for family, steps in enumerate(roots)]
    turns = 0
    while strands:
        moved = False
        for strand in list(strands):
            if not strand.ready():
                continue
            moved |= not isinstance(strand.waits, Turn)
            switch(strand.family)
            try:
                yielded = next(strand.steps)
            except StopIteration:
                strands.remove(strand)
                if strand.above is not None:
                    strand.above.branches -= 1
                moved = True
                continue
            if isinstance(yielded, Fork):
                branches = [_Strand(steps, strand.family, strand) for steps in yielded.strands]
                strand.branches, strand.waits = len(branches), None
                strands[strands.index(strand) : strands.index(strand)] = branches
            else:
                strand.waits = yielded
        waiting = [strand.waits for strand in strands if not strand.branches and strand.waits is not None]
        if moved or any(not isinstance(each, Turn) and each.ready() for each in waiting) or land():
            turns = 0
            continue
        turns += 1
        if turns > MAX_TURNS or not any(isinstance(each, Turn) for each in waiting):
            told = list(dict.fromkeys(str(each) for each in waiting))
            more = f"; and {len(told) - MAX_TOLD} more" if len(told) > MAX_TOLD else ""
            raise DeadlockError(f"deadlock: {'; '.join(told[:MAX_TOLD])}{more}")
