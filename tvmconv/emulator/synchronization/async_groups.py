"""Pending wgmma instructions and bulk copies to global memory, which read shared memory asynchronously.

Source: PTX ISA, "Async Proxy", "wgmma.wait_group" and "cp.async.bulk.wait_group".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.memory.commit_groups import AsyncOps, CommitGroups
from tvmconv.emulator.memory.registers import AccumulatorRegisters, RegisterBuffer
from tvmconv.emulator.memory.shared_memory import AsyncReader
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE

if TYPE_CHECKING:
    from tvmconv.emulator.memory.shared_memory import SharedMemory
    from tvmconv.emulator.threads import Lanes


class WgmmaGroups:
    """Pending wgmma instructions of all warpgroups."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self._groups = CommitGroups(shared.threads.num_lanes)  # by the first lane of a warpgroup
        self._tracked_accumulators: list[AccumulatorRegisters] = []

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
        elements: NDArray[np.intp],
    ) -> None:
        """Issue an instruction of warpgroups (rows of lanes) that reads chunks and writes elements of accumulators."""
        self._mark(self._groups.issue(warpgroups[:, 0], chunks, context=(accumulators, elements)), is_pending=True)

    def commit_group(self, warpgroups: NDArray[np.intp]) -> None:
        """Commit each warpgroup's instructions since its last commit as a group."""
        self._groups.commit(warpgroups[:, 0])

    def wait_group(self, warpgroups: NDArray[np.intp], max_pending_groups: int) -> None:
        """Wait for all groups of warpgroups but the last `max_pending_groups`."""
        for ops in self._groups.wait(warpgroups[:, 0], max_pending_groups):
            self._mark(ops, is_pending=False)
        for ops in self._groups.pending:  # they may share chunks or registers with completed instructions
            self._mark(ops, is_pending=True)

    def _mark(self, ops: AsyncOps, *, is_pending: bool) -> None:
        (chunks,), (accumulators, elements) = ops.values, ops.context
        indices = ops.lanes % self._shared.threads.lanes_per_block // WARPGROUP_SIZE
        for index in np.unique(indices).tolist():
            self._shared.async_readers.mark_read(AsyncReader("wgmma", index), chunks[indices == index], is_pending)
        warps = (ops.lanes[:, None] // WARP_SIZE + np.arange(WARPGROUP_SIZE // WARP_SIZE)).reshape(-1)
        accumulators.in_flight[elements[:, None], warps] = is_pending
        accumulators.has_in_flight = is_pending or bool(accumulators.in_flight.any())


class BulkCopyGroups:
    """Pending bulk copies from shared memory of all threads."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared, self._groups = shared, CommitGroups(shared.threads.num_lanes)

    def issue(self, lanes: Lanes, chunks: NDArray[np.int64]) -> None:
        """Issue a copy of each lane that reads its row of chunks."""
        self._mark(self._groups.issue(lanes, chunks), is_pending=True)

    def commit_group(self, lanes: Lanes) -> None:
        """Commit each thread's copies since its last commit as a group."""
        self._groups.commit(lanes)

    def wait_group(self, lanes: Lanes, max_pending_groups: int) -> None:
        """Wait for all groups of threads but the last `max_pending_groups`."""
        for ops in self._groups.wait(lanes, max_pending_groups):
            self._mark(ops, is_pending=False)
        for ops in self._groups.pending:  # they may share chunks with completed copies
            self._mark(ops, is_pending=True)

    def _mark(self, ops: AsyncOps, *, is_pending: bool) -> None:
        for lane, chunks in zip(ops.lanes.tolist(), ops.values[0], strict=True):
            reader = AsyncReader("bulk copy", lane % self._shared.threads.lanes_per_block)
            self._shared.async_readers.mark_read(reader, chunks, is_pending)
