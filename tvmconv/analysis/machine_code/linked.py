"""The statements of a kernel beside its texts: declaration, scheduled TIR, lowered TIR, CUDA and machine code."""

from __future__ import annotations

import functools
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tvmconv.compiler.lines import source_lines, tir_lines
from tvmconv.compiler.origins import declared_origins, scheduled_origins
from tvmconv.compiler.source import without_preamble

if TYPE_CHECKING:
    from tvmconv.compiler.lines import Lines
    from tvmconv.compiler.listing import Instruction, Listing
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel


@dataclass(frozen=True)
class Linked:
    """One step of a kernel. Lines are from 1 on; a statement whose line is not known has none.

    Attributes:
        step: of the kernel.
        declared: by statement, its lines in the stage `te`.
        scheduled: by statement, its lines in the stage `tir`.
        lowered: by statement, its lines in the stage `lowered`.
        source: by statement, its lines in the stage `source`.
        listing: the machine code.
        hidden: lines of the whole CUDA text that the stage `source` leaves out at its begin.
    """

    step: LoweredStep
    declared: dict[int, tuple[range, ...]]
    scheduled: dict[int, tuple[range, ...]]
    lowered: dict[int, range]
    source: dict[int, range]
    listing: Listing
    hidden: int

    @functools.cached_property
    def statement_of_line(self) -> dict[int, int]:
        """The statement of each line in the stage `source` that is one's."""
        return {line: number for number, lines in self.source.items() for line in lines}

    @functools.cached_property
    def by_statement(self) -> dict[int | None, list[Instruction]]:
        """The instructions of each statement; behind None those of none."""
        found: defaultdict[int | None, list[Instruction]] = defaultdict(list)
        for each in self.listing:
            found[self.statement(each)].append(each)
        return dict(found)

    def statement(self, instruction: Instruction) -> int | None:
        """The statement that an instruction is of."""
        if instruction.line is None:
            return None
        return self.statement_of_line.get(instruction.line - self.hidden)


_known: WeakKeyDictionary[Kernel, list[Linked]] = WeakKeyDictionary()


_begun: WeakKeyDictionary[Kernel, Future[object]] = WeakKeyDictionary()  # machine code that is being made


def begin(kernel: Kernel) -> None:
    """Have the machine code of a CUDA kernel made and read, on another core, for `linked` to have it sooner."""
    if kernel in _known or kernel in _begun:
        return
    assert kernel.source  # TVM writes it here, and not there
    beside = ThreadPoolExecutor(1)
    _begun[kernel] = beside.submit(lambda: kernel.listings)
    beside.shutdown(wait=False)


def linked(kernel: Kernel) -> list[Linked]:
    """The steps of a CUDA kernel with what is known of their statements, found once for a kernel.

    Raises:
        CompileError: it does not compile, or there is no nvdisasm.
    """
    if kernel not in _known:
        _known[kernel] = _linked(kernel)
    return _known[kernel]


def _linked(kernel: Kernel) -> list[Linked]:
    begin(kernel)
    functions = [step.function for step in kernel.steps]
    scheduled = kernel.tir["main"]
    declaration = kernel.workload.prim_func()
    in_scheduled, in_declaration = tir_lines(scheduled) or (), tir_lines(declaration) or ()
    origins = scheduled_origins(scheduled, functions)
    declared = declared_origins(declaration, scheduled)
    in_lowered = [tir_lines(step.function, step.text) or () for step in kernel.steps]
    in_source = source_lines(kernel.module) or [()] * len(functions)
    hidden = kernel.source.count("\n") - without_preamble(kernel.source).count("\n")
    _begun.pop(kernel).result()
    listings = kernel.listings
    found, before = [], 0
    for step, lines, told, own in zip(kernel.steps, in_source, in_lowered, origins, strict=True):
        found.append(
            Linked(
                step=step,
                declared={
                    n: tuple(in_declaration[each] for each in sorted(declared[origin]))
                    for n, origin in own.items()
                    if origin in declared and in_declaration
                },
                scheduled={n: (in_scheduled[origin],) for n, origin in own.items() if in_scheduled},
                lowered=_shifted(told, before),
                source=_shifted(lines, -hidden),
                listing=listings.get(step.name, ()),
                hidden=hidden,
            )
        )
        before += step.text.count("\n") + 2  # the stage has an empty line between steps
    return found


def _shifted(lines: Lines, by: int) -> dict[int, range]:
    return {number: range(each.start + by, each.stop + by) for number, each in enumerate(lines) if each}
