"""State of the executed code: lanes in lock step, their masks, observed accesses, and types of translated TIR."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.memory.arrays import GlobalArray, TensorMapArray
from tvmconv.emulator.memory.registers import RegisterBuffer
from tvmconv.emulator.memory.shared_memory import MemoryAddress, SharedMemory
from tvmconv.emulator.memory.vector_clocks import VectorClocks
from tvmconv.emulator.observers import AccessKind, AccessObserver, MemoryAccess, MemorySpace
from tvmconv.emulator.synchronization.async_groups import AsyncReadGroups
from tvmconv.emulator.synchronization.barriers import BarrierTable, MbarrierTable
from tvmconv.emulator.synchronization.fibers import Fork, WaitCondition
from tvmconv.emulator.threads import SHARED_BASE_ADDRESS, EmulatedThreads, Lanes
from tvmconv.errors import AnalysisError
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE

Mask = NDArray[np.bool_] | None  # active lanes; None for all lanes, if blocks consist of whole warps


@dataclass
class EmulatorState:
    """Lanes and their memory, of blocks that are executed together."""

    threads: EmulatedThreads  # threads that are executed together
    shared: SharedMemory  # shared memory of all blocks
    observer: AccessObserver | None = None  # observer that is notified of accesses and operations
    buffers: list[tuple[int, str]] = field(default_factory=list)  # start address and name of each shared buffer
    site: int = 0  # site number of the next access
    depends_on_memory: bool = False  # whether the value that is being evaluated depends on memory contents

    def __post_init__(self) -> None:
        self.is_checked = self.shared.is_checked  # whether values are computed and races are checked
        self.all_lanes: Lanes = np.arange(self.threads.num_lanes)
        self.thread_mask = self.all_lanes % self.threads.lanes_per_block < self.threads.threads_per_block
        self.full_mask: Mask = None if bool(self.thread_mask.all()) else self.thread_mask
        self._active_cache: tuple[Mask, Lanes] = (None, self.all_lanes)
        self.barriers = BarrierTable(self.shared)
        self.mbarriers = MbarrierTable(self.shared)
        self.wgmma_groups = AsyncReadGroups(self.shared, "wgmma")
        self.bulk_copy_groups = AsyncReadGroups(self.shared, "bulk copy")
        self.pending_copies: list[Callable[[], None]] = []  # they complete copies to shared memory, in order of issue

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
        """Evaluate code that decides whether or where memory is accessed; observers cannot follow data in memory."""
        if self.observer is None:
            return code(mask)
        previous, self.depends_on_memory = self.depends_on_memory, False
        value = code(mask)
        if self.depends_on_memory:
            raise AnalysisError("an address or a condition depends on the data in memory")
        self.depends_on_memory = previous
        return value

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

    def load(self, location: MemoryAddress, count: int, dtype: np.dtype[Any], lanes: Lanes) -> NDArray[Any]:
        """Load `count` contiguous elements from each of the offsets, of shape (lanes, n), as (lanes, n · count)."""
        self.depends_on_memory = True
        memory, addresses = location.memory, location.byte_offsets
        is_single_element = addresses.shape[1] * count == 1
        if self.is_checked and is_single_element and isinstance(memory, GlobalArray) and memory.dtype == dtype:
            self.notify("global", "load", location.name, lanes, addresses, dtype.itemsize, dtype.itemsize)
            return memory.values[addresses // dtype.itemsize]
        flat, access_lanes = self._flatten(location, lanes)
        loaded = self.load_bytes(flat, count * dtype.itemsize, access_lanes, dtype.itemsize)
        return loaded.view(dtype).reshape(len(lanes), addresses.shape[1] * count)

    def store(self, location: MemoryAddress, count: int, elements: NDArray[Any], lanes: Lanes) -> None:
        """Store elements, with the arguments of `load`."""
        flat, access_lanes = self._flatten(location, lanes)
        stored_bytes = elements.reshape(len(flat.byte_offsets), count).view(np.uint8)
        self.store_bytes(flat, stored_bytes, access_lanes, elements.dtype.itemsize)

    @staticmethod
    def _flatten(location: MemoryAddress, lanes: Lanes) -> tuple[MemoryAddress, Lanes]:
        starts_per_lane = location.byte_offsets.shape[1]
        access_lanes = np.repeat(lanes, starts_per_lane) if starts_per_lane > 1 else lanes
        return MemoryAddress(location.memory, location.byte_offsets.reshape(-1), location.name), access_lanes

    def load_bytes(self, location: MemoryAddress, nbytes: int, lanes: Lanes, itemsize: int) -> NDArray[Any]:
        """Load bytes, of shape (lanes, bytes); the observer is notified of elements of `itemsize` bytes."""
        memory, offsets, blocks = location.memory, location.byte_offsets, location.target_blocks
        if not self.is_checked:
            self.note_access(location, "load", nbytes, lanes, itemsize)
            return np.zeros((len(offsets), nbytes), np.uint8)
        if isinstance(memory, GlobalArray):
            loaded = memory.read(offsets, nbytes)
        else:
            units = memory.find_units(offsets, lanes, nbytes, blocks)
            loaded = np.ascontiguousarray(memory.read(units, lanes)).view(np.uint8)
        self._notify_access(location, "load", nbytes, lanes, itemsize)
        return loaded

    def store_bytes(
        self, location: MemoryAddress, stored_bytes: NDArray[np.uint8], lanes: Lanes, itemsize: int
    ) -> None:
        """Store rows of bytes; see `load_bytes`."""
        memory, offsets, nbytes = location.memory, location.byte_offsets, stored_bytes.shape[1]
        if not self.is_checked:
            self.note_access(location, "store", nbytes, lanes, itemsize)
            return
        if isinstance(memory, GlobalArray):
            memory.write(offsets, stored_bytes)
        else:
            units = memory.find_units(offsets, lanes, nbytes, location.target_blocks)
            memory.write(units, lanes, stored_bytes.view(f"u{memory.unit_bytes}"))
        self._notify_access(location, "store", nbytes, lanes, itemsize)

    def note_access(self, location: MemoryAddress, kind: AccessKind, nbytes: int, lanes: Lanes, itemsize: int) -> None:
        """Check an access and notify of it, without values."""
        if isinstance(location.memory, GlobalArray):
            location.memory.check_access(location.byte_offsets, nbytes)
        else:
            location.memory.find_units(location.byte_offsets, lanes, nbytes, location.target_blocks)
        self._notify_access(location, kind, nbytes, lanes, itemsize)

    def _notify_access(
        self, location: MemoryAddress, kind: AccessKind, nbytes: int, lanes: Lanes, itemsize: int
    ) -> None:
        if location.target_blocks is not None and isinstance(location.memory, SharedMemory):
            location.memory.note_remote_access(location.target_blocks, lanes)
            return
        space: MemorySpace = "global" if isinstance(location.memory, GlobalArray) else "shared"
        self.notify(space, kind, location.name, lanes, location.byte_offsets, nbytes, itemsize)

    def defer_access(self, access: Callable[[Mask], object]) -> Callable[[Mask], None]:
        """Return a function that notifies of an access later, at the site of now, for the lanes of its mask."""
        site = self.site

        def run_deferred(mask: Mask) -> None:
            current_site, self.site = self.site, site
            access(mask)
            self.site = current_site

        return run_deferred

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


ExpressionCode = Callable[[Mask], Any]  # evaluates an expression: a number, an array with one per lane, or a Pointer
StatementCode = Callable[[Mask], None]  # executes a statement for the lanes of a mask


@dataclass(frozen=True)
class Pointer:
    """Memory object and byte offset that a pointer refers to; the offset is a number or an array with one per lane."""

    memory: GlobalArray | TensorMapArray | RegisterBuffer | SharedMemory
    byte_offset: Any
    name: str


@dataclass(frozen=True)
class SuspendableStatement:
    """Statement at which lanes may wait: `run` yields a condition, and continues once that is ready."""

    run: Callable[[Mask], Iterator[WaitCondition | Fork]]


CompiledStatement: TypeAlias = StatementCode | SuspendableStatement


def run_statement(code: CompiledStatement, mask: Mask) -> Iterator[WaitCondition | Fork]:
    """Execute a statement, and yield what its lanes wait for."""
    if isinstance(code, SuspendableStatement):
        yield from code.run(mask)
    else:
        code(mask)


def compose_statement(
    run: Callable[[Mask], Iterator[WaitCondition | Fork]], parts: Sequence[CompiledStatement]
) -> CompiledStatement:
    """Return a statement that a generator executes; only if one of its parts may suspend, it may."""
    if any(isinstance(part, SuspendableStatement) for part in parts):
        return SuspendableStatement(run)

    def run_to_end(mask: Mask) -> None:
        for _ in run(mask):
            pass

    return run_to_end


class TirTranslator(Protocol):
    """Interface of the TIR translator that the instructions use."""

    state: EmulatorState

    def translate_expression(self, node: Any) -> ExpressionCode:
        """Return the function that evaluates an expression."""

    def find_registers(self, node: Any) -> tuple[RegisterBuffer, ExpressionCode] | None:
        """Return the register buffer of an operand such as `acc[3]`, and the code of its index; None for others."""
