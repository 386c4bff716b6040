"""How tiles lie in shared memory that TMA and wgmma access: which swizzle each has, and whether both agree on it.

TMA and wgmma move chunks of 16 bytes, 8 rows of which wgmma reads together (a core matrix). Of rows that lie 32, 64 or
128 bytes apart these would be in the same banks; the swizzle of that many bytes spreads them. Source: PTX ISA,
"Swizzling modes" of tensors, and "Shared Memory Matrix Layouts" of wgmma. How the hardware serves them is not
documented: counted are the wavefronts that the banks would take for 8 chunks at a time, as `ldmatrix` does.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.addresses import CHUNK, SHARED_BASE
from tvmconv.analysis.emulation.blocks import lanes_of, with_clusters
from tvmconv.analysis.emulation.observe import observe
from tvmconv.analysis.emulation.watch import Accessed, EnoughError, Watch
from tvmconv.analysis.memory.coalescing import middle_block
from tvmconv.gpu import BANK_BYTES, BANKS, WARPGROUP

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel

ROWS = 8  # of a core matrix
FEW = 64  # accesses of one place that are looked at: more than any pipeline has stages


@dataclass
class Tile:
    """Shared memory that TMA copies an array to, or from.

    Attributes:
        array: its name.
        kind: load or store, of the array.
        swizzle: of TMA, in bytes; 0 for none.
        read_with: the swizzles that wgmma takes it to have; none where it does not read it.
        matrices: core matrices that were looked at.
        wavefronts: that they take.
    """

    array: str
    kind: str
    swizzle: int
    read_with: set[int] = field(default_factory=set)
    matrices: int = 0
    wavefronts: int = 0

    @property
    def agrees(self) -> bool:
        """Whether what reads it takes it to lie as it does."""
        return self.read_with <= {self.swizzle}


def tiles(kernel: Kernel, step: LoweredStep) -> list[Tile]:
    """The tiles that TMA copies in one block of a step, loads first; none where it copies none.

    The block is executed until each access in its loops has been looked at often enough.

    Raises:
        AnalysisError: the step does what cannot be executed.
    """
    if not step.tensor_maps:
        return []
    watch = SwizzleWatch(lanes_of(step))
    with contextlib.suppress(EnoughError):
        observe(step, kernel.spaces, with_clusters(step.launch, [middle_block(step)]), watch)
    found = watch.tiles()
    output = len(kernel.program.arrays) - 1  # is stored behind the loops
    stored = {
        (name, "store", parameter.tensor_map.swizzle)
        for parameter in step.parameters
        if parameter.tensor_map and parameter.index == output
        for name in [list(kernel.spaces)[output]]
    }
    return found + [Tile(*key) for key in sorted(stored - {(each.array, each.kind, each.swizzle) for each in found})]


class SwizzleWatch(Watch):
    """Looks at the first accesses of TMA and wgmma to the shared memory of the first block that is executed.

    Args:
        lanes: of a block.
    """

    wants_bulk = at_once = True

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._asked: Counter[int] = Counter()
        self._site = 0
        self._ends: set[int] = set()  # where outputs are stored, behind the loops: that takes many steps to come by
        self._tiles: dict[tuple[str, str, int], Tile] = {}
        self._of_chunk: dict[int, Tile] = {}
        self._has_read = False

    def wants(self, site: int) -> bool:
        """The first ones of each place."""
        self._asked[site] += 1
        self._site = site
        often = (asked >= FEW for each, asked in self._asked.items() if each not in self._ends)
        if self._asked[site] > FEW and self._has_read and all(often):
            raise EnoughError
        return self._asked[site] <= FEW

    def bulk(self, found: Accessed) -> None:
        """Look at one."""
        own = found.of_first(self._lanes)
        if own is None or own.space != "shared":
            return
        if own.array:
            kind = "load" if own.kind == "store" else "store"
            key = own.array, kind, own.swizzle
            tile = self._tiles.setdefault(key, Tile(*key))
            if kind == "store":
                self._ends.add(self._site)
            else:
                self._of_chunk.update(dict.fromkeys(_chunks(own.addresses), tile))
            return
        group = own.addresses[own.lanes // WARPGROUP == own.lanes[0] // WARPGROUP]
        read = self._of_chunk.get(_chunks(group[:1])[0])
        if read:
            self._has_read = True
            read.read_with.add(own.swizzle)
            takes = core_wavefronts(group.reshape(-1, 2))
            read.matrices += len(takes)
            read.wavefronts += int(takes.sum())

    def tiles(self) -> list[Tile]:
        """What was found, loads first."""
        return sorted(self._tiles.values(), key=lambda each: (each.kind, each.array, each.swizzle))


def _chunks(addresses: NDArray[np.int64]) -> list[int]:
    return ((addresses - SHARED_BASE) // CHUNK).tolist()


def core_wavefronts(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The wavefronts of each core matrix of an operand, 1 where its chunks lie in different banks.

    Args:
        rows: addresses in bytes of the chunks of each row, of shape (rows, chunks); whole core matrices.
    """
    matrices = rows.reshape(-1, ROWS, rows.shape[1]).transpose(0, 2, 1).reshape(-1, ROWS)
    groups = BANKS * BANK_BYTES // CHUNK
    busy = (matrices // CHUNK % groups)[:, :, None] == np.arange(groups)
    return busy.sum(axis=1).max(axis=1)
