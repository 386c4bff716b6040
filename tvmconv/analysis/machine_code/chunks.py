"""What a body accesses of a shared buffer, cut into instructions of up to 16 bytes, as the compiler would cut it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.lowered.accesses import Access
from tvmconv.analysis.lowered.tir import executions, warps
from tvmconv.analysis.memory.banks import SharedAccess, wavefronts_of_each

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.blocks import Block
    from tvmconv.compiler.program import Launch


@dataclass(frozen=True)
class Places:
    """What a body accesses of one buffer.

    Attributes:
        first: the access that stands for all.
        elements: offsets from a thread's first byte.
        begins: the addresses of the threads' first bytes, of shape (iterations of loops that are left, threads).
        active: which threads take part, same shape.
        repeats: how often all of that happens.
    """

    first: Access
    elements: tuple[int, ...]
    begins: NDArray[np.int64]
    active: NDArray[np.bool_]
    repeats: int

    @classmethod
    def of(cls, own: Sequence[Access], unrolled: int, launch: Launch, block: Block) -> Places | None:
        """The accesses of a body to a buffer, with so many of its innermost loops unrolled; None if they differ."""
        found = [_addresses(access, unrolled, launch, block) for access in own]
        told = [each for each in found if each]
        if len(told) < len(own) or len({(each.addresses.shape[0], each.repeats) for each in told}) > 1:
            return None
        active, repeats = told[0].active, told[0].repeats
        if any(not np.array_equal(each.active, active) for each in told) or not active.any():
            return None
        together = np.concatenate([each.addresses for each in told], axis=1)
        begins = together.min(axis=1)
        taking = np.sort((together - begins[:, None, :]).transpose(0, 2, 1)[active], axis=1)
        if (taking != taking[0]).any():
            return None  # not the same bytes from the first on for all threads
        elements = np.unique(taking[0][:, None] + np.arange(0, own[0].nbytes, own[0].itemsize)).tolist()
        return cls(own[0], tuple(elements), begins, active, repeats)

    def cut(self, widest: int, *, roomy: bool = False) -> Chunks:
        """As instructions of at most so many bytes, each aligned for all threads.

        Args:
            widest: of them.
            roomy: whether one reads on behind the last element, up to half of it, and drops what it finds there.
        """
        begins, wanted, size = self.begins[self.active], set(self.elements), self.first.itemsize
        end = self.elements[-1] + size

        def has(offset: int, width: int) -> bool:
            there = [offset + n in wanted or (roomy and offset + n >= end) for n in range(0, width, size)]
            return all(there) and offset + width // 2 < end

        found, left = [], 0
        while left < len(self.elements):
            offset, width = self.elements[left], max(widest, size)
            while width > size and not (((begins + offset) % width == 0).all() and has(offset, width)):
                width //= 2
            found.append((offset, width))
            left += sum(offset + n in wanted for n in range(0, width, size))
        return Chunks(self, tuple(found))


@dataclass(frozen=True)
class Chunks:
    """Instructions, as offset and bytes of each."""

    places: Places
    cut: tuple[tuple[int, int], ...]

    @property
    def widths(self) -> list[int]:
        """Of the instructions, in bytes."""
        return [width for _, width in self.cut]

    def accesses(self, more: float) -> Iterator[SharedAccess]:
        """One for each width.

        Args:
            more: so many times as many instructions are there, where the compiler cuts some otherwise.
        """
        places, active = self.places, warps(self.places.active)
        requests = int(active.any(axis=1).sum())
        name, kind = str(places.first.buffer.name), places.first.kind
        for width in sorted(set(self.widths), reverse=True):
            total = np.zeros(3, np.int64)
            for offset, own in self.cut:
                if own == width:
                    takes, least = wavefronts_of_each(warps(places.begins + offset), active, width)
                    total += np.array([requests, takes.sum(), least.sum()])
            asked, taken, needed = np.rint(total * (places.repeats * more)).astype(np.int64).tolist()
            yield SharedAccess(kind, name, asked, taken, needed, width, places.first.statement)


@dataclass(frozen=True)
class _Addresses:
    """Where an access goes.

    Attributes:
        addresses: in bytes, of shape (iterations of the loops that are left, of those that are unrolled, threads).
        active: which threads take part, of shape (iterations of the loops that are left, threads).
        repeats: how often all that happens.
    """

    addresses: NDArray[np.int64]
    active: NDArray[np.bool_]
    repeats: int


def _addresses(access: Access, unrolled: int, launch: Launch, block: Block) -> _Addresses | None:
    """Where an access goes; None where threads take part in some of the iterations that are unrolled."""
    scope = access.scope
    used = scope.variables([access.index, *(condition for condition, _ in scope.conditions)])
    left = len(scope.loops) - unrolled
    outer = [extent for variable, _, extent in scope.loops[:left] if variable in used]
    inner = math.prod(extent for variable, _, extent in scope.loops[left:] if variable in used)
    repeats = math.prod(extent for variable, _, extent in scope.loops[:left] if variable not in used)
    done = list(executions(scope, [access.index], launch, block))
    shape = (math.prod(outer), inner, launch.threads)
    elements = np.concatenate([each.values[0] for each in done]).reshape(shape)
    active = np.concatenate([each.active for each in done]).reshape(shape)
    if (active != active[:, :1]).any():
        return None
    return _Addresses(elements.astype(np.int64) * access.itemsize, active[:, 0], repeats)
