"""Commit groups of the asynchronous operations of a thread or warpgroup: wgmma, and bulk copies to global memory.

Operations are issued, committed as a group, and waited for, except for the last groups. Source: PTX ISA, "Async Proxy",
"wgmma.commit_group", "wgmma.wait_group", "cp.async.bulk.commit_group" and "cp.async.bulk.wait_group".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.memory.async_readers import AsyncReader
from tvmconv.emulator.memory.registers import AccumulatorRegisters, RegisterBuffer
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE

if TYPE_CHECKING:
    from tvmconv.emulator.memory.shared_memory import SharedMemory
    from tvmconv.emulator.threads import Lanes


@dataclass(frozen=True)
class WgmmaOp:
    """One wgmma instruction of some warpgroups.

    Attributes:
        first_lanes: First lane of each warpgroup.
        group_indices: Index of the commit group of each warpgroup.
        chunks: Chunks of shared memory that each warpgroup reads, of shape (warpgroups, chunks).
        accumulators: Usage of the registers that receive the result.
        register_rows: Indices of these registers in their buffer.
    """

    first_lanes: Lanes
    group_indices: NDArray[np.int64]
    chunks: NDArray[np.int64]
    accumulators: AccumulatorRegisters
    register_rows: NDArray[np.intp]

    def restrict_to(self, warpgroup_mask: NDArray[np.bool_]) -> WgmmaOp:
        """Return the part of the instruction of some of its warpgroups."""
        per_warpgroup = self.first_lanes, self.group_indices, self.chunks
        first_lanes, group_indices, chunks = (values[warpgroup_mask] for values in per_warpgroup)
        return replace(self, first_lanes=first_lanes, group_indices=group_indices, chunks=chunks)


@dataclass
class WgmmaGroups:
    """Pending wgmma instructions of all warpgroups.

    Attributes:
        shared: Shared memory that they read.
    """

    shared: SharedMemory
    _in_flight: list[WgmmaOp] = field(default_factory=list)
    _tracked_accumulators: list[AccumulatorRegisters] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Initialize without pending instructions."""
        self._num_committed_groups = np.zeros(self.shared.threads.num_lanes, np.int64)  # by first lane of a warpgroup

    def track_accumulators(self, registers: RegisterBuffer) -> AccumulatorRegisters:
        """Start to check the usage of registers as accumulators, and return their usage."""
        if registers.accumulators is None:
            registers.accumulators = AccumulatorRegisters(registers.name, *registers.data.shape)
            self._tracked_accumulators.append(registers.accumulators)
        return registers.accumulators

    def fence(self, lanes: Lanes) -> None:
        """wgmma.fence: orders earlier accesses of registers before the next wgmma."""
        for accumulators in self._tracked_accumulators:
            accumulators.needs_fence[lanes // WARP_SIZE] = False

    def issue(
        self,
        warpgroups: NDArray[np.intp],
        chunks: NDArray[np.int64],
        accumulators: AccumulatorRegisters,
        register_rows: Lanes,
    ) -> None:
        """Issue an instruction of warpgroups (rows of lanes) that reads chunks and writes registers."""
        first_lanes = warpgroups[:, 0]
        op = WgmmaOp(first_lanes, self._num_committed_groups[first_lanes], chunks, accumulators, register_rows)
        self._start_op(op)
        self._in_flight.append(op)

    def commit_group(self, warpgroups: NDArray[np.intp]) -> None:
        """Commit each warpgroup's instructions since its last commit as a group."""
        self._num_committed_groups[warpgroups[:, 0]] += 1

    def wait_group(self, warpgroups: NDArray[np.intp], max_pending_groups: int) -> None:
        """Wait for all groups of warpgroups but the last `max_pending_groups`."""
        is_waiting = np.zeros(self.shared.threads.num_lanes, bool)
        is_waiting[warpgroups[:, 0]] = True
        remaining = []
        for op in self._in_flight:
            num_committed = self._num_committed_groups[op.first_lanes]
            is_complete = is_waiting[op.first_lanes] & (op.group_indices < num_committed - max_pending_groups)
            if is_complete.any():
                self._complete_op(op.restrict_to(is_complete))
            if not is_complete.all():
                remaining.append(op if not is_complete.any() else op.restrict_to(~is_complete))
        self._in_flight = remaining
        for op in remaining:  # they may share chunks or registers with completed instructions
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
    """Pending bulk copies from shared memory of all threads.

    Attributes:
        shared: Shared memory that they read.
    """

    shared: SharedMemory
    _in_flight: list[tuple[int, int, NDArray[np.int64]]] = field(default_factory=list)  # (lane, group, chunks)

    def __post_init__(self) -> None:
        """Initialize without pending copies."""
        self._num_committed_groups = np.zeros(self.shared.threads.num_lanes, np.int64)

    def issue(self, lane: int, chunks: NDArray[np.int64]) -> None:
        """Issue a copy of a thread that reads chunks."""
        self.shared.async_readers.start_read(self._make_reader(lane), chunks)
        self._in_flight.append((lane, int(self._num_committed_groups[lane]), chunks))

    def commit_group(self, lanes: Lanes) -> None:
        """Commit each thread's copies since its last commit as a group."""
        self._num_committed_groups[lanes] += 1

    def wait_group(self, lanes: Lanes, max_pending_groups: int) -> None:
        """Wait for all groups of threads but the last `max_pending_groups`."""
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
