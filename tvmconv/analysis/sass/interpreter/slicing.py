"""Slicing of the instructions that a kernel's memory requests depend on, through addresses, predicates and branches.

An instruction is in the slice if an instruction of the slice reads its result before another one overwrites it. This is
liveness (Aho, Lam, Sethi and Ullman, "Compilers", 9.2.5) of the registers that accesses and branches read. The slice
excludes most of a kernel: its arithmetic.
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
    """Return for each instruction whether it is in the slice."""
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
            kept = live_out & ~written_registers[index] if writes_all_threads[index] else live_out
            live_in = kept | read_registers[index] | root_registers[index]
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
