"""Threads that wait for each other: parts of blocks that are executed in turns, each in lock step in itself.

A strand is a generator that executes some lanes and yields what they wait for: a `WaitCondition`, or a `Fork` into
strands of the two sides of a branch, behind which it goes on. That nobody can go on is found, and told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tvmconv.emulator.errors import DeadlockError

MAX_IDLE_ROUNDS = 100_000  # of loops in a row in which nothing else happens
MAX_LISTED_WAITS = 8  # who waits for what, in a message


class WaitCondition(Protocol):
    """What a strand waits for."""

    def is_ready(self) -> bool:
        """Whether all lanes of the strand can go on."""

    def __str__(self) -> str:
        """Who waits for what, of those that cannot."""


class Yield:
    """Others may go on: what a loop waits for before it looks again."""

    def is_ready(self) -> bool:
        """Always."""
        return True

    def __str__(self) -> str:
        return "a while loop does not end"


FiberGenerator: TypeAlias = "Iterator[WaitCondition | Fork]"


@dataclass(frozen=True)
class Fork:
    """Strands that are executed before the one that yields this goes on."""

    fibers: tuple[FiberGenerator, ...]


class _Fiber:
    """Some lanes.

    Args:
        generator: what they do.
        root_index: the strand that is none of a fork's, or that this is a branch of.
        parent: the strand that waits for it.
    """

    def __init__(self, generator: FiberGenerator, root_index: int, parent: _Fiber | None = None) -> None:
        self.generator, self.root_index, self.parent = generator, root_index, parent
        self.wait: WaitCondition | None = None
        self.num_running_branches = 0  # that have not ended

    def is_ready(self) -> bool:
        """Whether it can go on."""
        return not self.num_running_branches and (self.wait is None or self.wait.is_ready())


def run_fibers(
    roots: Sequence[FiberGenerator], switch_root: Callable[[int], None], complete_copy: Callable[[], bool]
) -> None:
    """Execute strands to their ends.

    What is under way lands as late as it can: when nobody can go on without it.

    Args:
        roots: the strands to begin with.
        switch_root: is told which of them, or a branch of which, is executed from now on.
        complete_copy: lets something land that is under way, and tells whether there was anything.

    Raises:
        DeadlockError: nobody can go on.
    """
    fibers = [_Fiber(generator, root_index) for root_index, generator in enumerate(roots)]
    idle_rounds = 0
    while fibers:
        has_progressed = False
        for fiber in list(fibers):
            if not fiber.is_ready():
                continue
            has_progressed |= not isinstance(fiber.wait, Yield)
            switch_root(fiber.root_index)
            try:
                wait_or_fork = next(fiber.generator)
            except StopIteration:
                fibers.remove(fiber)
                if fiber.parent is not None:
                    fiber.parent.num_running_branches -= 1
                has_progressed = True
                continue
            if isinstance(wait_or_fork, Fork):
                branches = [_Fiber(generator, fiber.root_index, fiber) for generator in wait_or_fork.fibers]
                fiber.num_running_branches, fiber.wait = len(branches), None
                fibers[fibers.index(fiber) : fibers.index(fiber)] = branches
            else:
                fiber.wait = wait_or_fork
        waits = [fiber.wait for fiber in fibers if not fiber.num_running_branches and fiber.wait is not None]
        if has_progressed or any(not isinstance(wait, Yield) and wait.is_ready() for wait in waits) or complete_copy():
            idle_rounds = 0
            continue
        idle_rounds += 1
        if idle_rounds > MAX_IDLE_ROUNDS or not any(isinstance(wait, Yield) for wait in waits):
            descriptions = list(dict.fromkeys(str(wait) for wait in waits))
            omitted_note = (
                f"; and {len(descriptions) - MAX_LISTED_WAITS} more" if len(descriptions) > MAX_LISTED_WAITS else ""
            )
            raise DeadlockError(f"deadlock: {'; '.join(descriptions[:MAX_LISTED_WAITS])}{omitted_note}")
