"""The statements of a kernel beside its texts: declaration, scheduled TIR, lowered TIR, CUDA and machine code."""

from __future__ import annotations

import functools
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tvmconv.compiler.source import strip_preamble
from tvmconv.compiler.source_lines import map_source_lines, map_tir_lines
from tvmconv.compiler.source_map import map_to_declared, map_to_scheduled

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.compiler.sass_listing import Listing, SassInstruction
    from tvmconv.compiler.source_lines import StatementLines
    from tvmconv.kernel import Kernel


@dataclass(frozen=True)
class LinkedSources:
    """One step of a kernel. Lines are from 1 on; a statement whose line is not known has none.

    Attributes:
        lowered_kernel: of the kernel.
        te_lines: by statement, its lines in the stage `te`.
        tir_lines: by statement, its lines in the stage `tir`.
        lowered_lines: by statement, its lines in the stage `lowered_lines`.
        cuda_lines: by statement, its lines in the stage `cuda_lines`.
        listing: the machine code.
        num_hidden_lines: lines of the whole CUDA text that the stage `cuda_lines` leaves out at its begin.
    """

    lowered_kernel: LoweredKernel
    te_lines: dict[int, tuple[range, ...]]
    tir_lines: dict[int, tuple[range, ...]]
    lowered_lines: dict[int, range]
    cuda_lines: dict[int, range]
    listing: Listing
    num_hidden_lines: int

    @functools.cached_property
    def statement_of_line(self) -> dict[int, int]:
        """The statement of each line in the stage `cuda_lines` that is one's."""
        return {line: number for number, lines in self.cuda_lines.items() for line in lines}

    @functools.cached_property
    def instructions_by_statement(self) -> dict[int | None, list[SassInstruction]]:
        """The instructions of each statement; behind None those of none."""
        by_statement: defaultdict[int | None, list[SassInstruction]] = defaultdict(list)
        for instruction in self.listing:
            by_statement[self.find_statement(instruction)].append(instruction)
        return dict(by_statement)

    def find_statement(self, instruction: SassInstruction) -> int | None:
        """The statement that an instruction is of."""
        if instruction.source_line is None:
            return None
        return self.statement_of_line.get(instruction.source_line - self.num_hidden_lines)


_LINKED_CACHE: WeakKeyDictionary[Kernel, list[LinkedSources]] = WeakKeyDictionary()


_PENDING_LISTINGS: WeakKeyDictionary[Kernel, Future[object]] = WeakKeyDictionary()  # machine code that is being made


def prefetch_listings(kernel: Kernel) -> None:
    """Have the machine code of a CUDA kernel made and read, on another core, for `link_sources` to have it sooner."""
    if kernel in _LINKED_CACHE or kernel in _PENDING_LISTINGS:
        return
    assert kernel.source  # TVM writes it here, and not there
    executor = ThreadPoolExecutor(1)
    _PENDING_LISTINGS[kernel] = executor.submit(lambda: kernel.listings)
    executor.shutdown(wait=False)


def link_sources(kernel: Kernel) -> list[LinkedSources]:
    """The steps of a CUDA kernel with what is known of their statements, found once for a kernel.

    Raises:
        CompileError: it does not compile, or there is no nvdisasm.
    """
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
    for lowered_kernel, source_ranges, lowered_ranges, statement_origins in zip(
        kernel.kernels, source_ranges_by_kernel, lowered_ranges_by_kernel, origins_by_kernel, strict=True
    ):
        linked_sources.append(
            LinkedSources(
                lowered_kernel=lowered_kernel,
                te_lines={
                    statement_index: tuple(
                        declared_ranges[declared_index] for declared_index in sorted(declared_indices[origin])
                    )
                    for statement_index, origin in statement_origins.items()
                    if origin in declared_indices and declared_ranges
                },
                tir_lines={
                    statement_index: (scheduled_ranges[origin],)
                    for statement_index, origin in statement_origins.items()
                    if scheduled_ranges
                },
                lowered_lines=_shift_lines(lowered_ranges, num_lines_before),
                cuda_lines=_shift_lines(source_ranges, -num_hidden_lines),
                listing=listings.get(lowered_kernel.name, ()),
                num_hidden_lines=num_hidden_lines,
            )
        )
        num_lines_before += lowered_kernel.text.count("\n") + 2  # the stage has an empty line between steps
    return linked_sources


def _shift_lines(lines: StatementLines, offset: int) -> dict[int, range]:
    return {
        statement_index: range(line_range.start + offset, line_range.stop + offset)
        for statement_index, line_range in enumerate(lines)
        if line_range
    }
