"""What executed code runs on: threads in lock step, their masks, and accesses to memory that can be watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.addresses import SHARED_BASE
from tvmconv.analysis.emulation.errors import ExecutionError
from tvmconv.analysis.emulation.memory.arrays import Array
from tvmconv.analysis.emulation.memory.shared import Shared
from tvmconv.analysis.emulation.synchronization.groups import BulkGroups, Multiplications
from tvmconv.analysis.emulation.synchronization.mbarriers import Mbarriers
from tvmconv.analysis.emulation.synchronization.meetings import Meetings
from tvmconv.analysis.emulation.threads import Lanes, Threads
from tvmconv.analysis.emulation.watch import Accessed, Kind, Space, Watch
from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARP, WARPGROUP

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.memory.clocks import Clocks

Mask = NDArray[np.bool_] | None  # of lanes that take part; None for all, if a block has whole warps


@dataclass
class Machine:
    """Threads and their shared memory.

    Attributes:
        threads: the lanes.
        shared: of all blocks.
        watch: is told of accesses and operations.
        buffers: where each shared buffer begins, and its name.
        site: where in the text the access is that comes next.
        loaded: whether what is being evaluated depends on what is in memory.
        meetings: the barriers of blocks and clusters.
        mbarriers: the objects of that name.
        multiplications: those by wgmma that are under way.
        bulk_groups: copies to global memory that are under way.
        under_way: what lets a copy to shared memory land, in the order in which these were issued.
        checked: whether races are looked for, and values kept.
    """

    threads: Threads
    shared: Shared
    watch: Watch | None = None
    buffers: list[tuple[int, str]] = field(default_factory=list)
    site: int = 0
    loaded: bool = False

    def __post_init__(self) -> None:
        """The lanes and their masks."""
        self.checked = self.shared.checked
        self.all_lanes: Lanes = np.arange(self.threads.lanes)
        self.real = self.all_lanes % self.threads.padded < self.threads.real
        self.everybody: Mask = None if bool(self.real.all()) else self.real
        self._active: tuple[Mask, Lanes] = (None, self.all_lanes)
        self.meetings = Meetings(self.shared)
        self.mbarriers = Mbarriers(self.shared)
        self.multiplications = Multiplications(self.shared)
        self.bulk_groups = BulkGroups(self.shared)
        self.under_way: list[Callable[[], None]] = []

    @property
    def tells_bulk(self) -> bool:
        """Whether somebody wants to know what the async proxy accesses next."""
        return self.watch is not None and self.watch.wants_bulk and self.watch.wants(self.site)

    @property
    def clocks(self) -> Clocks:
        """What the threads know of each other."""
        return self.shared.clocks

    def lanes(self, mask: Mask) -> Lanes:
        """The lanes of a mask."""
        if mask is None:
            return self.all_lanes
        if self._active[0] is not mask:
            self._active = mask, np.flatnonzero(mask)
        return self._active[1]

    def axis(self, tag: str) -> NDArray[np.int64]:
        """The value of a thread or block axis in each lane."""
        thread = self.all_lanes % self.threads.padded
        block = self.threads.blocks[self.all_lanes // self.threads.padded]
        (x, y, _), clusters = self.threads.block, self.threads.clusters
        values = {
            "threadIdx.x": thread % x,
            "threadIdx.y": thread // x % y,
            "threadIdx.z": thread // (x * y),
            "blockIdx.x": block[:, 0],
            "blockIdx.y": block[:, 1],
            "blockIdx.z": block[:, 2],
            "clusterCtaIdx.x": block[:, 0] % clusters[0],
            "clusterCtaIdx.y": block[:, 1] % clusters[1],
            "clusterCtaIdx.z": block[:, 2] % clusters[2],
        }
        if tag not in values:
            raise AnalysisError(f"threads along {tag}")
        return values[tag].astype(np.int64)

    def rows(self, value: Any, lanes: Lanes) -> NDArray[Any]:
        """A value in each of some lanes."""
        value = np.asarray(value)
        return np.full(len(lanes), value) if value.ndim == 0 else value[lanes]

    def decided(self, code: Callable[[Mask], Any], mask: Mask) -> Any:
        """What decides where or whether memory is accessed: for who counts, it has to be the code and not the data.

        Raises:
            AnalysisError: somebody watches, and it depends on what is in memory.
        """
        if self.watch is None:
            return code(mask)
        before, self.loaded = self.loaded, False
        value = code(mask)
        if self.loaded:
            raise AnalysisError("what a thread does depends on the data")
        self.loaded = before
        return value

    def meet_warps(self, mask: Mask) -> None:
        """A barrier of the warps that lanes are all of."""
        self.meetings.warp(self.real if mask is None else mask, self.real)

    def land(self) -> bool:
        """Let the copy land that is under way for longest, if there is one."""
        if not self.under_way:
            return False
        self.under_way.pop(0)()
        return True

    def warpgroups(self, mask: Mask) -> NDArray[np.intp]:
        """The lanes of a mask, which has to be of whole warpgroups, for what these do together; one in a row."""
        lanes = self.lanes(mask)
        groups = lanes.reshape(-1, WARPGROUP) if len(lanes) % WARPGROUP == 0 else lanes[None, :1]
        whole = groups.shape[1] == WARPGROUP and (groups[:, -1] - groups[:, 0] == WARPGROUP - 1).all()
        if not whole or (groups[:, 0] % self.threads.padded % WARPGROUP).any():
            raise ExecutionError("an instruction of a whole warpgroup that not all of its threads reach")
        return groups

    def warps(self, mask: Mask) -> Lanes:
        """The lanes of a mask, which has to be of whole warps, for what a warp does together."""
        lanes = self.lanes(mask)
        taking = self.real if mask is None else mask
        by_warp = taking.reshape(-1, WARP)
        if not np.array_equal(by_warp.any(axis=1), by_warp.all(axis=1)):
            raise ExecutionError("an instruction of a whole warp that not all of its threads reach")
        return lanes

    # --- memory ---

    def load(
        self,
        memory: Array | Shared,
        starts: NDArray[np.int64],
        count: int,
        dtype: np.dtype[Any],
        lanes: Lanes,
        name: str,
    ) -> NDArray[Any]:
        """Elements in a row, of each lane from one start or from several; shape (lanes, elements)."""
        each = starts.shape[1]
        self.loaded = True
        if self.checked and isinstance(memory, Array) and each * count == 1 and memory.dtype == dtype:
            self.tell("global", "load", name, lanes, starts, dtype.itemsize, dtype.itemsize)
            return memory.values[starts // dtype.itemsize]
        flat, who = starts.reshape(-1), np.repeat(lanes, each) if each > 1 else lanes
        found = self.load_bytes(memory, flat, count * dtype.itemsize, who, name, dtype.itemsize)
        return found.view(dtype).reshape(len(lanes), each * count)

    def store(
        self,
        memory: Array | Shared,
        starts: NDArray[np.int64],
        count: int,
        rows: NDArray[Any],
        lanes: Lanes,
        name: str,
        itemsize: int,
    ) -> None:
        """Store elements, as `load` loads them."""
        each = starts.shape[1]
        flat, who = starts.reshape(-1), np.repeat(lanes, each) if each > 1 else lanes
        given = rows.reshape(len(flat), count).view(np.uint8)
        self.store_bytes(memory, flat, given, who, name, itemsize)

    def load_bytes(
        self,
        memory: Array | Shared,
        addresses: NDArray[np.int64],
        nbytes: int,
        lanes: Lanes,
        name: str,
        itemsize: int,
        blocks: Lanes | None = None,
    ) -> NDArray[Any]:
        """Bytes at addresses, of shape (lanes, bytes); `blocks` says whose shared memory it is, if not their own."""
        if not self.checked:
            self.reach(memory, "load", name, lanes, addresses, nbytes, itemsize, blocks)
            return np.zeros((len(addresses), nbytes), np.uint8)
        if isinstance(memory, Array):
            found: NDArray[Any] = memory.read(addresses, nbytes)
            self.tell("global", "load", name, lanes, addresses, nbytes, itemsize)
            return found
        units = memory.at(addresses, lanes, nbytes, blocks)
        if blocks is not None:
            memory.from_afar(blocks, lanes)
        else:
            self.tell("shared", "load", name, lanes, addresses, nbytes, itemsize)
        return np.ascontiguousarray(memory.read(units, lanes)).view(np.uint8)

    def store_bytes(
        self,
        memory: Array | Shared,
        addresses: NDArray[np.int64],
        given: NDArray[np.uint8],
        lanes: Lanes,
        name: str,
        itemsize: int,
        blocks: Lanes | None = None,
    ) -> None:
        """Store rows of bytes at addresses; as for `load_bytes`."""
        nbytes = given.shape[1]
        if not self.checked:
            self.reach(memory, "store", name, lanes, addresses, nbytes, itemsize, blocks)
            return
        if isinstance(memory, Array):
            memory.write(addresses, given)
            self.tell("global", "store", name, lanes, addresses, nbytes, itemsize)
            return
        memory.write(memory.at(addresses, lanes, nbytes, blocks), lanes, given.view(f"u{memory.unit}"))
        if blocks is not None:
            memory.from_afar(blocks, lanes)
        else:
            self.tell("shared", "store", name, lanes, addresses, nbytes, itemsize)

    def later(self, access: Callable[[Mask], object]) -> Callable[[Mask], None]:
        """An access by the lanes of a mask that is told of later, as of where the text is now."""
        site = self.site

        def told(mask: Mask) -> None:
            now, self.site = self.site, site
            access(mask)
            self.site = now

        return told

    def reach(
        self,
        memory: Array | Shared,
        kind: Kind,
        name: str,
        lanes: Lanes,
        addresses: NDArray[np.int64],
        nbytes: int,
        itemsize: int,
        blocks: Lanes | None = None,
    ) -> None:
        """Access bytes whose values do not matter; as for `load_bytes`."""
        if isinstance(memory, Array):
            memory.check(addresses, nbytes)
            self.tell("global", kind, name, lanes, addresses, nbytes, itemsize)
            return
        memory.at(addresses, lanes, nbytes, blocks)
        if blocks is None:
            self.tell("shared", kind, name, lanes, addresses, nbytes, itemsize)

    def tell(
        self,
        space: Space,
        kind: Kind,
        name: str,
        lanes: Lanes,
        addresses: NDArray[np.int64],
        nbytes: int,
        itemsize: int,
        source: NDArray[np.int64] | None = None,
    ) -> None:
        """Tell who watches of an access; see `Accessed`."""
        if self.watch is not None:
            at = addresses.reshape(-1)
            self.watch.access(Accessed(self.site, space, kind, name, nbytes, lanes, at, itemsize, source))

    def buffer_at(self, address: int) -> str:
        """The name of the shared buffer that an address lies in."""
        before = [(start, name) for start, name in self.buffers if start <= address]
        return max(before)[1] if before else f"address {address - SHARED_BASE}"
