"""Which instructions decide what a kernel asks of memory: those that addresses, predicates and branches come from.

An instruction counts if what it writes is read, before it is written again, by one that counts: liveness (Aho, Lam,
Sethi and Ullman, "Compilers", 9.2.5) of the registers that accesses and branches read. What is left out is most of a
kernel: its arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence


def slice_for_addresses(
    read_registers: Sequence[int],
    written_registers: Sequence[int],
    writes_all_threads: Sequence[bool],
    root_registers: Sequence[int],
    successors: Sequence[Sequence[int]],
) -> list[bool]:
    """For each instruction whether it counts.

    Args:
        read_registers: the registers that each instruction reads, its predicate among them, as sets of bits.
        written_registers: those that it writes.
        writes_all_threads: whether it writes them for all threads.
        root_registers: those of its reads that are of interest in themselves.
        successors: the instructions that may be executed next.
    """
    live_registers = [0] * len(read_registers)  # before each instruction
    predecessors: list[list[int]] = [[] for _ in read_registers]
    for index, successor_indices in enumerate(successors):
        for neighbor in successor_indices:
            predecessors[neighbor].append(index)
    worklist, is_queued = list(range(len(read_registers))), [True] * len(read_registers)
    while worklist:
        index = worklist.pop()
        is_queued[index] = False
        live_out = 0
        for neighbor in successors[index]:
            live_out |= live_registers[neighbor]
        live_in = live_out | root_registers[index]
        if written_registers[index] & live_out:
            live_in = (
                (live_out & ~written_registers[index] if writes_all_threads[index] else live_out)
                | read_registers[index]
                | root_registers[index]
            )
        if live_in != live_registers[index]:
            live_registers[index] = live_in
            for neighbor in predecessors[index]:
                if not is_queued[neighbor]:
                    is_queued[neighbor] = True
                    worklist.append(neighbor)
    return [
        any(written_registers[index] & live_registers[neighbor] for neighbor in successor_indices)
        for index, successor_indices in enumerate(successors)
    ]
