"""Observers of executed code, which are notified of its memory accesses and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.threads import EmulatedThreads, Lanes

MemorySpace = Literal["global", "shared"]
AccessKind = Literal["load", "store"]
SITES_PER_STATEMENT = 1 << 20  # size of the range of site numbers of one statement


@dataclass(frozen=True, order=True)
class AccessSite:
    """Properties that all executions of one access share."""

    site: int  # number of the access, in ascending order of the TIR
    space: MemorySpace  # "global" or "shared"
    kind: AccessKind  # "load" or "store"
    name: str  # name of the array or buffer
    nbytes: int  # bytes per access

    @property
    def statement_index(self) -> int:
        """Index of the access's statement, in the order of `tvmconv.analysis.tir.scopes.iterate_statements`."""
        return self.site // SITES_PER_STATEMENT


@dataclass(frozen=True, eq=False)
class MemoryAccess(AccessSite):
    """One access to memory by some lanes at once."""

    lanes: Lanes  # lanes that take part
    addresses: NDArray[np.int64]  # address of each lane in bytes
    itemsize: int  # bytes per element
    # source address of each lane in bytes for a copy from global to shared memory; -1 where the copy stores zeros
    source_addresses: NDArray[np.int64] | None = None
    # swizzle width of an access of the async proxy to shared memory in bytes; 0 without a swizzle
    swizzle_bytes: int = 0
    global_array: str = ""  # name of the array on the other side of a TMA copy

    @property
    def access_site(self) -> AccessSite:
        """The access site without the properties of this execution."""
        return AccessSite(self.site, self.space, self.kind, self.name, self.nbytes)

    def restrict_to_first_block(self, lanes_per_block: int | None) -> MemoryAccess | None:
        """Return the part of the access in the first block, or all of it without `lanes_per_block`, if any."""
        if lanes_per_block is None:
            return self if len(self.lanes) else None
        is_first_block = self.lanes < lanes_per_block
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
        """Return the lane and the index in the array of each accessed element."""
        count = self.nbytes // self.itemsize
        element_indices = self.addresses[:, None] // self.itemsize + np.arange(count)
        return np.repeat(self.lanes, count), element_indices.reshape(-1)


class StopEmulationError(Exception):
    """Request of an observer to stop the execution."""


class AccessObserver:
    """Base class of observers; this one ignores all notifications."""

    wants_async_proxy: bool = False  # whether the observer is notified of accesses of the async proxy
    # whether the observer is notified during the execution, although an execution that ends in a deadlock is
    # repeated. By default notifications are recorded and replayed
    immediate: bool = False

    def wants_site(self, site: int) -> bool:
        """Return whether the observer wants the next async-proxy access of a site."""
        return self.wants_async_proxy

    def on_blocks_start(self, threads: EmulatedThreads) -> None:
        """Handle the start of blocks that are executed together, and whose lanes are numbered from 0."""

    def on_access(self, event: MemoryAccess) -> None:
        """Handle a memory access."""

    def on_async_proxy_access(self, event: MemoryAccess) -> None:
        """Handle a memory access of the async proxy, whose bank conflicts are not documented."""

    def on_operation(self, name: str, lanes: Lanes, elements: int, itemsize: int) -> None:
        """Handle an arithmetic operation of some lanes on `elements` elements each."""


class ForwardingObserver(AccessObserver):
    """Observer that forwards notifications to several observers, at once or only on `replay`."""

    def __init__(self, *observers: AccessObserver, is_deferred: bool = False) -> None:
        self._observers, self._is_deferred = observers, is_deferred
        self.wants_async_proxy = any(observer.wants_async_proxy for observer in observers)
        self._events: list[tuple[str, tuple[Any, ...]]] = []  # name and arguments of the methods to call

    def wants_site(self, site: int) -> bool:
        """Return whether one of the observers wants the access."""
        return any([observer.wants_site(site) for observer in self._observers])

    def on_blocks_start(self, threads: EmulatedThreads) -> None:
        """Forward the notification."""
        self._forward("on_blocks_start", threads)

    def on_access(self, event: MemoryAccess) -> None:
        """Forward the notification."""
        self._forward("on_access", event)

    def on_async_proxy_access(self, event: MemoryAccess) -> None:
        """Forward the notification."""
        self._forward("on_async_proxy_access", event)

    def on_operation(self, name: str, lanes: Lanes, elements: int, itemsize: int) -> None:
        """Forward the notification."""
        self._forward("on_operation", name, lanes, elements, itemsize)

    def _forward(self, name: str, *arguments: Any) -> None:
        self._events.append((name, arguments))
        if not self._is_deferred:
            self.replay()

    def replay(self) -> None:
        """Send the notifications that have not been sent."""
        for name, arguments in self._events:
            for observer in self._observers:
                if name != "on_async_proxy_access" or observer.wants_async_proxy:
                    getattr(observer, name)(*arguments)
        self._events.clear()
