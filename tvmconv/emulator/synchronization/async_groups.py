"""Groups of what is under way for a thread or a warpgroup: multiplications by wgmma, and bulk copies that store.

Both are issued, made a group of, and waited for but so many of the last groups. Source: PTX ISA, "Async Proxy" and
"wgmma.commit_group", "wgmma.wait_group", "cp.async.on_async_proxy_access.commit_group",
"cp.async.on_async_proxy_access.wait_group".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.memory.async_readers import AsyncReader
from tvmconv.emulator.memory.registers import AccumulatorRegisters, RegisterBuffer
from tvmconv.gpu_specs import WARP_SIZE, WARPGROUP_SIZE

if TYPE_CHECKING:
    from tvmconv.emulator.memory.shared_memory import SharedMemory
    from tvmconv.emulator.threads import Lanes


@dataclass(frozen=True)
class WgmmaOp:
    """What one instruction multiplies.

    Attributes:
        first_lanes: the first of each warpgroup.
        group_indices: of the group, for each of these.
        chunks: of shared memory that each reads, shape (warpgroups, chunks).
        accumulators: where the result goes.
        register_rows: which of these registers.
    """

    first_lanes: Lanes
    group_indices: NDArray[np.int64]
    chunks: NDArray[np.int64]
    accumulators: AccumulatorRegisters
    register_rows: NDArray[np.intp]

    def restrict_to(self, warpgroup_mask: NDArray[np.bool_]) -> WgmmaOp:
        """That of some of its warpgroups."""
        return replace(
            self,
            first_lanes=self.first_lanes[warpgroup_mask],
            group_indices=self.group_indices[warpgroup_mask],
            chunks=self.chunks[warpgroup_mask],
        )


@dataclass
class WgmmaGroups:
    """Multiplications by wgmma that are under way, of all warpgroups.

    Attributes:
        shared: the memory that they read.
    """

    shared: SharedMemory
    _in_flight: list[WgmmaOp] = field(default_factory=list)
    _tracked_accumulators: list[AccumulatorRegisters] = field(default_factory=list)

    def __post_init__(self) -> None:
        """None has been issued."""
        self._num_committed_groups = np.zeros(
            self.shared.threads.num_lanes, np.int64
        )  # groups, by the first lane of a warpgroup

    def track_accumulators(self, registers: RegisterBuffer) -> AccumulatorRegisters:
        """Have it watched that registers are used as accumulators have to be."""
        if registers.accumulators is None:
            registers.accumulators = AccumulatorRegisters(registers.name, *registers.data.shape)
            self._tracked_accumulators.append(registers.accumulators)
        return registers.accumulators

    def fence(self, lanes: Lanes) -> None:
        """wgmma.fence: what was done with registers is done before what is multiplied into them."""
        for accumulators in self._tracked_accumulators:
            accumulators.needs_fence[lanes // WARP_SIZE] = False

    def issue(
        self,
        warpgroups: NDArray[np.intp],
        chunks: NDArray[np.int64],
        accumulators: AccumulatorRegisters,
        register_rows: Lanes,
    ) -> None:
        """Warpgroups, which are rows of lanes, begin to read chunks, and to write registers."""
        op = WgmmaOp(
            warpgroups[:, 0], self._num_committed_groups[warpgroups[:, 0]], chunks, accumulators, register_rows
        )
        self._start_op(op)
        self._in_flight.append(op)

    def commit_group(self, warpgroups: NDArray[np.intp]) -> None:
        """Make a group of what each warpgroup has issued since its last."""
        self._num_committed_groups[warpgroups[:, 0]] += 1

    def wait_group(self, warpgroups: NDArray[np.intp], max_pending_groups: int) -> None:
        """Wait for all groups of warpgroups but their last so many."""
        is_waiting = np.zeros(self.shared.threads.num_lanes, bool)
        is_waiting[warpgroups[:, 0]] = True
        remaining = []
        for op in self._in_flight:
            is_complete = is_waiting[op.first_lanes] & (
                op.group_indices < self._num_committed_groups[op.first_lanes] - max_pending_groups
            )
            if is_complete.any():
                self._complete_op(op.restrict_to(is_complete))
            if not is_complete.all():
                remaining.append(op if not is_complete.any() else op.restrict_to(~is_complete))
        self._in_flight = remaining
        for op in remaining:  # of those that have ended some may share chunks or registers with them
            self._start_op(op)

    def _start_op(self, op: WgmmaOp) -> None:
        for reader, is_reader in self._list_readers(op):
            self.shared.async_readers.start_read(reader, op.chunks[is_reader])
        op.accumulators.in_flight[op.register_rows[:, None], self._list_warps(op)] = True
        op.accumulators.has_in_flight = True

    def _complete_op(self, op: WgmmaOp) -> None:
        for reader, is_reader in self._list_readers(op):
            self.shared.async_readers.complete_read(reader, op.chunks[is_reader])
        op.accumulators.in_flight[op.register_rows[:, None], self._list_warps(op)] = False
        op.accumulators.has_in_flight = bool(op.accumulators.in_flight.any())

    def _list_warps(self, op: WgmmaOp) -> NDArray[np.intp]:
        return (op.first_lanes[:, None] // WARP_SIZE + np.arange(WARPGROUP_SIZE // WARP_SIZE)).reshape(-1)

    def _list_readers(self, op: WgmmaOp) -> list[tuple[AsyncReader, NDArray[np.bool_]]]:
        indices = op.first_lanes % self.shared.threads.lanes_per_block // WARPGROUP_SIZE
        return [(AsyncReader("wgmma", i), indices == i) for i in np.unique(indices).tolist()]


@dataclass
class BulkCopyGroups:
    """Bulk copies from shared memory that are under way, of all threads.

    Attributes:
        shared: the memory that they read.
    """

    shared: SharedMemory
    _in_flight: list[tuple[int, int, NDArray[np.int64]]] = field(default_factory=list)  # lane, group, chunks

    def __post_init__(self) -> None:
        """None has been issued."""
        self._num_committed_groups = np.zeros(self.shared.threads.num_lanes, np.int64)

    def issue(self, lane: int, chunks: NDArray[np.int64]) -> None:
        """A thread has chunks read."""
        self.shared.async_readers.start_read(self._make_reader(lane), chunks)
        self._in_flight.append((lane, int(self._num_committed_groups[lane]), chunks))

    def commit_group(self, lanes: Lanes) -> None:
        """Make a group of what each thread has issued since its last."""
        self._num_committed_groups[lanes] += 1

    def wait_group(self, lanes: Lanes, max_pending_groups: int) -> None:
        """Wait for all groups of threads but their last so many."""
        waiting_lanes = set(lanes.tolist())
        remaining = []
        for lane, group, chunks in self._in_flight:
            if lane in waiting_lanes and group < self._num_committed_groups[lane] - max_pending_groups:
                self.shared.async_readers.complete_read(self._make_reader(lane), chunks)
            else:
                remaining.append((lane, group, chunks))
        self._in_flight = remaining
        for lane, _, chunks in remaining:
            self.shared.async_readers.start_read(self._make_reader(lane), chunks)

    def _make_reader(self, lane: int) -> AsyncReader:
        return AsyncReader("bulk copy", lane % self.shared.threads.lanes_per_block)
