"""mbarriers: objects in shared memory at which threads arrive, and on whose phases they wait.

A phase is complete when so many arrivals as the barrier was made for have come, and all the bytes that it was told to
expect. Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.addresses import SHARED_BASE_ADDRESS
from tvmconv.emulator.errors import ExecutionError, RaceError
from tvmconv.emulator.memory.arrays import check_aligned
from tvmconv.emulator.memory.vector_clocks import GENERIC_PROXY

if TYPE_CHECKING:
    from tvmconv.emulator.memory.shared_memory import MemoryAddress, SharedMemory
    from tvmconv.emulator.synchronization.fibers import WaitCondition
    from tvmconv.emulator.threads import EmulatedThreads, Lanes

MBARRIER_BYTES = 8
MAX_ARRIVALS, MAX_TX_COUNT = (1 << 20) - 1, (1 << 20) - 1


@dataclass
class Mbarrier:
    """One mbarrier.

    Attributes:
        name: in messages.
        block: in whose shared memory it lies.
        num_expected_arrivals: of arrivals in a phase.
        writer_agent: who writes for it: what copies that it waits for have written.
        init_lane: the lane that has made it, and when.
        init_time: when.
        is_fenced: whether others than its block's threads can see that.
        phase: how many are complete.
        pending_arrivals: arrivals that this phase lacks.
        tx_count: bytes that it lacks; negative where they came before it was told.
        copies_in_flight: copies of it that have not landed.
        arrival_clock: what those who have arrived in this phase know.
        phase_clock: what those of the last complete phase knew.
        last_copy_time: when its last copy has landed.
    """

    name: str
    block: int
    num_expected_arrivals: int
    writer_agent: int
    init_lane: int
    init_time: int
    arrival_clock: NDArray[np.int32]
    phase_clock: NDArray[np.int32]
    is_fenced: bool = False
    phase: int = 0
    pending_arrivals: int = 0
    tx_count: int = 0
    copies_in_flight: int = 0
    last_copy_time: int = 0

    def __str__(self) -> str:
        missing_parts = (
            [f"{self.pending_arrivals} of {self.num_expected_arrivals} arrivals"] if self.pending_arrivals else []
        )
        missing_parts += [f"{self.tx_count} bytes"] if self.tx_count else []
        return f"{self.name}, whose phase {self.phase} lacks {' and '.join(missing_parts)}"


@dataclass
class _MbarrierWait:
    """Lanes that wait for a phase, by its parity, of some barriers."""

    threads: EmulatedThreads
    phase_waits: list[tuple[Mbarrier, int, Lanes]]

    def is_ready(self) -> bool:
        """Whether all phases are complete."""
        return all(barrier.phase & 1 != parity for barrier, parity, _ in self.phase_waits)

    def __str__(self) -> str:
        return "; ".join(
            f"{self.threads.describe_lanes(lanes)} at {barrier}"
            for barrier, parity, lanes in self.phase_waits
            if barrier.phase & 1 == parity
        )


@dataclass
class MbarrierTable:
    """The mbarriers of all blocks.

    Attributes:
        shared: the memory that they are in.
    """

    shared: SharedMemory
    _mbarriers: dict[tuple[int, int], Mbarrier] = field(default_factory=dict)
    _agents: dict[tuple[int, int], int] = field(default_factory=dict)  # by rank in the cluster and address

    def initialize(self, location: MemoryAddress, lanes: Lanes, arrival_counts: NDArray[Any]) -> None:
        """mbarrier.init."""
        shared = self.shared
        check_aligned(location.byte_offsets, MBARRIER_BYTES, "shared memory")
        for block, byte_offset in zip(
            (lanes // shared.threads.lanes_per_block).tolist(), location.byte_offsets.tolist(), strict=True
        ):
            if (block, byte_offset) in self._mbarriers:
                raise ExecutionError(
                    f"{self._mbarriers[block, byte_offset].name} is made again with no mbarrier.inval between"
                )
        shared.reserve_mbarrier(shared.find_units(location.byte_offsets, lanes, MBARRIER_BYTES), lanes)
        for lane, byte_offset, num_arrivals in zip(
            lanes.tolist(), location.byte_offsets.tolist(), arrival_counts.tolist(), strict=True
        ):
            if not 1 <= num_arrivals <= MAX_ARRIVALS:
                raise ExecutionError(f"an mbarrier of {num_arrivals} arrivals")
            block = lane // shared.threads.lanes_per_block
            writer_agent = self._agents.setdefault((block % shared.threads.cluster_size, byte_offset), -1)
            if writer_agent < 0:
                writer_agent = self._agents[block % shared.threads.cluster_size, byte_offset] = (
                    shared.clocks.add_agent()
                )
            clock = shared.clocks.make_empty_clock()
            name = (
                f"the mbarrier at byte {byte_offset - SHARED_BASE_ADDRESS} of shared memory of "
                f"block {shared.threads.describe_block(block)}"
            )
            init_time = shared.clocks.time
            self._mbarriers[block, byte_offset] = Mbarrier(
                name,
                block,
                num_arrivals,
                writer_agent,
                lane,
                init_time,
                clock,
                clock.copy(),
                pending_arrivals=num_arrivals,
            )

    def invalidate(self, location: MemoryAddress, lanes: Lanes) -> None:
        """mbarrier.inval."""
        for barrier, lane in zip(self.find_mbarriers(location, lanes), lanes.tolist(), strict=True):
            table_key = next(key for key, value in self._mbarriers.items() if value is barrier)
            del self._mbarriers[table_key]
            lane_array = np.array([lane])
            self.shared.free_mbarrier(
                self.shared.find_units(np.array([table_key[1]]), lane_array, MBARRIER_BYTES), lane_array
            )

    def fence_init(self, lanes: Lanes) -> None:
        """What lanes have made can be seen by other blocks, and by the async proxy."""
        fencing_lanes = set(lanes.tolist())
        for barrier in self._mbarriers.values():
            barrier.is_fenced |= barrier.init_lane in fencing_lanes

    def find_mbarriers(self, location: MemoryAddress, lanes: Lanes, *, is_async_proxy: bool = False) -> list[Mbarrier]:
        """The barriers at addresses.

        Raises:
            ExecutionError: there is none.
            RaceError: the lane that uses it does not know that it has been made, or who does cannot see it.
        """
        shared = self.shared
        blocks = lanes // shared.threads.lanes_per_block if location.target_blocks is None else location.target_blocks
        mbarriers = []
        for lane, block, byte_offset in zip(
            lanes.tolist(), blocks.tolist(), location.byte_offsets.tolist(), strict=True
        ):
            barrier = self._mbarriers.get((block, byte_offset))
            thread_name = shared.threads.describe_lane(lane)
            if barrier is None:
                raise ExecutionError(
                    f"{thread_name}: no mbarrier at byte {byte_offset - SHARED_BASE_ADDRESS} of shared memory of block "
                    f"{shared.threads.describe_block(block)}"
                )
            known_time = shared.clocks.read_times(np.array(lane), np.array(barrier.init_lane))
            if lane != barrier.init_lane and barrier.init_time >= known_time:
                raise RaceError(f"race: {thread_name} uses {barrier.name} with no barrier behind its mbarrier.init")
            is_remote = block != lane // shared.threads.lanes_per_block
            if (is_async_proxy or is_remote) and not barrier.is_fenced:
                raise RaceError(
                    f"race: {thread_name} uses {barrier.name} with no fence.mbarrier_init behind its mbarrier.init"
                )
            if is_remote and not is_async_proxy:
                shared.note_remote_access(np.array([block]), np.array([lane]))
            mbarriers.append(barrier)
        return mbarriers

    def arrive(self, barrier: Mbarrier, lane: int, num_arrivals: int, nbytes: int = 0) -> None:
        """Arrive so often, behind a word on how many bytes more to expect."""
        if num_arrivals > barrier.pending_arrivals:
            raise ExecutionError(
                f"{self.shared.threads.describe_lane(lane)} arrives at {barrier.name}, where phase "
                f"{barrier.phase} has had "
                f"all of its {barrier.num_expected_arrivals} arrivals"
            )
        self.expect_tx(barrier, nbytes)
        self.shared.apply_logged_reads()
        clocks = self.shared.clocks
        barrier.arrival_clock = clocks.join(barrier.arrival_clock, clocks.release(np.array([lane])))
        barrier.pending_arrivals -= num_arrivals
        self._complete_phase(barrier)

    def expect_tx(self, barrier: Mbarrier, nbytes: int) -> None:
        """Expect so many bytes more; what is negative has come."""
        barrier.tx_count += nbytes
        if abs(barrier.tx_count) > MAX_TX_COUNT:
            raise ExecutionError(f"{barrier.name} expects {barrier.tx_count} bytes at a time")

    def complete_tx(self, barrier: Mbarrier, nbytes: int) -> None:
        """So many bytes have been written for it."""
        self.expect_tx(barrier, -nbytes)
        barrier.copies_in_flight -= 1
        clocks = self.shared.clocks
        barrier.last_copy_time = clocks.time
        clock = clocks.make_empty_clock()
        clock[GENERIC_PROXY, clocks.find_columns(barrier.writer_agent)] = clocks.advance_time()
        barrier.arrival_clock = clocks.join(barrier.arrival_clock, clock)
        self._complete_phase(barrier)

    def _complete_phase(self, barrier: Mbarrier) -> None:
        if barrier.pending_arrivals or barrier.tx_count:
            return
        if barrier.copies_in_flight:
            raise RaceError(
                f"race: phase {barrier.phase} of {barrier.name} is complete while copies for it are under way: it was "
                "told to expect too few bytes"
            )
        barrier.phase_clock, barrier.arrival_clock = barrier.arrival_clock, self.shared.clocks.make_empty_clock()
        barrier.phase += 1
        barrier.pending_arrivals = barrier.num_expected_arrivals

    def wait_parity(self, location: MemoryAddress, lanes: Lanes, parities: NDArray[Any]) -> Iterator[WaitCondition]:
        """Wait until the phase of a parity is complete, and know what those who have arrived in it did."""
        keys = (lanes // self.shared.threads.lanes_per_block << 25 | location.byte_offsets) << 1 | parities & 1
        _, first_indices, inverse = np.unique(keys, return_index=True, return_inverse=True)
        target_blocks = None if location.target_blocks is None else location.target_blocks[first_indices]
        barriers = self.find_mbarriers(
            replace(location, byte_offsets=location.byte_offsets[first_indices], target_blocks=target_blocks),
            lanes[first_indices],
        )
        phase_waits = [
            (barrier, int(parities[first_index]) & 1, lanes[inverse == number])
            for number, (barrier, first_index) in enumerate(zip(barriers, first_indices.tolist(), strict=True))
        ]
        wait = _MbarrierWait(self.shared.threads, phase_waits)
        if not wait.is_ready():
            yield wait
        self.shared.apply_logged_reads()
        for barrier, _, waiting_lanes in phase_waits:
            self.shared.clocks.acquire(waiting_lanes, barrier.phase_clock)

    def check_block_exit(self) -> None:
        """Raise RaceError if a block ends that has not waited for its copies."""
        clocks, padded = self.shared.clocks, self.shared.threads.lanes_per_block
        for barrier in self._mbarriers.values():
            known_time = clocks.merge_lanes(barrier.block * padded + np.arange(padded))[
                GENERIC_PROXY, clocks.find_columns(barrier.writer_agent)
            ]
            if barrier.copies_in_flight or barrier.last_copy_time >= max(int(known_time), 1):
                raise RaceError(f"a block ends that has not waited for what is copied: for {barrier.name}")
