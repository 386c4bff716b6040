"""Promotion of accumulators of wgmma to float32 sums: when, and in which parts.

A promotion reads the accumulators, so their wgmmas have to be complete, and the next ones overwrite them. In one part,
the tensor cores are idle meanwhile, unless another warpgroup uses them. In two parts, the wgmmas of one part run while
the other part is promoted. No further registers are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .atoms import WgmmaAtom


@dataclass(frozen=True)
class Promotion:
    """When accumulators are added to the promoted sums, and in how many parts."""

    k_tiles: int  # K tiles from one promotion to the next
    groups: int = 1  # promotions in each K tile; 1 unless `k_tiles` is 1
    parts: int = 1  # parts of the accumulators; 1 unless `k_tiles` is 1

    @property
    def is_within_k_tile(self) -> bool:
        """Whether a K tile has several steps, each of which multiplies a part of it or for a part of the sums."""
        return self.groups * self.parts > 1

    def divide_steps(self, steps: range) -> list[range]:
        """Divide the wgmmas of a K tile along the reduction among the promotions in it."""
        per_group = -(-len(steps) // self.groups)
        return [steps[first : first + per_group] for first in range(0, len(steps), per_group)]


@dataclass(frozen=True)
class AccumulatorPart:
    """Accumulators of a warpgroup that are promoted together: those of some instructions along M, or some columns."""

    atom: WgmmaAtom  # the instruction, which may have fewer columns than the tile
    m_atoms: range  # instructions along M
    first_column: int  # first column of the tile
    first_register: int  # first accumulator of the part in the instruction that has all columns

    @property
    def num_accumulators(self) -> int:
        """Accumulator registers per thread."""
        return len(self.m_atoms) * self.atom.num_accumulators


def divide_accumulators(atom: WgmmaAtom, m_atoms: int, parts: int) -> Iterator[AccumulatorPart]:
    """Divide the accumulators of a warpgroup along M, or along N if there is one instruction along M."""
    if m_atoms > 1:
        per_part = -(-m_atoms // parts)
        for first in range(0, m_atoms, per_part):
            yield AccumulatorPart(atom, range(first, min(first + per_part, m_atoms)), 0, 0)
        return
    narrow = replace(atom, n=atom.n // parts)
    for part in range(parts):
        yield AccumulatorPart(narrow, range(1), part * narrow.n, part * narrow.num_accumulators)
