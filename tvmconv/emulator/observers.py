"""Who is told what executed code does: its accesses to memory and its arithmetic, to count them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tvmconv.emulator.threads import EmulatedThreads, Lanes

MemorySpace = Literal["global", "shared"]
AccessKind = Literal["load", "store"]
SITES_PER_STATEMENT = 1 << 20  # numbers for the accesses of one statement


@dataclass(frozen=True, order=True)
class AccessSite:
    """What all executions of one access have in common.

    Attributes:
        site: where in the text: a number that is larger further down.
        space: which memory.
        kind: load or store.
        name: of the array or buffer.
        nbytes: of an access.
    """

    site: int
    space: MemorySpace
    kind: AccessKind
    name: str
    nbytes: int

    @property
    def statement_index(self) -> int:
        """The index of its statement, in the order of `tvmconv.analysis.tir.scopes.iterate_statements`."""
        return self.site // SITES_PER_STATEMENT


@dataclass(frozen=True, eq=False)
class MemoryAccess(AccessSite):
    """An access to memory that some lanes made at once.

    Attributes:
        lanes: that access it.
        addresses: where each does, in bytes.
        itemsize: of the elements in these.
        source_addresses: of a copy from global to shared memory, where it reads each, in bytes; -1 where it stores
            zeros.
        swizzle_bytes: of what the async proxy accesses in shared memory, the bytes within which its chunks are
            swizzled; 0 where they are not.
        global_array: of a copy by TMA, the array on its other side.
    """

    lanes: Lanes
    addresses: NDArray[np.int64]
    itemsize: int
    source_addresses: NDArray[np.int64] | None = None
    swizzle_bytes: int = 0
    global_array: str = ""

    @property
    def access_site(self) -> AccessSite:
        """Which access it is an execution of."""
        return AccessSite(self.site, self.space, self.kind, self.name, self.nbytes)

    def restrict_to_first_block(self, lanes_per_block: int | None) -> MemoryAccess | None:
        """The part of the first block's, which has so many lanes (None: of all blocks); None if there is none."""
        is_first_block = self.lanes < (
            len(self.lanes) and self.lanes.max() + 1 if lanes_per_block is None else lanes_per_block
        )
        if not is_first_block.any():
            return None
        if is_first_block.all():
            return self
        source_addresses = None if self.source_addresses is None else self.source_addresses[is_first_block]
        return replace(
            self,
            lanes=self.lanes[is_first_block],
            addresses=self.addresses[is_first_block],
            source_addresses=source_addresses,
        )

    def split_into_elements(self) -> tuple[Lanes, NDArray[np.int64]]:
        """Each element by itself: the lane that accesses it, and its index in the array."""
        count = self.nbytes // self.itemsize
        element_indices = self.addresses[:, None] // self.itemsize + np.arange(count)
        return np.repeat(self.lanes, count), element_indices.reshape(-1)


class StopEmulationError(Exception):
    """Raised by who watches: nothing more has to be executed."""


class AccessObserver:
    """Is told of what happens, to count it; this one does not.

    Attributes:
        wants_async_proxy: whether it is to be told of what the async proxy accesses.
        immediate: whether it is to be told as things happen, though what ends in a deadlock is begun anew.
    """

    wants_async_proxy: bool = False
    immediate: bool = False

    def wants_site(self, site: int) -> bool:
        """Of those that want to be told of it: whether what comes next at a site is of interest."""
        return self.wants_async_proxy

    def on_blocks_start(self, threads: EmulatedThreads) -> None:
        """Blocks begin, which are executed together; their lanes are counted from 0."""

    def on_access(self, event: MemoryAccess) -> None:
        """Memory is accessed."""

    def on_async_proxy_access(self, event: MemoryAccess) -> None:
        """The async proxy accesses memory, for lanes. It has no conflicts in banks that are known of."""

    def on_operation(self, name: str, lanes: Lanes, elements: int, itemsize: int) -> None:
        """Each of some lanes does arithmetic on so many elements."""


class CompositeObserver(AccessObserver):
    """Tells several."""

    def __init__(self, *observers: AccessObserver) -> None:
        self._observers = observers
        self.wants_async_proxy = any(observer.wants_async_proxy for observer in observers)

    def wants_site(self, site: int) -> bool:
        """Whether one of them wants it."""
        return any([observer.wants_site(site) for observer in self._observers])

    def on_blocks_start(self, threads: EmulatedThreads) -> None:
        """Tell them."""
        for observer in self._observers:
            observer.on_blocks_start(threads)

    def on_access(self, event: MemoryAccess) -> None:
        """Tell them."""
        for observer in self._observers:
            observer.on_access(event)

    def on_async_proxy_access(self, event: MemoryAccess) -> None:
        """Tell them."""
        for observer in self._observers:
            if observer.wants_async_proxy:
                observer.on_async_proxy_access(event)

    def on_operation(self, name: str, lanes: Lanes, elements: int, itemsize: int) -> None:
        """Tell them."""
        for observer in self._observers:
            observer.on_operation(name, lanes, elements, itemsize)


class EventRecorder(AccessObserver):
    """Keeps what it is told, to tell another.

    Args:
        target: that one.
    """

    def __init__(self, target: AccessObserver) -> None:
        self.wants_async_proxy, self._target = target.wants_async_proxy, target
        self._events: list[Callable[[AccessObserver], None]] = []

    def on_blocks_start(self, threads: EmulatedThreads) -> None:
        """Keep it."""
        self._events.append(lambda observer: observer.on_blocks_start(threads))

    def on_access(self, event: MemoryAccess) -> None:
        """Keep it."""
        self._events.append(lambda observer: observer.on_access(event))

    def on_async_proxy_access(self, event: MemoryAccess) -> None:
        """Keep it."""
        self._events.append(lambda observer: observer.on_async_proxy_access(event))

    def on_operation(self, name: str, lanes: Lanes, elements: int, itemsize: int) -> None:
        """Keep it."""
        self._events.append(lambda observer: observer.on_operation(name, lanes, elements, itemsize))

    def wants_site(self, site: int) -> bool:
        """Whether that one wants it."""
        return self._target.wants_site(site)

    def replay(self, observer: AccessObserver) -> None:
        """Tell it."""
        for send_event in self._events:
            send_event(observer)
