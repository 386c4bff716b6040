"""Links between a kernel's sources by statement: declaration, scheduled TIR, lowered TIR, CUDA and machine code."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.compiler.sass_listing import Listing, SassInstruction
from tvmconv.compiler.source import strip_preamble
from tvmconv.compiler.source_lines import StatementLines, map_source_lines, map_tir_lines
from tvmconv.compiler.source_map import map_to_declared, map_to_scheduled
from tvmconv.kernel import Kernel

NO_STATEMENT = -1  # statement index of an instruction that the compiler assigns to no line of the TIR


@dataclass(frozen=True)
class LinkedSources:
    """Sources of one device kernel. Lines start at 1, and a statement of unknown line has no entry."""

    lowered_kernel: LoweredKernel
    te_lines: dict[int, tuple[range, ...]]  # lines of each statement in the stage `te`
    tir_lines: dict[int, tuple[range, ...]]  # lines of each statement in the stage `tir`
    lowered_lines: dict[int, range]  # lines of each statement in the stage `lowered`
    cuda_lines: dict[int, range]  # lines of each statement in the stage `cuda`
    listing: Listing
    num_hidden_lines: int  # lines at the start of the CUDA source that the stage `cuda` leaves out

    @functools.cached_property
    def statement_of_line(self) -> dict[int, int]:
        """Statement of each line in the stage `cuda` that belongs to one."""
        return {line: number for number, lines in self.cuda_lines.items() for line in lines}

    @functools.cached_property
    def instructions_by_statement(self) -> dict[int | None, list[SassInstruction]]:
        """Instructions of each statement; the key None has the instructions without a statement."""
        by_statement: defaultdict[int | None, list[SassInstruction]] = defaultdict(list)
        for instruction in self.listing:
            by_statement[self.find_statement(instruction)].append(instruction)
        return dict(by_statement)

    def find_statement(self, instruction: SassInstruction) -> int | None:
        """Return the statement of an instruction, or None if it has none."""
        if instruction.source_line is None:
            return None
        return self.statement_of_line.get(instruction.source_line - self.num_hidden_lines)

    def find_statement_index(self, instruction: SassInstruction) -> int:
        """Return the statement of an instruction, or `NO_STATEMENT`."""
        statement = self.find_statement(instruction)
        return NO_STATEMENT if statement is None else statement


_LINKED_CACHE: WeakKeyDictionary[Kernel, list[LinkedSources]] = WeakKeyDictionary()

_PENDING_LISTINGS: WeakKeyDictionary[Kernel, Future[object]] = WeakKeyDictionary()  # disassembly in progress


def prefetch_listings(kernel: Kernel) -> None:
    """Compile and disassemble a CUDA kernel in a thread, so that `link_sources` has the machine code sooner."""
    if kernel in _LINKED_CACHE or kernel in _PENDING_LISTINGS:
        return
    assert kernel.source  # TVM generates the source in this thread, not in the executor's
    executor = ThreadPoolExecutor(1)
    _PENDING_LISTINGS[kernel] = executor.submit(lambda: kernel.listings)
    executor.shutdown(wait=False)


def read_instructions(kernel: Kernel) -> Mapping[str, Listing]:
    """Return the SASS instructions of each device function by its name, with source lines only if those are known.

    The lines take another compilation, unless `prefetch_listings` was called before the kernel was compiled.
    """
    if pending := _PENDING_LISTINGS.get(kernel):
        pending.result()
    return kernel.instructions


def link_sources(kernel: Kernel) -> list[LinkedSources]:
    """Return the linked sources of a CUDA kernel's device kernels, cached per kernel."""
    if kernel not in _LINKED_CACHE:
        _LINKED_CACHE[kernel] = _link_kernel(kernel)
    return _LINKED_CACHE[kernel]


def _link_kernel(kernel: Kernel) -> list[LinkedSources]:
    prefetch_listings(kernel)
    functions = [lowered_kernel.function for lowered_kernel in kernel.kernels]
    scheduled_function = kernel.tir["main"]
    declared_function = kernel.workload.prim_func()
    scheduled_ranges, declared_ranges = map_tir_lines(scheduled_function) or (), map_tir_lines(declared_function) or ()
    origins_by_kernel = map_to_scheduled(scheduled_function, functions)
    declared_indices = map_to_declared(declared_function, scheduled_function)
    lowered_ranges_by_kernel = [
        map_tir_lines(lowered_kernel.function, lowered_kernel.text) or () for lowered_kernel in kernel.kernels
    ]
    source_ranges_by_kernel = map_source_lines(kernel.lowered_module) or [()] * len(functions)
    num_hidden_lines = kernel.source.count("\n") - strip_preamble(kernel.source).count("\n")
    _PENDING_LISTINGS.pop(kernel).result()
    listings = kernel.listings
    linked_sources, num_lines_before = [], 0
    for lowered_kernel, source_ranges, lowered_ranges, origins in zip(
        kernel.kernels, source_ranges_by_kernel, lowered_ranges_by_kernel, origins_by_kernel, strict=True
    ):
        linked_sources.append(
            LinkedSources(
                lowered_kernel=lowered_kernel,
                te_lines={
                    index: tuple(declared_ranges[declared] for declared in sorted(declared_indices[origin]))
                    for index, origin in origins.items()
                    if origin in declared_indices and declared_ranges
                },
                tir_lines={index: (scheduled_ranges[origin],) for index, origin in origins.items() if scheduled_ranges},
                lowered_lines=_shift_lines(lowered_ranges, num_lines_before),
                cuda_lines=_shift_lines(source_ranges, -num_hidden_lines),
                listing=listings.get(lowered_kernel.name, ()),
                num_hidden_lines=num_hidden_lines,
            )
        )
        num_lines_before += lowered_kernel.text.count("\n") + 2  # an empty line separates the device kernels
    return linked_sources


def _shift_lines(lines: StatementLines, offset: int) -> dict[int, range]:
    return {index: range(item.start + offset, item.stop + offset) for index, item in enumerate(lines) if item}
