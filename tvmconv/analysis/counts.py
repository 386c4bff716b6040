"""What one block's text does to shared and global memory, and its arithmetic: counted once for a kernel, whoever asks.

A kernel of instructions by name is executed for that, its middle block, which takes seconds where its loops are long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tvmconv.analysis.emulation.blocks import lanes_of, with_clusters
from tvmconv.analysis.emulation.observe import observe
from tvmconv.analysis.emulation.watch import Several
from tvmconv.analysis.lowered.tir import has_instructions
from tvmconv.analysis.memory.banks import BankWatch, SharedAccess, shared_accesses
from tvmconv.analysis.memory.coalescing import GlobalAccess, SectorWatch, global_accesses, middle_block
from tvmconv.analysis.memory.traffic import Traffic, TrafficWatch, traffic

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel


@dataclass(frozen=True)
class Counts:
    """What one block of a step does.

    Attributes:
        shared: its accesses to shared memory.
        touched: its accesses to global memory.
        done: all of its operations. What TMA and wgmma access is not among them.
    """

    shared: list[SharedAccess]
    touched: list[GlobalAccess]
    done: Traffic


_counted: WeakKeyDictionary[Kernel, dict[str, Counts]] = WeakKeyDictionary()  # steps by name


def counts(kernel: Kernel, step: LoweredStep) -> Counts:
    """What a block of one of a kernel's steps does.

    Where indices are evaluated, shared accesses are those of the first block, global ones those of the middle one, and
    the arithmetic that of the busiest; where the kernel is executed, all are those of the middle one.

    Raises:
        AnalysisError: what the kernel does cannot be counted, or depends on the data.
    """
    known = _counted.setdefault(kernel, {})
    if step.name not in known:
        known[step.name] = _executed(kernel, step) if has_instructions(step.function) else _evaluated(kernel, step)
    return known[step.name]


def _evaluated(kernel: Kernel, step: LoweredStep) -> Counts:
    return Counts(shared_accesses(kernel, step), global_accesses(kernel, step), traffic(kernel, step))


def _executed(kernel: Kernel, step: LoweredStep) -> Counts:
    lanes = lanes_of(step)
    blocks = with_clusters(step.launch, [middle_block(step)])
    banks, sectors = BankWatch(lanes), SectorWatch(lanes)
    done = TrafficWatch(len(blocks), lanes, kernel.spaces, wants_bulk=False)
    observe(step, kernel.spaces, blocks, Several(banks, sectors, done))
    return Counts(banks.accesses(), sectors.accesses(), done.busiest(step.launch.threads))
