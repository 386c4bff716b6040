"""Synchronization instructions: mbarriers, barriers of blocks and clusters, and fences.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tvmconv.emulator.instructions.operands import Instruction, executes
from tvmconv.emulator.state import Mask
from tvmconv.emulator.synchronization.barriers import CLUSTER_BARRIER
from tvmconv.emulator.synchronization.fibers import WaitCondition
from tvmconv.target import WARPGROUP_SIZE


@executes("fence", "setmaxnreg", "griddepcontrol", "prefetch", "cp_async_bulk_prefetch")
@executes("cp_async_bulk_tensor_prefetch", "cp_async_bulk_tensor_prefetch_im2col")
def _do_nothing(op: Instruction, mask: Mask) -> None:
    """Hints, and fences that lock step makes superfluous."""


# --- mbarriers ---


@executes("mbarrier_init")
def _init(op: Instruction, mask: Mask) -> None:
    op.state.mbarriers.initialize(op.address(0, mask), op.state.find_lanes(mask), op.values(1, mask))


@executes("mbarrier_inval")
def _invalidate(op: Instruction, mask: Mask) -> None:
    op.state.mbarriers.invalidate(op.address(0, mask), op.state.find_lanes(mask))


@executes("mbarrier_arrive", "mbarrier_arrive_nocount", "mbarrier_arrive_expect_tx", "mbarrier_expect_tx")
def _arrive(op: Instruction, mask: Mask) -> None:
    """mbarrier.arrive address{, count}, mbarrier.{arrive.}expect_tx address, bytes; mapa makes remote addresses."""
    lanes, barriers = op.state.find_lanes(mask), op.state.mbarriers
    numbers = op.values(1, mask).tolist() if op.num_operands > 1 else [1] * len(lanes)
    mbarriers = barriers.find_mbarriers(op.address(0, mask), lanes)
    for mbarrier, lane, number in zip(mbarriers, lanes.tolist(), numbers, strict=True):
        match op.call.name:
            case "mbarrier_expect_tx":
                barriers.expect_tx(mbarrier, number)
            case "mbarrier_arrive_expect_tx":
                barriers.arrive(mbarrier, lane, 1, number)
            case _:
                barriers.arrive(mbarrier, lane, number)


@executes("mbarrier_try_wait_parity", "mbarrier_try_wait_parity_no_hint")
def _try_wait(op: Instruction, mask: Mask) -> Iterator[WaitCondition]:
    """mbarrier.try_wait.parity done, address, parity: waits without a time limit."""
    lanes = op.state.find_lanes(mask)
    yield from op.state.mbarriers.wait_parity(op.address(1, mask), lanes, op.values(2, mask))
    op.write(mask, np.ones((len(lanes), 1), np.uint8), depends_on_memory=False)


def wait(op: Instruction, mask: Mask) -> Iterator[WaitCondition]:
    """TVM's helper that waits for the phase of a parity, with operands (address, parity)."""
    yield from op.state.mbarriers.wait_parity(op.address(0, mask), op.state.find_lanes(mask), op.values(1, mask))


@executes("fence_mbarrier_init")
def _fence_init(op: Instruction, mask: Mask) -> None:
    op.state.mbarriers.fence_init(op.state.find_lanes(mask))


@executes("fence_proxy")
def _fence_proxy(op: Instruction, mask: Mask) -> None:
    """fence.proxy.async: makes earlier writes visible to TMA and wgmma."""
    if "async" not in op.modifiers:
        raise op.unsupported()
    lanes = op.state.find_lanes(mask)
    op.state.clocks.fence_async_proxy(lanes)
    op.state.mbarriers.fence_init(lanes)


# --- barriers ---


@executes("bar_sync", "bar_sync_count", "barrier_sync", "barrier_sync_count")
def _sync(op: Instruction, mask: Mask) -> Iterator[WaitCondition]:
    """bar.sync number{, threads}."""
    num_threads = op.uniform_value(1, mask) if op.num_operands > 1 else None
    yield from op.state.barriers.sync(op.state.find_lanes(mask), op.values(0, mask), num_threads)


@executes("bar_arrive", "barrier_arrive")
def _bar_arrive(op: Instruction, mask: Mask) -> None:
    """bar.arrive number, threads."""
    op.state.barriers.arrive(op.state.find_lanes(mask), op.values(0, mask), op.uniform_value(1, mask))


@executes("bar_warp_sync")
def sync_warp(op: Instruction, mask: Mask) -> None:
    """bar.warp.sync."""
    op.state.sync_warps(mask)


@executes("barrier_cluster_arrive")
def _cluster_arrive(op: Instruction, mask: Mask) -> None:
    op.state.barriers.arrive(op.state.find_lanes(mask), CLUSTER_BARRIER)


@executes("barrier_cluster_wait")
def _cluster_wait(op: Instruction, mask: Mask) -> Iterator[WaitCondition]:
    yield from op.state.barriers.wait_cluster(op.state.find_lanes(mask))


def sync_block(op: Instruction, mask: Mask) -> Iterator[WaitCondition]:
    """TVM's barrier of the block."""
    yield from op.state.barriers.sync(op.state.find_lanes(mask))


def sync_cluster(op: Instruction, mask: Mask) -> Iterator[WaitCondition]:
    """TVM's barrier of the cluster."""
    yield from op.state.barriers.sync(op.state.find_lanes(mask), CLUSTER_BARRIER)


def sync_warpgroup(op: Instruction, mask: Mask) -> Iterator[WaitCondition]:
    """TVM's barrier of a warpgroup, with the number of the barrier."""
    yield from op.state.barriers.sync(op.state.find_lanes(mask), op.uniform_value(0, mask), WARPGROUP_SIZE)
