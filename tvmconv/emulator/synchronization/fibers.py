"""Fibers: parts of blocks that are executed in turns because they wait for each other, each in lock step.

A fiber is a generator that executes some lanes and yields what they wait for. This is a `WaitCondition`, or a `Fork`
into fibers for the two sides of a branch, after which the fiber continues. A deadlock of all fibers raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvmconv.emulator.errors import DeadlockError

MAX_IDLE_ROUNDS = 100_000  # consecutive rounds in which only polling loops run, before they count as a deadlock
MAX_LISTED_WAITS = 8  # number of waits that an error message lists


@dataclass(frozen=True)
class WaitCondition:
    """Condition that a fiber waits for: whether it can continue, and which lanes wait for what."""

    is_ready: Callable[[], bool]
    describe: Callable[[], str]


# A polling loop lets other fibers run before it polls again.
POLL = WaitCondition(lambda: True, lambda: "a while loop does not end")
FiberGenerator: TypeAlias = "Iterator[WaitCondition | Fork]"


@dataclass(frozen=True)
class Fork:
    """Fibers that run before the fiber that yields them continues."""

    fibers: tuple[FiberGenerator, ...]


@dataclass(eq=False)
class _Fiber:
    """State of a fiber, which is or descends from a root; its parent forked it and waits for it."""

    generator: FiberGenerator
    root_index: int
    parent: _Fiber | None = None
    wait: WaitCondition | None = None
    num_running_branches: int = 0

    def is_ready(self) -> bool:
        """Return whether the fiber can continue."""
        return not self.num_running_branches and (self.wait is None or self.wait.is_ready())


def run_fibers(
    roots: Sequence[FiberGenerator], switch_root: Callable[[int], None], complete_copy: Callable[[], bool]
) -> None:
    """Execute root fibers to their ends; raises `DeadlockError` if none can continue.

    `switch_root` is called with the index of the root whose fiber runs next. `complete_copy` completes the oldest
    pending copy if no fiber can continue without it, and returns whether there was one.
    """
    fibers = [_Fiber(generator, root_index) for root_index, generator in enumerate(roots)]
    idle_rounds = 0
    while fibers:
        has_progressed = False
        for fiber in list(fibers):
            if not fiber.is_ready():
                continue
            has_progressed |= fiber.wait is not POLL
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
        if has_progressed or any(wait is not POLL and wait.is_ready() for wait in waits) or complete_copy():
            idle_rounds = 0
            continue
        idle_rounds += 1
        if idle_rounds > MAX_IDLE_ROUNDS or POLL not in waits:
            descriptions = list(dict.fromkeys(wait.describe() for wait in waits))
            num_omitted = len(descriptions) - MAX_LISTED_WAITS
            omitted_note = f"; and {num_omitted} more" if num_omitted > 0 else ""
            raise DeadlockError(f"deadlock: {'; '.join(descriptions[:MAX_LISTED_WAITS])}{omitted_note}")
