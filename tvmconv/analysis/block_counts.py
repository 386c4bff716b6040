"""Counts of one block's memory accesses and arithmetic, taken from a kernel's TIR and cached per kernel.

The emulator executes the middle block if the kernel uses GPU instructions by name, which takes seconds for long loops.
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
    """Memory accesses and arithmetic of one block of a device kernel.

    Attributes:
        shared_accesses: Accesses to shared memory.
        global_accesses: Accesses to global memory.
        traffic: Bytes and operations of the block without the accesses of TMA and wgmma.
    """

    shared_accesses: list[SharedAccess]
    global_accesses: list[GlobalAccess]
    traffic: BlockTraffic


_COUNTS_CACHE: WeakKeyDictionary[Kernel, dict[str, BlockCounts]] = WeakKeyDictionary()  # by device kernel's name


def count_block(kernel: Kernel, lowered_kernel: LoweredKernel) -> BlockCounts:
    """Count the memory accesses and arithmetic of a block of one of a kernel's device kernels.

    If indices are evaluated, the shared accesses are those of the first block, the global ones those of the middle
    block, and the arithmetic that of the busiest block. If the kernel is emulated, all are those of the middle block.

    Args:
        kernel: A built kernel for any target.
        lowered_kernel: One of `kernel.kernels`.

    Returns:
        The counts, cached per kernel.

    Raises:
        AnalysisError: The accesses cannot be counted, or they depend on the data.
    """
    cache = _COUNTS_CACHE.setdefault(kernel, {})
    if lowered_kernel.name not in cache:
        if has_instructions(lowered_kernel.function):
            cache[lowered_kernel.name] = _count_by_execution(kernel, lowered_kernel)
        else:
            cache[lowered_kernel.name] = BlockCounts(
                count_shared_accesses(kernel, lowered_kernel),
                count_global_accesses(kernel, lowered_kernel),
                count_traffic(kernel, lowered_kernel),
            )
    return cache[lowered_kernel.name]


def _count_by_execution(kernel: Kernel, lowered_kernel: LoweredKernel) -> BlockCounts:
    lanes_per_block = count_lanes(lowered_kernel)
    blocks = expand_to_clusters(lowered_kernel.launch, [select_middle_block(lowered_kernel)])
    bank_observer, sector_observer = BankConflictObserver(lanes_per_block), SectorObserver(lanes_per_block)
    traffic_observer = TrafficObserver(len(blocks), lanes_per_block, kernel.memory_scopes, wants_async_proxy=False)
    observer = CompositeObserver(bank_observer, sector_observer, traffic_observer)
    run_with_observer(lowered_kernel, kernel.memory_scopes, blocks, observer)
    return BlockCounts(
        bank_observer.list_accesses(),
        sector_observer.list_accesses(),
        traffic_observer.select_busiest(lowered_kernel.launch.threads_per_block),
    )
