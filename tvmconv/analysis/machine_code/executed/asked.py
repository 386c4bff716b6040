"""How often the instructions of a kernel run and what they ask of memory: sectors, lines and wavefronts of each.

All blocks of a grid are executed where that takes few steps; else some, spread evenly, which stand for all: those at
the border of the grid do less than those inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.machine_code.executed.machine import Asked, Machine, Told
from tvmconv.analysis.machine_code.mix import ACCESSES
from tvmconv.analysis.memory.banks import copy_wavefronts_of_each, wavefronts_of_each
from tvmconv.analysis.memory.coalescing import LINE_BYTES, sectors
from tvmconv.arithmetic import round_up
from tvmconv.errors import AnalysisError
from tvmconv.gpu import VECTOR_BYTES

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.blocks import Block
    from tvmconv.compiler.listing import Listing
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.compiler.program import Step
    from tvmconv.kernel import Kernel


@dataclass(frozen=True)
class _Bank:
    """Where things lie in constant bank 0, in bytes."""

    arguments: int
    block: int
    grid: int
    stack: int
    descriptors: int


ARRAY_BITS = 40  # of an address, above which is the number of the argument that it is in
_BEGIN = 1 << 32  # of an argument's array: what is a little below it is there, too
# Constant bank 0, by the first architecture that has it so: the arguments, the sizes of block and grid, the stack's
# end, and descriptors of global memory, of which nothing is needed. Read off machine code (docs/tvm.md).
_BANKS = (
    (100, _Bank(arguments=0x380, block=0x360, grid=0x370, stack=0x37C, descriptors=0x358)),
    (90, _Bank(arguments=0x210, block=0x0, grid=0xC, stack=0x28, descriptors=0x208)),
    (0, _Bank(arguments=0x160, block=0x0, grid=0xC, stack=0x28, descriptors=0x118)),
)
_STACK_END = 0xFFFF00
_LANES = 16384  # threads that are executed together: NumPy takes little longer for them than for some
_FIRST_LANES = 2048  # to see how many steps a block takes
_MOST_STEPS = 200_000  # of a grid, some seconds, but for the first blocks
_MOST_BLOCKS = 16384
_TRIES = 3  # numbers drawn for each block, so that nearly all of few blocks are met


@dataclass
class Counts:
    """What one instruction does, and what its requests take.

    Attributes:
        executed: how often a warp runs it.
        back: of a branch, how often a warp takes it back to an instruction before it.
        requests: of these, how often with a thread taking part.
        sectors: of global memory that they touch.
        least_sectors: that would do for what they touch.
        lines: of 128 bytes of global memory.
        wavefronts: of shared memory.
        least_wavefronts: that would do without conflicts.
        arrays: of the program, by their index, in which they are.
        shared: the shared addresses, in bytes, of the first and the last.
        nbytes: that a thread accesses.
    """

    executed: int = 0
    back: int = 0
    requests: int = 0
    sectors: int = 0
    least_sectors: int = 0
    lines: int = 0
    wavefronts: int = 0
    least_wavefronts: int = 0
    arrays: set[int] = field(default_factory=set)
    shared: tuple[int, int] | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class Grid:
    """What the blocks of a launch ask, or some of them.

    Attributes:
        counts: of each instruction, of the blocks that were executed.
        share: of the grid's blocks that these are.
    """

    counts: list[Counts]
    share: float


def asked_of_grid(step: Step, listing: Listing, arch: str) -> Grid:
    """What the instructions of a step ask of memory in a whole launch.

    Args:
        step: of a kernel's program.
        listing: its machine code.
        arch: such as "sm_90".

    Raises:
        AnalysisError: the machine code is not understood, or what it asks depends on the data.
    """
    asking = _Asking(step, listing, arch)
    order = spread(step.launch.grid, _MOST_BLOCKS)
    first, more = (max(1, lanes // step.launch.threads) for lanes in (_FIRST_LANES, _LANES))
    once = asking.of(order[:first])
    executed = first + more * (_MOST_STEPS // once)
    for begin in range(first, min(executed, len(order)), more):
        asking.of(order[begin : begin + more])
    return Grid(asking.counts, min(executed, len(order)) / math.prod(step.launch.grid))


def asked(
    step: Step,
    listing: Listing,
    arch: str,
    blocks: Sequence[Block],
    told: Told | None = None,
    most: int | None = None,
) -> list[Counts]:
    """What each instruction of a step asks of memory in some blocks, by its place in the listing.

    Args:
        step: of a kernel's program.
        listing: its machine code.
        arch: such as "sm_90".
        blocks: of its grid, as (x, y, z).
        told: is told of each access, too, with addresses of global memory from their array's begin on.
        most: instructions that are executed, as `Machine.execute` has it.

    Raises:
        AnalysisError: the machine code is not understood, or what it asks depends on the data.
    """
    asking = _Asking(step, listing, arch, told)
    asking.of(blocks, most)
    return asking.counts


def array_names(kernel: Kernel, step: LoweredStep) -> dict[int, str]:
    """The names of the arrays and of the scratch memory that a step takes, by their index in the program."""
    own = {parameter.index: parameter.name.removesuffix("_ptr") for parameter in step.parameters}
    return own | dict(enumerate(kernel.spaces))


def spread(grid: Block, most: int) -> list[Block]:
    """Blocks of a grid, as (x, y, z): all where there are few, else so many; the first of them are spread evenly, too.

    They are some constant share of the grid apart that no tile's width divides: the golden ratio's (the additive
    recurrence of Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences").
    """
    count = math.prod(grid)
    share = (np.arange(min(_TRIES * count, 2 * _TRIES * most)) * (math.sqrt(5) - 1) / 2 + 0.5) % 1
    numbers, first = np.unique((share * count).astype(np.int64), return_index=True)
    numbers = numbers[np.argsort(first)][:most]
    z, y, x = np.unravel_index(numbers, grid[::-1])
    return list(zip(x.tolist(), y.tolist(), z.tolist(), strict=True))


class _Asking:
    """A step's machine code, and what its instructions have asked so far."""

    def __init__(self, step: Step, listing: Listing, arch: str, told: Told | None = None) -> None:
        if not listing:
            raise AnalysisError("there is no machine code")
        words = _words(step, arch)
        self._machine = Machine(listing, step.launch, lambda bank, offset: words.get(offset) if bank == 0 else None)
        self._counter, self._told = _Counter(listing, frozenset(step.arguments)), told
        self.counts = self._counter.counts

    def of(self, blocks: Sequence[Block], most: int | None = None) -> int:
        """Execute some blocks; how many steps that took."""
        run = self._machine.execute(blocks, self._tell, most)
        for each, times, back in zip(self.counts, run.times, run.back, strict=True):
            each.executed += times
            each.back += back
        return run.steps

    def _tell(self, found: Asked) -> None:
        counted = self._counter.add(found)
        if self._told:
            self._told(_in_arrays(counted))


def _words(step: Step, arch: str) -> dict[int, int]:
    """The words of constant bank 0 that are known, by their offset: launch, stack and arguments."""
    architecture = int("".join(filter(str.isdigit, arch)))
    bank = next(own for since, own in _BANKS if architecture >= since)
    found = {bank.stack: _STACK_END, bank.descriptors: 0, bank.descriptors + 4: 0}
    for begin, extents in ((bank.block, step.launch.block), (bank.grid, step.launch.grid)):
        found |= {begin + 4 * axis: extent for axis, extent in enumerate(extents)}
    maps = dict(step.tensor_maps)
    place = bank.arguments
    for number, index in enumerate(step.arguments):
        if number in maps:
            place = round_up(place, 64) + 128
            continue
        begin = ((index + 1) << ARRAY_BITS) + _BEGIN
        found[place], found[place + 4] = begin & 0xFFFFFFFF, begin >> 32
        place += 8
    return found


class _Counter:
    """Counts what is asked; what was asked before, at addresses that are all moved on alike, is known."""

    def __init__(self, listing: Listing, arrays: frozenset[int]) -> None:
        self._arrays = arrays
        self.counts = [Counts() for _ in listing]
        self._opcodes = [each.opcode for each in listing]
        self._matrices = [_matrices(each.modifiers) for each in listing]
        self._known: dict[tuple[object, ...], tuple[int, ...]] = {}

    def add(self, found: Asked) -> Asked:
        """Count it; what was counted: of matrices the threads whose addresses matter."""
        opcode, total = self._opcodes[found.place], self.counts[found.place]
        total.requests += int(found.active.any(axis=1).sum())
        total.nbytes = found.nbytes
        if opcode in ("LDSM", "STSM"):
            rows = np.arange(found.active.shape[1]) < 8 * self._matrices[found.place]
            found = Asked(found.place, found.addresses, found.active & rows, VECTOR_BYTES)
        if opcode in ACCESSES["global", "load"] + ACCESSES["global", "store"]:
            of_global = found.addresses if found.sources is None else found.sources
            active = found.active if found.reads is None else found.reads
            takes = self._of("global", of_global, active, found.nbytes, copies=found.sources is not None)
            total.sectors += takes[0]
            total.least_sectors += takes[1]
            total.lines += takes[2]
            if active.any():
                array = (int(of_global[active][0]) >> ARRAY_BITS) - 1
                if array not in self._arrays:
                    raise AnalysisError(f"{opcode} is executed at an address outside of all arrays")
                total.arrays.add(array)
        if opcode in ACCESSES["shared", "load"] + ACCESSES["shared", "store"]:
            if found.sources is not None and found.nbytes == VECTOR_BYTES:
                assert found.reads is not None
                served, least = copy_wavefronts_of_each(found.addresses, found.active, found.sources, found.reads)
                takes = int(served.sum()), int(least.sum())
            else:
                takes = self._of("shared", found.addresses, found.active, found.nbytes)
            total.wavefronts += takes[0]
            total.least_wavefronts += takes[1]
            if found.active.any():
                there = found.addresses[found.active]
                first, last = total.shared or (int(there[0]), int(there[0]))
                total.shared = min(first, int(there.min())), max(last, int(there.max()))
        return found

    def _of(
        self,
        space: str,
        addresses: NDArray[np.int64],
        active: NDArray[np.bool_],
        nbytes: int,
        *,
        copies: bool = False,
    ) -> tuple[int, ...]:
        if not active.any():
            return 0, 0, 0
        first = int(addresses[active].min())
        moved = np.where(active, addresses - first // LINE_BYTES * LINE_BYTES, 0)
        key = space, copies, nbytes, moved.tobytes(), active.tobytes()
        if key not in self._known:
            if space == "global":
                _, touched, least, lines = sectors(moved, active, nbytes, copies=copies)
                self._known[key] = touched, least, lines
            else:
                takes, least_of_each = wavefronts_of_each(moved, active, nbytes)
                self._known[key] = int(takes.sum()), int(least_of_each.sum()), 0
        return self._known[key]


def _in_arrays(found: Asked) -> Asked:
    return replace(
        found,
        addresses=_within(found.addresses),
        sources=None if found.sources is None else _within(found.sources),
    )


def _within(addresses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Addresses of global memory, from their array's begin on; those of shared memory as they are."""
    return np.where(addresses >> ARRAY_BITS > 0, (addresses & (1 << ARRAY_BITS) - 1) - _BEGIN, addresses)


def _matrices(modifiers: Sequence[str]) -> int:
    return next((int(each) for each in modifiers if each in ("1", "2", "4")), 1)
