"""What one block's text does to shared and global memory, and its arithmetic: counted once for a kernel, whoever asks.

A kernel of instructions by name is executed for that, its middle block, which takes seconds where its loops are long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tvmconv.analysis.memory.bank_conflicts import BankConflictObserver, SharedAccess, count_shared_accesses
from tvmconv.analysis.memory.coalescing import GlobalAccess, SectorObserver, count_global_accesses, select_middle_block
from tvmconv.analysis.memory.traffic import BlockTraffic, TrafficObserver, count_traffic
from tvmconv.analysis.tir.scopes import has_instructions
from tvmconv.emulator.blocks import count_lanes, expand_to_clusters
from tvmconv.emulator.observation import run_with_observer
from tvmconv.emulator.observers import CompositeObserver

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.kernel import Kernel


@dataclass(frozen=True)
class BlockCounts:
    """What one block of a step does.

    Attributes:
        shared_accesses: its accesses to shared memory.
        global_accesses: its accesses to global memory.
        traffic: all of its operations. What TMA and wgmma access is not among them.
    """

    shared_accesses: list[SharedAccess]
    global_accesses: list[GlobalAccess]
    traffic: BlockTraffic


_COUNTS_CACHE: WeakKeyDictionary[Kernel, dict[str, BlockCounts]] = WeakKeyDictionary()  # steps by name


def count_block(kernel: Kernel, lowered_kernel: LoweredKernel) -> BlockCounts:
    """What a block of one of a kernel's steps does.

    Where indices are evaluated, shared accesses are those of the first block, global ones those of the middle one, and
    the arithmetic that of the busiest; where the kernel is executed, all are those of the middle one.

    Raises:
        AnalysisError: what the kernel does cannot be counted, or depends on the data.
    """
    counts_by_kernel = _COUNTS_CACHE.setdefault(kernel, {})
    if lowered_kernel.name not in counts_by_kernel:
        counts_by_kernel[lowered_kernel.name] = (
            _count_by_execution(kernel, lowered_kernel)
            if has_instructions(lowered_kernel.function)
            else _count_by_evaluation(kernel, lowered_kernel)
        )
    return counts_by_kernel[lowered_kernel.name]


def _count_by_evaluation(kernel: Kernel, lowered_kernel: LoweredKernel) -> BlockCounts:
    return BlockCounts(
        count_shared_accesses(kernel, lowered_kernel),
        count_global_accesses(kernel, lowered_kernel),
        count_traffic(kernel, lowered_kernel),
    )


def _count_by_execution(kernel: Kernel, lowered_kernel: LoweredKernel) -> BlockCounts:
    lanes_per_block = count_lanes(lowered_kernel)
    blocks = expand_to_clusters(lowered_kernel.launch, [select_middle_block(lowered_kernel)])
    bank_observer, sector_observer = BankConflictObserver(lanes_per_block), SectorObserver(lanes_per_block)
    traffic_observer = TrafficObserver(len(blocks), lanes_per_block, kernel.memory_scopes, wants_async_proxy=False)
    run_with_observer(
        lowered_kernel,
        kernel.memory_scopes,
        blocks,
        CompositeObserver(bank_observer, sector_observer, traffic_observer),
    )
    return BlockCounts(
        bank_observer.list_accesses(),
        sector_observer.list_accesses(),
        traffic_observer.select_busiest(lowered_kernel.launch.threads_per_block),
    )
