"""Circular buffers of stages in shared memory, which a producer fills and consumers read.

Sources: PTX ISA, "mbarrier", "cp.async"; CUTLASS, `include/cutlass/pipeline/sm90_pipeline.hpp` and
`python/CuTeDSL/cutlass/pipeline/sm90.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARPGROUP_SIZE

from ....tir_builder import Expr, Register, emit_call, emit_ptx, if_, serial_loop, to_uint32
from .atoms import ThreadPosition, named_barrier_sync
from .tile_scheduler import SINGLE_CTA, Cluster

BARRIER_BYTES = 8  # bytes of an mbarrier


class PipelineState:
    """Position of a thread in a circular buffer: a stage, and a phase bit that flips at each wrap-around.

    Args:
        name: Prefix of the names of its registers.
        stages: Number of stages.
    """

    def __init__(self, name: str, stages: int) -> None:
        self._stages = stages
        self._index, self._phase = Register(f"{name}_stage", value=0), Register(f"{name}_phase", value=0)

    @property
    def index(self) -> Expr:
        """Index of the stage."""
        return self._index.value

    @property
    def previous_index(self) -> Expr:
        """Index of the stage before."""
        return T.Select(self.index == 0, self._stages - 1, self.index - 1)

    def index_before(self, distance: int) -> Expr:
        """Return the index of an earlier stage; the distance is at most the number of stages."""
        if distance == 1:
            return self.previous_index
        return T.Select(self.index < distance, self.index + (self._stages - distance), self.index - distance)

    @property
    def phase(self) -> Expr:
        """Phase bit of the stage's barriers."""
        return self._phase.value

    def advance(self) -> None:
        """Move to the next stage."""
        self._index.set(self.index + 1)
        with if_(self.index == self._stages):
            self._index.set(0)
            self._phase.set(self.phase ^ 1)

    def skip(self, count: Expr) -> None:
        """Move on by `count` stages, which another warpgroup reads."""
        if not isinstance(count, int):
            self._index.set(self.index + count)
            self._phase.set(self.phase ^ (self.index // self._stages % 2))
            self._index.set(self.index % self._stages)
            return
        wraps, steps = divmod(count, self._stages)
        if wraps % 2:
            self._phase.set(self.phase ^ 1)
        if steps:
            self._index.set(self.index + steps)
            with if_(self.index >= self._stages):
                self._index.set(self.index - self._stages)
                self._phase.set(self.phase ^ 1)


@dataclass(frozen=True)
class TmaPipeline:
    """Stages that TMA fills (cutlass::PipelineTmaAsync).

    A phase of a stage's full barrier completes with one arrival, by the producer, and `tx_bytes` bytes from TMA. A
    phase of its empty barrier completes with one arrival per consumer, of all CTAs into whose stages this CTA copies.
    The producer waits for the opposite phase bit: the phase before the first counts as complete, so that all stages
    are empty at the start.
    """

    buffers: Expr  # shared-memory address of the first stage
    stage_bytes: int  # bytes from one stage to the next
    barriers: Expr  # shared-memory address of the mbarriers of the CTA
    stages: int  # number of stages
    tx_bytes: int  # bytes that TMA writes to a stage
    num_consumers: int  # consumers per CTA
    cluster: Cluster = SINGLE_CTA  # CTAs that fill each other's stages
    first_barrier: int = 0  # index of this pipeline's first mbarrier: full barriers come first, then the empty ones

    def stage_address(self, index: Expr) -> Expr:
        """Return the shared-memory address of a stage."""
        return self.buffers + to_uint32(index * self.stage_bytes)

    def full_barrier(self, index: Expr) -> Expr:
        """Return the address of the barrier that signals that a stage is full."""
        return self.barriers + to_uint32((self.first_barrier + index) * BARRIER_BYTES)

    def empty_barrier(self, index: Expr) -> Expr:
        """Return the address of the barrier that signals that all consumers have read a stage."""
        return self.barriers + to_uint32((self.first_barrier + self.stages + index) * BARRIER_BYTES)

    def init_barriers(self) -> None:
        """Initialize the barriers; called by one thread before the CTAs synchronize."""
        num_arrivals = self.num_consumers * self.cluster.num_writers
        for stage in range(self.stages):
            emit_ptx("mbarrier.init.shared.b64", self.full_barrier(stage), T.uint32(1))
            emit_ptx("mbarrier.init.shared.b64", self.empty_barrier(stage), T.uint32(num_arrivals))

    def producer_acquire(self, index: Expr, phase: Expr) -> None:
        """Wait until a stage is empty, and arrive at its full barrier with the number of bytes that will come."""
        emit_call(T.cuda.mbarrier_wait(self.empty_barrier(index), phase ^ 1))
        self.producer_expect(index)

    def producer_expect(self, index: Expr) -> None:
        """Arrive at the full barrier of a stage with the number of bytes that TMA will write; run by one thread."""
        emit_ptx("mbarrier.arrive.expect_tx.shared.b64", self.full_barrier(index), T.uint32(self.tx_bytes))

    def consumer_wait(self, index: Expr, phase: Expr) -> None:
        """Wait until a stage is full."""
        emit_call(T.cuda.mbarrier_wait(self.full_barrier(index), phase))

    def consumer_arrive(self, index: Expr) -> None:
        """Arrive at the empty barrier of a stage of this CTA; run by one thread."""
        emit_ptx("mbarrier.arrive.shared.b64", self.empty_barrier(index), T.uint32(1))

    def warp_release(self, index: Expr, thread: ThreadPosition) -> None:
        """Arrive at the empty barrier of a stage of this CTA; run by all threads of a warp, which is one consumer."""
        emit_call(T.cuda.warp_sync())
        with if_(thread.lane == 0):
            self.consumer_arrive(index)

    def consumer_release(self, index: Expr, thread: ThreadPosition) -> None:
        """Arrive at the empty barrier of a stage, in all CTAs that copy into it; run by all threads of a warpgroup."""
        if self.cluster.size == 1:
            with if_(thread.is_warpgroup_leader):
                self.consumer_arrive(index)
            return
        remote_barrier = Register("remote_barrier", "uint32")
        for i, rank in enumerate(self.cluster.writer_ranks()):
            with if_(thread.warpgroup_thread == i):
                map_to_cta(remote_barrier, self.empty_barrier(index), rank)
                emit_call(T.ptx.mbarrier.arrive.shared__cluster.b64(remote_barrier.value))


@dataclass(frozen=True)
class AsyncPipeline(TmaPipeline):
    """Stages that threads fill by stores or cp.async to shared memory (cutlass::PipelineAsync).

    A phase of a stage's full barrier completes with one arrival of each of these threads, and one more by
    `producer_expect` if TMA also writes to the stage. A fence makes what they stored visible to wgmma. A producer that
    copies by cp.async leaves the fence to the consumers, because it would wait for the copies of all later stages.
    """

    num_producers: int = 1  # arrivals per stage
    fenced_by: str = "producer"  # or "consumer"; "none" if wgmma does not read stages

    def init_barriers(self) -> None:
        """Initialize the barriers; called by one thread before the CTAs synchronize."""
        num_releases = self.num_consumers * self.cluster.num_writers
        for stage in range(self.stages):
            emit_ptx("mbarrier.init.shared.b64", self.full_barrier(stage), T.uint32(self.num_producers))
            emit_ptx("mbarrier.init.shared.b64", self.empty_barrier(stage), T.uint32(num_releases))

    def producer_acquire(self, index: Expr, phase: Expr) -> None:
        """Wait until a stage is empty."""
        emit_call(T.cuda.mbarrier_wait(self.empty_barrier(index), phase ^ 1))

    def producer_commit(self, index: Expr) -> None:
        """Arrive at the full barrier of a stage; run by each thread that fills it."""
        if self.fenced_by == "producer":
            emit_call(T.ptx.fence.proxy.async_.shared__cta())
        emit_ptx("mbarrier.arrive.shared.b64", self.full_barrier(index), T.uint32(1))

    def consumer_wait(self, index: Expr, phase: Expr) -> None:
        """Wait until a stage is full; run by all threads that issue wgmma."""
        super().consumer_wait(index, phase)
        if self.fenced_by == "consumer":
            emit_call(T.ptx.fence.proxy.async_.shared__cta())


class OrderedSequenceBarrier:
    """Warpgroups take turns, warpgroup 0 first (cutlass::OrderedSequenceBarrier).

    Each warpgroup waits for a barrier of its own, at which the one before arrives when its turn ends. The phase before
    the first counts as complete, so warpgroup 0 starts with the opposite phase bit. The turns of mainloops also keep
    the phase bits of stages unambiguous: a warpgroup waits for a stage only after the others have seen all earlier
    stages full.

    Args:
        barriers: Shared-memory address of the mbarriers, one of each warpgroup.
        thread: Position of this thread.
        num_warpgroups: Number of warpgroups.
    """

    def __init__(self, barriers: Expr, thread: ThreadPosition, num_warpgroups: int) -> None:
        self._barriers, self._thread, self.num_warpgroups = barriers, thread, num_warpgroups
        self._phase = Register("turn_phase", value=T.Select(thread.warpgroup == 0, 1, 0))

    def init_barriers(self) -> None:
        """Initialize the barriers; called by one thread before the CTA synchronizes."""
        for warpgroup in range(self.num_warpgroups):
            emit_ptx("mbarrier.init.shared.b64", self._barrier(warpgroup), T.uint32(1))

    def wait(self) -> None:
        """Wait for this warpgroup's turn."""
        emit_call(T.cuda.mbarrier_wait(self._barrier(self._thread.warpgroup), self._phase.value))
        self._phase.set(self._phase.value ^ 1)

    def arrive(self) -> None:
        """End this warpgroup's turn."""
        with if_(self._thread.is_warpgroup_leader):
            next_warpgroup = (self._thread.warpgroup + 1) % self.num_warpgroups
            emit_ptx("mbarrier.arrive.shared.b64", self._barrier(next_warpgroup), T.uint32(1))

    def skip(self) -> None:
        """Take a turn without wgmma, which would keep the warps of the warpgroup together.

        All warps see the turn begin before it ends: two rounds of turns later, the phase bit is the same again.
        """
        self.wait()
        named_barrier_sync(1 + self._thread.warpgroup, WARPGROUP_SIZE)
        self.arrive()

    def _barrier(self, warpgroup: Expr) -> Expr:
        return self._barriers + to_uint32(warpgroup * BARRIER_BYTES)


def fence_barrier_init() -> None:
    """Make initialized barriers visible to TMA and the cluster; called before the CTAs synchronize."""
    emit_call(T.ptx.fence.mbarrier_init.release.cluster())


def sync_cluster_relaxed() -> None:
    """Wait for all threads of the cluster, without making their writes visible, which takes a fence of the GPU.

    It suffices after `fence_barrier_init`, and where threads have only read what others may now overwrite or free.
    Sources: PTX ISA, "barrier.cluster"; CUTLASS, `include/cute/arch/cluster_sm90.hpp`.
    """
    emit_ptx("barrier.cluster.arrive.relaxed.aligned")
    emit_ptx("barrier.cluster.wait.aligned")


def map_to_cta(mapped: Register, address: Expr, rank: Expr) -> None:
    """Set a register to an address in the shared memory of another CTA of the cluster."""
    emit_ptx("mapa.shared::cluster.u32", mapped.value, address, to_uint32(rank))


class CpAsyncPipeline:
    """Stages that all threads fill by cp.async, a number of K tiles ahead of the stage that they read.

    Args:
        stages: Number of stages.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self._read, self._write = Register("read_stage"), Register("write_stage")

    @property
    def prefetch_distance(self) -> int:
        """Number of K tiles that copies are ahead."""
        return self.stages - 1

    @property
    def read_index(self) -> Expr:
        """Index of the stage that is read."""
        return self._read.value

    @property
    def write_index(self) -> Expr:
        """Index of the stage that is filled."""
        return self._write.value

    def start(self) -> None:
        """Set the indices after the copies of the prologue."""
        self._read.set(0)
        self._write.set(self.stages - 1)

    def commit(self) -> None:
        """Commit the copies issued so far as one group, also if there are none."""
        emit_call(T.ptx.cp.async_.commit_group())

    def wait(self) -> None:
        """Wait for the next stage, and for all threads to have read the previous one."""
        emit_call(T.ptx.cp.async_.wait_group(self.stages - 2))
        emit_call(T.cuda.cta_sync())

    def drain(self) -> None:
        """Wait for all copies and all threads, after which other data may take the place of the stages."""
        emit_call(T.ptx.cp.async_.wait_group(0))
        emit_call(T.cuda.cta_sync())

    def fill(self, num_tiles: int, copy: Callable[[Expr, Expr], None]) -> None:
        """Start the copies of the first tiles; `copy` starts those of a tile to a stage."""
        for tile in range(self.prefetch_distance):
            if tile < num_tiles:
                copy(tile, tile)
            self.commit()
        self.start()

    def run(
        self,
        num_tiles: int,
        copy: Callable[[Expr, Expr], None],
        compute: Callable[[Expr], None],
        is_valid: Callable[[Expr], Expr],
    ) -> None:
        """Compute tiles in turn after `fill`, while the next ones are copied.

        Args:
            num_tiles: Tiles of a CTA.
            copy: Function that starts the copies of a tile to a stage.
            compute: Function that computes the tile in a stage.
            is_valid: Function that returns whether the CTA has a tile.
        """
        with serial_loop(num_tiles, "iteration") as tile:
            self.wait()
            ahead = tile + self.prefetch_distance
            with if_(ahead < num_tiles):
                copy(ahead, self.write_index)
            self.commit()
            self.advance_write()
            with if_(is_valid(tile)):
                compute(self.read_index)
            self.advance_read()
        self.drain()

    def advance_read(self) -> None:
        """Move to the next stage to read."""
        self._advance(self._read)

    def advance_write(self) -> None:
        """Move to the next stage to fill."""
        self._advance(self._write)

    def _advance(self, index: Register) -> None:
        index.set(T.Select(index.value == self.stages - 1, 0, index.value + 1))
