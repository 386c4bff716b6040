"""Who is told what executed code does: its accesses to memory and its arithmetic, to count them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.threads import Lanes, Threads

Space = Literal["global", "shared"]
Kind = Literal["load", "store"]
SITES = 1 << 20  # numbers for the accesses of one statement


@dataclass(frozen=True, order=True)
class Place:
    """What all executions of one access have in common.

    Attributes:
        site: where in the text: a number that is larger further down.
        space: which memory.
        kind: load or store.
        name: of the array or buffer.
        nbytes: of an access.
    """

    site: int
    space: Space
    kind: Kind
    name: str
    nbytes: int

    @property
    def statement(self) -> int:
        """The index of its statement, in the order of `tvmconv.analysis.lowered.tir.statements`."""
        return self.site // SITES


@dataclass(frozen=True, eq=False)
class Accessed(Place):
    """An access to memory that some lanes made at once.

    Attributes:
        lanes: that access it.
        addresses: where each does, in bytes.
        itemsize: of the elements in these.
        source: of a copy from global to shared memory, where it reads each, in bytes; -1 where it stores zeros.
        swizzle: of what the async proxy accesses in shared memory, the bytes within which its chunks are swizzled; 0
            where they are not.
        array: of a copy by TMA, the array on its other side.
    """

    lanes: Lanes
    addresses: NDArray[np.int64]
    itemsize: int
    source: NDArray[np.int64] | None = None
    swizzle: int = 0
    array: str = ""

    @property
    def place(self) -> Place:
        """Which access it is an execution of."""
        return Place(self.site, self.space, self.kind, self.name, self.nbytes)

    def of_first(self, lanes: int | None) -> Accessed | None:
        """The part of the first block's, which has so many lanes (None: of all blocks); None if there is none."""
        first = self.lanes < (len(self.lanes) and self.lanes.max() + 1 if lanes is None else lanes)
        if not first.any():
            return None
        if first.all():
            return self
        source = None if self.source is None else self.source[first]
        return replace(self, lanes=self.lanes[first], addresses=self.addresses[first], source=source)

    def elements(self) -> tuple[Lanes, NDArray[np.int64]]:
        """Each element by itself: the lane that accesses it, and its index in the array."""
        count = self.nbytes // self.itemsize
        found = self.addresses[:, None] // self.itemsize + np.arange(count)
        return np.repeat(self.lanes, count), found.reshape(-1)


class EnoughError(Exception):
    """Raised by who watches: nothing more has to be executed."""


class Watch:
    """Is told of what happens, to count it; this one does not.

    Attributes:
        wants_bulk: whether it is to be told of what the async proxy accesses.
        at_once: whether it is to be told as things happen, though what ends in a deadlock is begun anew.
    """

    wants_bulk: bool = False
    at_once: bool = False

    def wants(self, site: int) -> bool:
        """Of those that want to be told of it: whether what comes next at a site is of interest."""
        return self.wants_bulk

    def begin(self, threads: Threads) -> None:
        """Blocks begin, which are executed together; their lanes are counted from 0."""

    def access(self, found: Accessed) -> None:
        """Memory is accessed."""

    def bulk(self, found: Accessed) -> None:
        """The async proxy accesses memory, for lanes. It has no conflicts in banks that are known of."""

    def operation(self, name: str, lanes: Lanes, elements: int, itemsize: int) -> None:
        """Each of some lanes does arithmetic on so many elements."""


class Several(Watch):
    """Tells several."""

    def __init__(self, *watches: Watch) -> None:
        self._watches = watches
        self.wants_bulk = any(each.wants_bulk for each in watches)

    def wants(self, site: int) -> bool:
        """Whether one of them wants it."""
        return any([each.wants(site) for each in self._watches])

    def begin(self, threads: Threads) -> None:
        """Tell them."""
        for each in self._watches:
            each.begin(threads)

    def access(self, found: Accessed) -> None:
        """Tell them."""
        for each in self._watches:
            each.access(found)

    def bulk(self, found: Accessed) -> None:
        """Tell them."""
        for each in self._watches:
            if each.wants_bulk:
                each.bulk(found)

    def operation(self, name: str, lanes: Lanes, elements: int, itemsize: int) -> None:
        """Tell them."""
        for each in self._watches:
            each.operation(name, lanes, elements, itemsize)


class Recorder(Watch):
    """Keeps what it is told, to tell another.

    Args:
        of: that one.
    """

    def __init__(self, of: Watch) -> None:
        self.wants_bulk, self._of = of.wants_bulk, of
        self._told: list[Callable[[Watch], None]] = []

    def begin(self, threads: Threads) -> None:
        """Keep it."""
        self._told.append(lambda watch: watch.begin(threads))

    def access(self, found: Accessed) -> None:
        """Keep it."""
        self._told.append(lambda watch: watch.access(found))

    def bulk(self, found: Accessed) -> None:
        """Keep it."""
        self._told.append(lambda watch: watch.bulk(found))

    def operation(self, name: str, lanes: Lanes, elements: int, itemsize: int) -> None:
        """Keep it."""
        self._told.append(lambda watch: watch.operation(name, lanes, elements, itemsize))

    def wants(self, site: int) -> bool:
        """Whether that one wants it."""
        return self._of.wants(site)

    def replay(self, watch: Watch) -> None:
        """Tell it."""
        for tell in self._told:
            tell(watch)
