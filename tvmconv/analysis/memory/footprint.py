"""What of the arrays a block touches, and how many bytes that makes from the device's memory.

A block's footprint of an array is the set of its sectors that the block touches, each once however often it does. From
memory comes each array once, as long as what is touched between two reads of it fits the L2 cache. Where it does not,
an array that does not depend on an axis of the grid is read again for each step along this axis; blocks begin in the
order of x, then y, then z. That is reuse by stack distance (R. Mattson et al., "Evaluation techniques for storage
hierarchies", 1970) with blocks in place of accesses.

Kernels of instructions by name, and of TMA, have their addresses in registers: of them each array counts once; and so
it does where a thread has more iterations than can be looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.blocks import Block
from tvmconv.analysis.lowered.accesses import Access, accesses
from tvmconv.analysis.lowered.tir import executions, has_instructions
from tvmconv.analysis.memory.coalescing import GLOBAL, SECTOR_BYTES
from tvmconv.arithmetic import ceil_div
from tvmconv.errors import AnalysisError
from tvmconv.gpu import l2_bytes

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel


KINDS = ("load", "store")


@dataclass
class Footprint:
    """What a block touches of an array, in one way.

    Attributes:
        nbytes: of the whole array.
        sectors: which of its sectors the middle block of the grid touches.
        moves: along which axes of the grid another block touches others.
    """

    nbytes: int
    sectors: NDArray[np.bool_]
    moves: list[bool] = field(default_factory=lambda: [False] * 3)

    @property
    def count(self) -> int:
        """Sectors that the block touches."""
        return int(self.sectors.sum())


Footprints = dict[tuple[str, str], Footprint]  # by kind of access and array


_known: WeakKeyDictionary[Kernel, dict[str, Footprints | None]] = WeakKeyDictionary()  # steps by name


def footprints(kernel: Kernel, step: LoweredStep) -> Footprints | None:
    """What the middle block of a grid touches; None where the text alone does not tell."""
    known = _known.setdefault(kernel, {})
    if step.name not in known:
        try:
            known[step.name] = None if has_instructions(step.function) else _evaluated(kernel, step)
        except AnalysisError:
            known[step.name] = None
    return known[step.name]


def _evaluated(kernel: Kernel, step: LoweredStep) -> Footprints:
    def is_global(buffer: Any) -> bool:
        return str(buffer.scope()) == GLOBAL and kernel.spaces.get(str(buffer.name), GLOBAL) == GLOBAL

    found = list(accesses(step.function, is_global))
    middle = tuple(extent // 2 for extent in step.launch.grid)
    touched = _touched(found, step, middle)  # type: ignore[arg-type]
    for axis, extent in enumerate(step.launch.grid):
        if extent > 1:
            beside = tuple(place - 1 if axis == own else place for own, place in enumerate(middle))
            others = _touched(found, step, beside)  # type: ignore[arg-type]
            for key, footprint in touched.items():
                footprint.moves[axis] = not np.array_equal(footprint.sectors, others[key].sectors)
    return touched


def dram_bytes(kernel: Kernel) -> int:
    """Bytes from and to the device's memory, of the timed steps of a kernel that finds none of its arrays in L2."""
    capacity = l2_bytes(str(kernel.device.arch))
    return sum(step_bytes(kernel, step, footprints(kernel, step), capacity) for step in kernel.timed_steps)


def step_bytes(kernel: Kernel, step: LoweredStep, touched: Footprints | None, capacity: int) -> int:
    """Bytes from and to the device's memory of one step; see `dram_bytes`."""
    if touched is None:
        return kernel.workload.min_bytes if step is kernel.timed_steps[0] else 0
    return sum(moved_bytes(step, touched, capacity).values())


def moved_bytes(step: LoweredStep, touched: Footprints, capacity: int) -> dict[str, int]:
    """Bytes from the device's memory, as `load`, and to it, as `store`, of one step, by what a block touches."""
    swept = {key: float(each.count * SECTOR_BYTES) for key, each in touched.items()}
    again = dict.fromkeys(touched, 1)
    for axis, extent in enumerate(step.launch.grid):
        fits = sum(swept.values()) <= capacity
        for key, each in touched.items():
            if each.moves[axis]:
                swept[key] = min(each.nbytes, swept[key] * extent)
            elif not fits:
                again[key] *= extent
    return {kind: round(sum(again[key] * swept[key] for key in touched if key[0] == kind)) for kind in KINDS}


def _touched(found: list[Access], step: LoweredStep, block: Block) -> Footprints:
    made: Footprints = {}
    for access in found:
        key = access.kind, str(access.buffer.name)
        if key not in made:
            nbytes = math.prod(int(extent) for extent in access.buffer.shape) * access.itemsize
            made[key] = Footprint(nbytes, np.zeros(ceil_div(nbytes, SECTOR_BYTES) + 1, bool))
        for executed in executions(access.scope, [access.index], step.launch, block):
            first = executed.values[0][executed.active] * access.itemsize
            for byte in range(0, access.nbytes, SECTOR_BYTES):
                made[key].sectors[(first + byte) // SECTOR_BYTES] = True
            made[key].sectors[(first + access.nbytes - 1) // SECTOR_BYTES] = True
    return made
