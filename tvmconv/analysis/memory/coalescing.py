"""Coalescing: the sectors of global memory that each access of a warp touches, counted without running the kernel.

Global memory is moved in sectors of 32 bytes. A request of a warp takes as many as its threads touch different ones,
whatever order they touch them in (CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory"): 4 for 32
neighbouring float32, 32 where each lies in a sector of its own. Accesses of 16 bytes are served by quarters of a warp:
what one touches again that another has touched counts again, but for a sector that the last thread of one has in common
with the first of the next, and but for a quarter whose threads ask for the same sectors as those of the quarter before
it, asynchronous copies excepted (measured on an H200). Nsight Compute counts sectors as
`l1tex__t_sectors_pipe_lsu_mem_global_op_ld` and `_st`, requests as `l1tex__t_requests_...`.

Counted are the accesses that the TIR makes, in one block: by default the middle one of the grid, as those at its
border take less. Arrays begin at a sector, as whatever allocates them makes them. Kernels that have GPU instructions by
name are executed, as in `banks`; what TMA copies goes another way, without requests of threads, and is not counted
here. Nor is what is read from constant memory or through a texture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.blocks import Block, lanes_of
from tvmconv.analysis.emulation.observe import observe
from tvmconv.analysis.emulation.watch import Accessed, Place, Watch
from tvmconv.analysis.lowered.accesses import Access, accesses
from tvmconv.analysis.lowered.tir import executions, has_instructions, warps
from tvmconv.arithmetic import ceil_div
from tvmconv.gpu import VECTOR_BYTES, WARP

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.compiler.program import Launch
    from tvmconv.kernel import Kernel

SECTOR_BYTES = 32
LINE_BYTES = 128  # of L1
GLOBAL = "global"


@dataclass(frozen=True)
class GlobalAccess:
    """One load or store of global memory in the text of a kernel, over all times that it runs in one block.

    Attributes:
        kind: load or store.
        array: its name.
        requests: how often a warp executes it, with at least one thread taking part.
        sectors: that these touch.
        least: how many it would be if the bytes that each request touches lay side by side.
        nbytes: that a thread accesses.
        lines: of 128 bytes that the requests touch; L1 looks one up at a time.
        statement: the index of the statement that it is of, in the order of `tvmconv.analysis.lowered.tir.statements`.
    """

    kind: Literal["load", "store"]
    array: str
    requests: int
    sectors: int
    least: int
    nbytes: int
    lines: int
    statement: int

    @property
    def efficiency(self) -> float:
        """The share of what is moved that is asked for, 0 to 1."""
        return self.least / self.sectors if self.sectors else 1.0


def global_accesses(kernel: Kernel, step: LoweredStep | None = None, block: Block | None = None) -> list[GlobalAccess]:
    """Every global access of a kernel's step, each counted over one block.

    Args:
        kernel: a built kernel, for any target.
        step: one of `kernel.steps`; the first by default.
        block: of the grid, as (x, y, z); the one in the middle by default.

    Raises:
        AnalysisError: an access cannot be executed (`tvmconv.analysis.lowered.tir.executions`,
            `tvmconv.analysis.emulation.execute.execute`), or it depends on the data.
    """
    step = step or kernel.steps[0]
    return next(accesses_of_each(kernel, step, [block or middle_block(step)]))


def accesses_of_each(kernel: Kernel, step: LoweredStep, blocks: Iterable[Block]) -> Iterator[list[GlobalAccess]]:
    """What `global_accesses` counts over each of several blocks of a step: its text is read but once."""
    if has_instructions(step.function):
        yield from (_executed(step, kernel, block) for block in blocks)
        return

    def is_global(buffer: Any) -> bool:
        return str(buffer.scope()) == GLOBAL and kernel.spaces.get(str(buffer.name), GLOBAL) == GLOBAL

    found = list(accesses(step.function, is_global))
    yield from ([_count(access, step.launch, block) for access in found] for block in blocks)


def middle_block(step: LoweredStep) -> Block:
    """The block in the middle of a step's grid, as (x, y, z)."""
    x, y, z = step.launch.grid
    return x // 2, y // 2, z // 2


def _count(access: Access, launch: Launch, block: Block) -> GlobalAccess:
    total = np.zeros(4, np.int64)
    for executed in executions(access.scope, [access.index], launch, block, sampled=True):
        (elements,) = executed.values
        addresses, active = warps(elements * access.itemsize), warps(executed.active)
        total += executed.repeats * np.array(sectors(addresses, active, access.nbytes))
    requests, found, least, lines = total.tolist()
    name = str(access.buffer.name)
    return GlobalAccess(access.kind, name, requests, found, least, access.nbytes, lines, access.statement)


def sectors(
    addresses: NDArray[Any], active: NDArray[np.bool_], nbytes: int, *, copies: bool = False
) -> tuple[int, int, int, int]:
    """Requests, the sectors that they touch, the fewest that could hold what they touch, and the lines they touch.

    Args:
        addresses: in bytes, of shape (requests, threads of a warp).
        active: whether the thread takes part, same shape.
        nbytes: that a thread accesses from its address on.
        copies: whether these are asynchronous copies.
    """
    taking = active.any(axis=1)
    if not taking.any():
        return 0, 0, 0, 0
    addresses, active = addresses[taking].astype(np.int64), active[taking]
    found, least = sectors_of_each(addresses, active, nbytes, copies=copies)
    lines = _touched(addresses, active, nbytes, LINE_BYTES)
    return int(taking.sum()), int(found.sum()), int(least.sum()), int(lines.sum())


def sectors_of_each(
    addresses: NDArray[np.int64], active: NDArray[np.bool_], nbytes: int, *, copies: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sectors that each request touches, and the fewest that could hold what it touches; as for `sectors`."""
    # Threads that read the same bytes do so from the same address on.
    asked = distinct(np.where(active, addresses, -1)) * nbytes
    touched = _touched(addresses, active, nbytes, SECTOR_BYTES)
    if nbytes == VECTOR_BYTES:
        touched = _by_quarters(addresses // SECTOR_BYTES, active, copies=copies)
    return touched, ceil_div(asked, SECTOR_BYTES)


def _by_quarters(sectors: NDArray[np.int64], active: NDArray[np.bool_], *, copies: bool) -> NDArray[np.int64]:
    """How many sectors the quarters of each request touch.

    One that two share at their ends counts once, and so do, but of copies, those of quarters that ask for the same,
    thread by thread.
    """
    own = np.where(active, sectors, -1).reshape(len(sectors), 4, -1)
    touched = distinct(own.reshape(-1, own.shape[2])).reshape(-1, 4)
    shared = (own[:, 1:, 0] == own[:, :-1, -1]) & (own[:, 1:, 0] >= 0)
    more = touched[:, 1:] - shared
    if not copies:
        more = np.where((own[:, 1:] == own[:, :-1]).all(axis=2), 0, more)
    return touched[:, 0] + more.sum(axis=1)


def _touched(addresses: NDArray[np.int64], active: NDArray[np.bool_], nbytes: int, size: int) -> NDArray[np.int64]:
    """How many pieces of so many bytes each request touches."""
    first, last = addresses // size, (addresses + nbytes - 1) // size
    spans = int((last - first)[active].max(initial=0)) + 1
    touched = np.minimum(first[:, :, None] + np.arange(spans), last[:, :, None])
    return distinct(np.where(active[:, :, None], touched, -1).reshape(len(addresses), -1))


def distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many different values each row has, those below zero not counted."""
    ordered = np.sort(values, axis=1)
    return ((ordered >= 0) & (np.diff(ordered, axis=1, prepend=-1) != 0)).sum(axis=1)


def _executed(step: LoweredStep, kernel: Kernel, block: Block) -> list[GlobalAccess]:
    watch = SectorWatch(lanes_of(step))
    observe(step, kernel.spaces, [block], watch)
    return watch.accesses()


class SectorWatch(Watch):
    """Adds up the global accesses of the blocks that are executed.

    Args:
        lanes: of a block, for those of the first alone; None for all.
    """

    def __init__(self, lanes: int | None = None) -> None:
        self._lanes = lanes
        self._counts: dict[Place, NDArray[np.int64]] = {}
        self._known: dict[tuple[bytes, bytes, int], NDArray[np.int64]] = {}  # patterns that repeat

    def access(self, found: Accessed) -> None:
        """Count a global access."""
        own = found.of_first(self._lanes)
        if own is None or own.space != GLOBAL:
            return
        # What is touched is the same for addresses that are all moved on by as many lines.
        moved = own.addresses - own.addresses[0] // LINE_BYTES * LINE_BYTES
        pattern = own.lanes.tobytes(), moved.tobytes(), own.nbytes
        if pattern not in self._known:
            moved += LINE_BYTES - moved.min() // LINE_BYTES * LINE_BYTES  # addresses below zero stand for nobody
            self._known[pattern] = np.array(sectors(*by_request(own.lanes, moved), own.nbytes))
        self._counts.setdefault(own.place, np.zeros(4, np.int64))
        self._counts[own.place] += self._known[pattern]

    def accesses(self) -> list[GlobalAccess]:
        """What was counted, in the order of the text."""
        found = []
        for place, total in sorted(self._counts.items(), key=lambda each: each[0]):
            requests, touched, least, lines = total.tolist()
            access = GlobalAccess(
                place.kind, place.name, requests, touched, least, place.nbytes, lines, place.statement
            )
            found.append(access)
        return found


def by_request(lanes: NDArray[np.intp], addresses: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Addresses and activity by request, as for `sectors`.

    Args:
        lanes: in any order; each may take part several times, once in a request.
        addresses: of each, in bytes.
    """
    if (np.diff(lanes) > 0).all():  # each once, in order
        (taking,) = np.bincount(lanes // WARP).nonzero()
        table, active = np.zeros((len(taking), WARP), np.int64), np.zeros((len(taking), WARP), bool)
        row = np.searchsorted(taking, lanes // WARP)
        table[row, lanes % WARP], active[row, lanes % WARP] = addresses, True
        return table, active
    order = np.argsort(lanes, kind="stable")
    lanes, addresses = lanes[order], addresses[order]
    begins = np.flatnonzero(np.diff(lanes, prepend=-1))
    turn = np.arange(len(lanes)) - np.repeat(begins, np.diff(np.append(begins, len(lanes))))
    requests, row = np.unique(np.stack([lanes // WARP, turn]), axis=1, return_inverse=True)
    table = np.zeros((requests.shape[1], WARP), np.int64)
    active = np.zeros(table.shape, bool)
    table[row.reshape(-1), lanes % WARP], active[row.reshape(-1), lanes % WARP] = addresses, True
    return table, active
