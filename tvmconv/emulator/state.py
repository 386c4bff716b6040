"""State of the executed code: lanes in lock step, their masks, and observed memory accesses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.addresses import SHARED_BASE_ADDRESS
from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.memory.arrays import GlobalArray
from tvmconv.emulator.memory.shared_memory import SharedMemory
from tvmconv.emulator.observers import AccessKind, AccessObserver, MemoryAccess, MemorySpace
from tvmconv.emulator.synchronization.async_groups import BulkCopyGroups, WgmmaGroups
from tvmconv.emulator.synchronization.barriers import BarrierTable
from tvmconv.emulator.synchronization.mbarriers import MbarrierTable
from tvmconv.emulator.threads import EmulatedThreads, Lanes
from tvmconv.errors import AnalysisError
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE

if TYPE_CHECKING:
    from tvmconv.emulator.memory.vector_clocks import VectorClocks

Mask = NDArray[np.bool_] | None  # active lanes; None for all lanes, if blocks consist of whole warps


@dataclass
class EmulatorState:
    """Lanes and their shared memory.

    Attributes:
        threads: Threads that are executed together.
        shared: Shared memory of all blocks.
        observer: Observer that is notified of accesses and operations.
        buffers: Start address and name of each shared buffer.
        site: Site number of the next access.
        depends_on_memory: Whether the value that is being evaluated depends on memory contents.
        barriers: Barriers of blocks and clusters.
        mbarriers: Mbarrier objects.
        wgmma_groups: Groups of pending wgmma instructions.
        bulk_copy_groups: Groups of pending bulk copies to global memory.
        pending_copies: Functions that complete pending copies to shared memory, in order of issue.
        is_checked: Whether values are computed and races are checked.
    """

    threads: EmulatedThreads
    shared: SharedMemory
    observer: AccessObserver | None = None
    buffers: list[tuple[int, str]] = field(default_factory=list)
    site: int = 0
    depends_on_memory: bool = False

    def __post_init__(self) -> None:
        """Initialize the masks and the synchronization objects."""
        self.is_checked = self.shared.is_checked
        self.all_lanes: Lanes = np.arange(self.threads.num_lanes)
        self.thread_mask = self.all_lanes % self.threads.lanes_per_block < self.threads.threads_per_block
        self.full_mask: Mask = None if bool(self.thread_mask.all()) else self.thread_mask
        self._active_cache: tuple[Mask, Lanes] = (None, self.all_lanes)
        self.barriers = BarrierTable(self.shared)
        self.mbarriers = MbarrierTable(self.shared)
        self.wgmma_groups = WgmmaGroups(self.shared)
        self.bulk_copy_groups = BulkCopyGroups(self.shared)
        self.pending_copies: list[Callable[[], None]] = []

    @property
    def observes_async_proxy(self) -> bool:
        """Whether an observer wants the next access of the async proxy."""
        return self.observer is not None and self.observer.wants_async_proxy and self.observer.wants_site(self.site)

    @property
    def clocks(self) -> VectorClocks:
        """Vector clocks of the threads."""
        return self.shared.clocks

    def find_lanes(self, mask: Mask) -> Lanes:
        """Return the active lanes of a mask."""
        if mask is None:
            return self.all_lanes
        if self._active_cache[0] is not mask:
            self._active_cache = mask, np.flatnonzero(mask)
        return self._active_cache[1]

    def read_axis(self, tag: str) -> NDArray[np.int64]:
        """Return the value of a thread or block axis in each lane."""
        thread = self.all_lanes % self.threads.lanes_per_block
        block = self.threads.block_indices[self.all_lanes // self.threads.lanes_per_block]
        (x, y, _), clusters = self.threads.block_shape, self.threads.cluster_shape
        values = {"threadIdx.x": thread % x, "threadIdx.y": thread // x % y, "threadIdx.z": thread // (x * y)}
        for axis, name in enumerate("xyz"):
            values[f"blockIdx.{name}"] = block[:, axis]
            values[f"clusterCtaIdx.{name}"] = block[:, axis] % clusters[axis]
        if tag not in values:
            raise AnalysisError(f"the thread axis {tag} is not supported; supported are {', '.join(values)}")
        return values[tag].astype(np.int64)

    def select_lane_values(self, value: Any, lanes: Lanes) -> NDArray[Any]:
        """Return a value in each of some lanes."""
        value = np.asarray(value)
        return np.full(len(lanes), value) if value.ndim == 0 else value[lanes]

    def evaluate_data_independent(self, code: Callable[[Mask], Any], mask: Mask) -> Any:
        """Evaluate code that decides whether or where memory is accessed.

        Raises:
            AnalysisError: An observer is present, and the value depends on memory contents.
        """
        if self.observer is None:
            return code(mask)
        previous, self.depends_on_memory = self.depends_on_memory, False
        value = code(mask)
        if self.depends_on_memory:
            raise AnalysisError("an address or a condition depends on the data in memory")
        self.depends_on_memory = previous
        return value

    def evaluate_lanes(self, code: Callable[[Mask], Any], mask: Mask, lanes: Lanes) -> NDArray[Any]:
        """Evaluate code as `evaluate_data_independent` does, and return its value in each of some lanes."""
        return self.select_lane_values(self.evaluate_data_independent(code, mask), lanes)

    def sync_warps(self, mask: Mask) -> None:
        """Synchronize the warps of a mask, of which all lanes take part."""
        self.barriers.sync_warps(self.thread_mask if mask is None else mask, self.thread_mask)

    def complete_oldest_copy(self) -> bool:
        """Complete the oldest pending copy, and return whether there was one."""
        if not self.pending_copies:
            return False
        self.pending_copies.pop(0)()
        return True

    def require_whole_warpgroups(self, mask: Mask) -> NDArray[np.intp]:
        """Return the active lanes of a mask by warpgroup; all lanes of each warpgroup have to be active."""
        lanes = self.find_lanes(mask)
        groups = lanes.reshape(-1, WARPGROUP_SIZE) if len(lanes) % WARPGROUP_SIZE == 0 else lanes[None, :1]
        is_whole = groups.shape[1] == WARPGROUP_SIZE and (groups[:, -1] - groups[:, 0] == WARPGROUP_SIZE - 1).all()
        if not is_whole or (groups[:, 0] % self.threads.lanes_per_block % WARPGROUP_SIZE).any():
            raise ExecutionError("not all threads of a warpgroup reach an instruction of the whole warpgroup")
        return groups

    def require_whole_warps(self, mask: Mask) -> Lanes:
        """Return the active lanes of a mask; all lanes of each warp have to be active."""
        lanes = self.find_lanes(mask)
        active = self.thread_mask if mask is None else mask
        active_by_warp = active.reshape(-1, WARP_SIZE)
        if not np.array_equal(active_by_warp.any(axis=1), active_by_warp.all(axis=1)):
            raise ExecutionError("not all threads of a warp reach an instruction of the whole warp")
        return lanes

    # --- memory ---

    def load(
        self,
        memory: GlobalArray | SharedMemory,
        start_addresses: NDArray[np.int64],
        count: int,
        dtype: np.dtype[Any],
        lanes: Lanes,
        name: str,
    ) -> NDArray[Any]:
        """Load `count` contiguous elements from each start address of a lane; of shape (lanes, elements)."""
        starts_per_lane = start_addresses.shape[1]
        self.depends_on_memory = True
        is_single_element = starts_per_lane * count == 1 and isinstance(memory, GlobalArray) and memory.dtype == dtype
        if self.is_checked and is_single_element and isinstance(memory, GlobalArray):
            self.notify("global", "load", name, lanes, start_addresses, dtype.itemsize, dtype.itemsize)
            return memory.values[start_addresses // dtype.itemsize]
        addresses = start_addresses.reshape(-1)
        access_lanes = np.repeat(lanes, starts_per_lane) if starts_per_lane > 1 else lanes
        loaded = self.load_bytes(memory, addresses, count * dtype.itemsize, access_lanes, name, dtype.itemsize)
        return loaded.view(dtype).reshape(len(lanes), starts_per_lane * count)

    def store(
        self,
        memory: GlobalArray | SharedMemory,
        start_addresses: NDArray[np.int64],
        count: int,
        elements: NDArray[Any],
        lanes: Lanes,
        name: str,
        itemsize: int,
    ) -> None:
        """Store elements, with the arguments of `load`."""
        starts_per_lane = start_addresses.shape[1]
        addresses = start_addresses.reshape(-1)
        access_lanes = np.repeat(lanes, starts_per_lane) if starts_per_lane > 1 else lanes
        stored_bytes = elements.reshape(len(addresses), count).view(np.uint8)
        self.store_bytes(memory, addresses, stored_bytes, access_lanes, name, itemsize)

    def load_bytes(
        self,
        memory: GlobalArray | SharedMemory,
        addresses: NDArray[np.int64],
        nbytes: int,
        lanes: Lanes,
        name: str,
        itemsize: int,
        blocks: Lanes | None = None,
    ) -> NDArray[Any]:
        """Load bytes, of shape (lanes, bytes); `blocks` owns the shared memory if it is not each lane's own block."""
        if not self.is_checked:
            self.note_access(memory, "load", name, lanes, addresses, nbytes, itemsize, blocks)
            return np.zeros((len(addresses), nbytes), np.uint8)
        if isinstance(memory, GlobalArray):
            loaded: NDArray[Any] = memory.read(addresses, nbytes)
            self.notify("global", "load", name, lanes, addresses, nbytes, itemsize)
            return loaded
        units = memory.find_units(addresses, lanes, nbytes, blocks)
        if blocks is not None:
            memory.note_remote_access(blocks, lanes)
        else:
            self.notify("shared", "load", name, lanes, addresses, nbytes, itemsize)
        return np.ascontiguousarray(memory.read(units, lanes)).view(np.uint8)

    def store_bytes(
        self,
        memory: GlobalArray | SharedMemory,
        addresses: NDArray[np.int64],
        stored_bytes: NDArray[np.uint8],
        lanes: Lanes,
        name: str,
        itemsize: int,
        blocks: Lanes | None = None,
    ) -> None:
        """Store rows of bytes, with the arguments of `load_bytes`."""
        nbytes = stored_bytes.shape[1]
        if not self.is_checked:
            self.note_access(memory, "store", name, lanes, addresses, nbytes, itemsize, blocks)
            return
        if isinstance(memory, GlobalArray):
            memory.write(addresses, stored_bytes)
            self.notify("global", "store", name, lanes, addresses, nbytes, itemsize)
            return
        units = memory.find_units(addresses, lanes, nbytes, blocks)
        memory.write(units, lanes, stored_bytes.view(f"u{memory.unit_bytes}"))
        if blocks is not None:
            memory.note_remote_access(blocks, lanes)
        else:
            self.notify("shared", "store", name, lanes, addresses, nbytes, itemsize)

    def defer_access(self, access: Callable[[Mask], object]) -> Callable[[Mask], None]:
        """Return a function that notifies of an access later, at the site of now, for the lanes of its mask."""
        site = self.site

        def run_deferred(mask: Mask) -> None:
            current_site, self.site = self.site, site
            access(mask)
            self.site = current_site

        return run_deferred

    def note_access(
        self,
        memory: GlobalArray | SharedMemory,
        kind: AccessKind,
        name: str,
        lanes: Lanes,
        addresses: NDArray[np.int64],
        nbytes: int,
        itemsize: int,
        blocks: Lanes | None = None,
    ) -> None:
        """Check an access and notify of it, without values; the arguments are those of `load_bytes`."""
        if isinstance(memory, GlobalArray):
            memory.check_access(addresses, nbytes)
            self.notify("global", kind, name, lanes, addresses, nbytes, itemsize)
            return
        memory.find_units(addresses, lanes, nbytes, blocks)
        if blocks is None:
            self.notify("shared", kind, name, lanes, addresses, nbytes, itemsize)

    def notify(
        self,
        space: MemorySpace,
        kind: AccessKind,
        name: str,
        lanes: Lanes,
        addresses: NDArray[np.int64],
        nbytes: int,
        itemsize: int,
        source_addresses: NDArray[np.int64] | None = None,
    ) -> None:
        """Notify the observer of an access; see `MemoryAccess`."""
        if self.observer is not None:
            flat_addresses = addresses.reshape(-1)
            self.observer.on_access(
                MemoryAccess(self.site, space, kind, name, nbytes, lanes, flat_addresses, itemsize, source_addresses)
            )

    def find_buffer_name(self, address: int) -> str:
        """Return the name of the shared buffer that contains an address."""
        preceding_buffers = [(start, name) for start, name in self.buffers if start <= address]
        return max(preceding_buffers)[1] if preceding_buffers else f"address {address - SHARED_BASE_ADDRESS}"
