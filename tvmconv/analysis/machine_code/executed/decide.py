"""Which instructions decide what a kernel asks of memory: those that addresses, predicates and branches come from.

An instruction counts if what it writes is read, before it is written again, by one that counts: liveness (Aho, Lam,
Sethi and Ullman, "Compilers", 9.2.5) of the registers that accesses and branches read. What is left out is most of a
kernel: its arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence


def deciding(
    reads: Sequence[int],
    writes: Sequence[int],
    kills: Sequence[bool],
    roots: Sequence[int],
    after: Sequence[Sequence[int]],
) -> list[bool]:
    """For each instruction whether it counts.

    Args:
        reads: the registers that each instruction reads, its predicate among them, as sets of bits.
        writes: those that it writes.
        kills: whether it writes them for all threads.
        roots: those of its reads that are of interest in themselves.
        after: the instructions that may be executed next.
    """
    live = [0] * len(reads)  # before each instruction
    before: list[list[int]] = [[] for _ in reads]
    for place, nexts in enumerate(after):
        for each in nexts:
            before[each].append(place)
    waiting, queued = list(range(len(reads))), [True] * len(reads)
    while waiting:
        place = waiting.pop()
        queued[place] = False
        out = 0
        for each in after[place]:
            out |= live[each]
        found = out | roots[place]
        if writes[place] & out:
            found = (out & ~writes[place] if kills[place] else out) | reads[place] | roots[place]
        if found != live[place]:
            live[place] = found
            for each in before[place]:
                if not queued[each]:
                    queued[each] = True
                    waiting.append(each)
    return [any(writes[place] & live[each] for each in nexts) for place, nexts in enumerate(after)]
