"""Pending wgmma instructions and bulk copies to global memory, which read shared memory asynchronously.

Source: PTX ISA, "Async Proxy", "wgmma.wait_group" and "cp.async.bulk.wait_group".
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.memory.commit_groups import AsyncOps, CommitGroups
from tvmconv.emulator.memory.registers import AccumulatorRegisters, RegisterBuffer
from tvmconv.emulator.memory.shared_memory import AsyncReader, SharedMemory
from tvmconv.emulator.threads import Lanes
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE


class AsyncReadGroups:
    """Pending instructions of one kind in commit groups: wgmma of warpgroups, or bulk copies of threads.

    An instruction belongs to the lane that issues it, which is the first lane of a warpgroup.
    """

    def __init__(self, shared: SharedMemory, kind: Literal["wgmma", "bulk copy"]) -> None:
        self._shared, self._kind = shared, kind
        self._groups = CommitGroups(shared.threads.num_lanes)
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
        lanes: Lanes,
        chunks: NDArray[np.int64],
        accumulator_elements: tuple[AccumulatorRegisters, NDArray[np.intp]] | None = None,
    ) -> None:
        """Issue an instruction of each lane that reads its row of chunks; a wgmma writes elements of accumulators."""
        self._mark(self._groups.issue(lanes, chunks, context=accumulator_elements), is_pending=True)

    def commit_group(self, lanes: Lanes) -> None:
        """Commit each lane's instructions since its last commit as a group."""
        self._groups.commit(lanes)

    def wait_group(self, lanes: Lanes, max_pending_groups: int) -> None:
        """Wait for all groups of lanes but the last `max_pending_groups`."""
        for ops in self._groups.wait(lanes, max_pending_groups):
            self._mark(ops, is_pending=False)
        for ops in self._groups.pending:  # they may share chunks or registers with completed instructions
            self._mark(ops, is_pending=True)

    def _mark(self, ops: AsyncOps, *, is_pending: bool) -> None:
        (chunks,) = ops.values
        lanes_per_reader = WARPGROUP_SIZE if self._kind == "wgmma" else 1
        indices = ops.lanes % self._shared.threads.lanes_per_block // lanes_per_reader
        for index in np.unique(indices).tolist():
            self._shared.async_readers.mark_read(AsyncReader(self._kind, index), chunks[indices == index], is_pending)
        if ops.context is not None:
            accumulators, elements = ops.context
            warps = (ops.lanes[:, None] // WARP_SIZE + np.arange(WARPGROUP_SIZE // WARP_SIZE)).reshape(-1)
            accumulators.in_flight[elements[:, None], warps] = is_pending
            accumulators.has_in_flight = is_pending or bool(accumulators.in_flight.any())
