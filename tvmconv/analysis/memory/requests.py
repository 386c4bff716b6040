"""The lanes of a warp on the banks and sectors of memory: of each access, the request that takes most.

A request is one access of one warp. Counts of all of them are in `banks` and `coalescing`, whose rules are the same;
here is what one looks like: where each lane's bytes lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.blocks import lanes_of
from tvmconv.analysis.emulation.observe import observe
from tvmconv.analysis.emulation.watch import SITES, Accessed, Place, Space, Watch
from tvmconv.analysis.lowered.accesses import Access, accesses
from tvmconv.analysis.lowered.tir import SHARED, executions, has_instructions, warps
from tvmconv.analysis.memory.banks import wavefronts_of_each
from tvmconv.analysis.memory.coalescing import GLOBAL, by_request, middle_block, sectors_of_each

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel


@dataclass(frozen=True)
class Request:
    """The costliest request of one access.

    Attributes:
        space: global or shared memory.
        kind: load or store.
        name: of the array or the shared buffer.
        statement: its index in `tvmconv.analysis.lowered.tir.statements`.
        nbytes: that a lane accesses.
        lanes: that take part, of the warp: 0 to 31, in order.
        addresses: where each begins, in bytes.
        takes: wavefronts of shared memory, or sectors.
        least: how few would do for the same bytes.
    """

    space: Space
    kind: Literal["load", "store"]
    name: str
    statement: int
    nbytes: int
    lanes: tuple[int, ...]
    addresses: tuple[int, ...]
    takes: int
    least: int


def worst_requests(kernel: Kernel, step: LoweredStep | None = None) -> list[Request]:
    """Of each access of a kernel's step, the first request that takes most, in the order of the text.

    Shared accesses are those of the first block, global ones those of the middle one, as where they are counted.

    Args:
        kernel: a built kernel, for any target.
        step: one of `kernel.steps`; the first by default.

    Raises:
        AnalysisError: an access cannot be executed, or depends on the data.
    """
    step = step or kernel.steps[0]
    if has_instructions(step.function):
        watch = _Watch(lanes_of(step))
        observe(step, kernel.spaces, [middle_block(step)], watch)
        return watch.requests()
    return [request for request in _evaluated(kernel, step) if request]


def _evaluated(kernel: Kernel, step: LoweredStep) -> Iterator[Request | None]:
    def is_wanted(buffer: Any) -> bool:
        scope = str(buffer.scope())
        return scope in SHARED or (scope == GLOBAL and kernel.spaces.get(str(buffer.name), GLOBAL) == GLOBAL)

    for access in accesses(step.function, is_wanted):
        space: Space = "shared" if str(access.buffer.scope()) in SHARED else "global"
        yield _worst(access, step, space)


def _worst(access: Access, step: LoweredStep, space: Space) -> Request | None:
    block = (0, 0, 0) if space == "shared" else middle_block(step)
    place = Place(access.statement * SITES, space, access.kind, str(access.buffer.name), access.nbytes)
    found: Request | None = None
    for executed in executions(access.scope, [access.index], step.launch, block, sampled=True):
        (elements,) = executed.values
        found = costlier(found, place, warps(elements * access.itemsize), warps(executed.active))
    return found


def costlier(
    found: Request | None, place: Place, addresses: NDArray[Any], active: NDArray[np.bool_], *, copies: bool = False
) -> Request | None:
    """What was found, or one of these requests that takes more.

    Args:
        found: before, if there was one.
        place: of the access.
        addresses: in bytes, of shape (requests, threads of a warp).
        active: whether the thread takes part, same shape.
        copies: whether these are asynchronous copies.
    """
    taking = active.any(axis=1)
    if not taking.any():
        return found
    addresses, active = addresses[taking].astype(np.int64), active[taking]
    if place.space == "shared":
        takes, least = wavefronts_of_each(addresses, active, place.nbytes)
    else:
        takes, least = sectors_of_each(addresses, active, place.nbytes, copies=copies)
    worst = int(takes.argmax())
    if found and found.takes >= takes[worst]:
        return found
    (lanes,) = active[worst].nonzero()
    return Request(
        space=place.space,
        kind=place.kind,
        name=place.name,
        statement=place.statement,
        nbytes=place.nbytes,
        lanes=tuple(lanes.tolist()),
        addresses=tuple(addresses[worst, lanes].tolist()),
        takes=int(takes[worst]),
        least=int(least[worst]),
    )


class _Watch(Watch):
    """Keeps the costliest request of each access of the first of the blocks that are executed.

    Args:
        lanes: of a block.
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._found: dict[Place, Request | None] = {}

    def access(self, found: Accessed) -> None:
        """Look at one access of all lanes."""
        if own := found.of_first(self._lanes):
            place = own.place
            self._found[place] = costlier(self._found.get(place), place, *by_request(own.lanes, own.addresses))

    def requests(self) -> list[Request]:
        """What was found, in the order of the text."""
        return [request for place in sorted(self._found) if (request := self._found[place])]
