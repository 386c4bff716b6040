"""How often a warp runs each instruction of a step, by its lowered TIR and its machine code (`trips`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tvmconv.analysis.lowered.operations import MULTIPLICATIONS, SHARED_STORES
from tvmconv.analysis.lowered.tir import statements
from tvmconv.analysis.machine_code.operations import code, instructions
from tvmconv.analysis.machine_code.trips import BARRIERS, LOADED, STAGED, STORED, find_trips
from tvmconv.analysis.machine_code.trips import MULTIPLICATIONS as MULTIPLIED
from tvmconv.analysis.memory.coalescing import GlobalAccess, global_accesses
from tvmconv.analysis.memory.traffic import Traffic, traffic
from tvmconv.compiler.barriers import BARRIER
from tvmconv.gpu import WARP

if TYPE_CHECKING:
    from tvmconv.compiler.listing import Instruction, Listing
    from tvmconv.compiler.lower import LoweredStep
    from tvmconv.kernel import Kernel

_BARRIERS = (BARRIER, "tirx.cuda.cta_sync")
_done: WeakKeyDictionary[Kernel, dict[str, tuple[Traffic, list[GlobalAccess]]]] = WeakKeyDictionary()


def done_and_touched(kernel: Kernel, step: LoweredStep) -> tuple[Traffic, list[GlobalAccess]]:
    """What the busiest block of a step does, and what the middle one touches of global memory; found once.

    Raises:
        AnalysisError: that cannot be told.
    """
    known = _done.setdefault(kernel, {})
    if step.name not in known:
        known[step.name] = traffic(kernel, step), global_accesses(kernel, step)
    return known[step.name]


def runs(kernel: Kernel, step: LoweredStep, listing: Listing) -> dict[Instruction, float]:
    """How often a warp runs each instruction of a step.

    Raises:
        AnalysisError: what the step does cannot be told.
    """
    body = code(listing)
    find_trips(body, of_a_thread(step, *done_and_touched(kernel, step)))
    real = (each for each in listing if each.opcode != "NOP")
    return {
        each: math.prod(loop.trips for loop in around)
        for each, (_, around) in zip(real, instructions(body), strict=True)
    }


def of_a_thread(step: LoweredStep, done: Traffic, touched: Sequence[GlobalAccess]) -> Mapping[str, float]:
    """What a thread does by the lowered TIR, as `find_trips` takes it.

    Args:
        step: of a kernel.
        done: what its busiest block does.
        touched: its global accesses in one block.
    """
    threads = step.launch.threads
    moved = {
        kind: sum(each.requests * each.nbytes for each in touched if each.kind == kind) for kind in ("load", "store")
    }
    warps = -(-threads // WARP)
    return {
        MULTIPLIED: done.counts[MULTIPLICATIONS].elements / threads,
        BARRIERS: _barriers(step),
        LOADED: moved["load"] / warps,
        STORED: moved["store"] / warps,
        STAGED: done.counts[SHARED_STORES].bytes / threads,
    }


def _barriers(step: LoweredStep) -> int:
    """How many barriers a thread meets."""
    return sum(
        math.prod(extent for _, _, extent in scope.loops)
        for statement, scope in statements(step.function)
        if type(statement).__name__ == "Evaluate" and str(getattr(statement.value.op, "name", "")) in _BARRIERS
    )
