"""What one block's accesses ask of shared and global memory, as the machine code makes them: exact, where it is known.

The text of a kernel has accesses that the compiler merges, drops, or makes only once; its machine code has those that
there are. They are told by the statement of the text that they come from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.counts import counts
from tvmconv.analysis.emulation.watch import Place, Space
from tvmconv.analysis.lowered.accesses import accesses
from tvmconv.analysis.lowered.tir import has_instructions
from tvmconv.analysis.machine_code.executed import machine as executed
from tvmconv.analysis.machine_code.executed.asked import Counts, array_names, asked
from tvmconv.analysis.machine_code.linked import linked
from tvmconv.analysis.machine_code.mix import ACCESSES
from tvmconv.analysis.memory.banks import SharedAccess, is_shared
from tvmconv.analysis.memory.coalescing import GlobalAccess, middle_block
from tvmconv.analysis.memory.requests import Request, costlier, worst_requests
from tvmconv.errors import AnalysisError, CompileError

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.blocks import Block
    from tvmconv.analysis.machine_code.linked import Linked
    from tvmconv.compiler.listing import Instruction
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel

Kind = Literal["load", "store"]
KINDS: tuple[Kind, ...] = ("load", "store")
MOST_STEPS = 1_000_000  # instructions of a block that are executed: some seconds
NO_STATEMENT = -1  # of what the compiler has moved to a line without one


@dataclass(frozen=True)
class Asked:
    """What a block of a step asks.

    Attributes:
        shared: its accesses to shared memory.
        touched: its accesses to global memory, but for TMA's, constant memory's and textures'.
        executed: its instructions, in their order, and what each does; None where the text was counted instead.
        reason: why the machine code was not executed; empty where it was.
    """

    shared: list[SharedAccess]
    touched: list[GlobalAccess]
    executed: list[tuple[Instruction, Counts]] | None = None
    reason: str = ""


_known: WeakKeyDictionary[Kernel, dict[str, Asked]] = WeakKeyDictionary()  # steps by name


def asked_by(kernel: Kernel, step: LoweredStep) -> Asked:
    """What the middle block of one of a kernel's steps asks.

    Where there is no nvdisasm, or the machine code is not understood or takes more than `MOST_STEPS` to execute, it is
    what the text asks (`tvmconv.analysis.counts`).

    Raises:
        AnalysisError: what the kernel does cannot be counted, or depends on the data.
    """
    known = _known.setdefault(kernel, {})
    if step.name not in known:
        try:
            return asked_by_machine_code(kernel, step)
        except (AnalysisError, CompileError) as error:
            done = counts(kernel, step)
            known[step.name] = Asked(done.shared, done.touched, reason=str(error))
    return known[step.name]


def asked_by_machine_code(kernel: Kernel, step: LoweredStep, most: int | None = None) -> Asked:
    """What the middle block of one of a kernel's steps asks, by its machine code alone.

    Args:
        kernel: for an NVIDIA architecture.
        step: one of its steps.
        most: number of instructions of the block that are executed at most; `MOST_STEPS` by default.

    Raises:
        AnalysisError: the machine code is not understood, or takes more steps to execute.
        CompileError: the kernel does not compile, or there is no disassembler.
    """
    known = _known.setdefault(kernel, {})
    if step.name not in known:
        known[step.name] = _by_machine_code(kernel, step, most or MOST_STEPS)
    if known[step.name].executed is None:
        raise AnalysisError(known[step.name].reason)
    return known[step.name]


def _by_machine_code(kernel: Kernel, step: LoweredStep, most: int) -> Asked:
    place = kernel.steps.index(step)
    own = linked(kernel)[place]
    found = asked(kernel.program.steps[place], own.listing, str(kernel.device.arch), [middle_block(step)], most=most)
    arrays = array_names(kernel, step)
    buffers = _Buffers(own, found)
    of_shared: defaultdict[tuple[int, Kind, str], list[Counts]] = defaultdict(list)
    of_global: defaultdict[tuple[int, Kind, str], list[Counts]] = defaultdict(list)
    for instruction, each in zip(own.listing, found, strict=True):
        statement = own.statement(instruction)
        number = NO_STATEMENT if statement is None else statement
        for kind in KINDS:
            if each.requests and instruction.opcode in ACCESSES["shared", kind]:
                of_shared[number, kind, buffers.name(kind, number, each)].append(each)
            if each.sectors and instruction.opcode in ACCESSES["global", kind]:
                of_global[number, kind, ", ".join(arrays[n] for n in sorted(each.arrays))].append(each)
    return Asked(
        [_shared(key, own) for key, own in sorted(of_shared.items())],
        [_global(key, own) for key, own in sorted(of_global.items())],
        list(zip(own.listing, found, strict=True)),
    )


def executed_by(kernel: Kernel, step: LoweredStep, block: Block) -> list[tuple[Instruction, Counts]]:
    """Return the instructions of a step, in their order, and what each does in one block.

    Args:
        kernel: for an NVIDIA architecture.
        step: one of its steps.
        block: of the grid, as (x, y, z).

    Raises:
        AnalysisError: the machine code is not understood, or takes more than `MOST_STEPS` to execute.
        CompileError: the kernel does not compile, or there is no disassembler.
    """
    place = kernel.steps.index(step)
    listing = linked(kernel)[place].listing
    found = asked(kernel.program.steps[place], listing, str(kernel.device.arch), [block], most=MOST_STEPS)
    return list(zip(listing, found, strict=True))


def costliest_requests(kernel: Kernel, step: LoweredStep) -> list[Request]:
    """Of each access of the middle block the first request of a warp that takes most, in the order of the text.

    Where the machine code is not known or understood, of each access of the text
    (`tvmconv.analysis.memory.requests.worst_requests`).

    Raises:
        AnalysisError: an access cannot be executed, or depends on the data.
    """
    try:
        return _costliest(kernel, step)
    except (AnalysisError, CompileError):
        return worst_requests(kernel, step)


def _costliest(kernel: Kernel, step: LoweredStep) -> list[Request]:
    place = kernel.steps.index(step)
    own = linked(kernel)[place]
    found: dict[tuple[int, Space], Request] = {}

    def look(told: executed.Asked) -> None:
        instruction, copies = own.listing[told.place], told.sources is not None
        parts: tuple[tuple[Space, NDArray[np.int64] | None, NDArray[np.bool_] | None], ...] = (
            ("shared", told.addresses, told.active),
            ("global", *((told.sources, told.reads) if copies else (told.addresses, told.active))),
        )
        for space, addresses, active in parts:
            for kind in KINDS:
                if addresses is None or active is None or instruction.opcode not in ACCESSES[space, kind]:
                    continue
                at = Place(0, space, kind, "", told.nbytes)
                if worst := costlier(found.get((told.place, space)), at, addresses, active, copies=copies):
                    found[told.place, space] = worst

    code = str(kernel.device.arch)
    counted = asked(kernel.program.steps[place], own.listing, code, [middle_block(step)], look, MOST_STEPS)
    arrays, buffers = array_names(kernel, step), _Buffers(own, counted)
    costly: dict[tuple[int, Space, Kind, str], Request] = {}
    for (row, space), request in found.items():
        statement = own.statement(own.listing[row])
        number, each = NO_STATEMENT if statement is None else statement, counted[row]
        names = ", ".join(arrays[n] for n in sorted(each.arrays))
        name = buffers.name(request.kind, number, each) if space == "shared" else names
        key = number, space, request.kind, name
        if key not in costly or costly[key].takes < request.takes:
            costly[key] = replace(request, name=name, statement=number)
    return [costly[key] for key in sorted(costly)]


def _shared(key: tuple[int, Kind, str], found: list[Counts]) -> SharedAccess:
    statement, kind, buffer = key
    return SharedAccess(
        kind=kind,
        buffer=buffer,
        requests=sum(each.requests for each in found),
        wavefronts=sum(each.wavefronts for each in found),
        least=sum(each.least_wavefronts for each in found),
        nbytes=max(each.nbytes for each in found),
        statement=statement,
    )


def _global(key: tuple[int, Kind, str], found: list[Counts]) -> GlobalAccess:
    statement, kind, array = key
    return GlobalAccess(
        kind=kind,
        array=array,
        requests=sum(each.requests for each in found),
        sectors=sum(each.sectors for each in found),
        least=sum(each.least_sectors for each in found),
        nbytes=max(each.nbytes for each in found),
        lines=sum(each.lines for each in found),
        statement=statement,
    )


class _Buffers:
    """The shared buffers of a step, by where their stores go: of a statement that reads several, which one it is."""

    def __init__(self, own: Linked, found: Iterable[Counts]) -> None:
        self._by_instructions = has_instructions(own.step.function)
        self._of: defaultdict[tuple[str, int], dict[str, None]] = defaultdict(dict)
        if not self._by_instructions and own.step.shared_bytes + own.step.dynamic_shared_bytes:
            for access in accesses(own.step.function, is_shared):
                self._of[access.kind, access.statement][str(access.buffer.name)] = None
        self._ranges: dict[str, tuple[int, int]] = {}
        for instruction, each in zip(own.listing, found, strict=True):
            statement = own.statement(instruction)
            names = self._of.get(("store", NO_STATEMENT if statement is None else statement), {})
            if instruction.opcode in ACCESSES["shared", "store"] and each.shared and len(names) == 1:
                (name,) = names
                first, last = self._ranges.get(name, each.shared)
                self._ranges[name] = min(first, each.shared[0]), max(last, each.shared[1])

    def name(self, kind: str, statement: int, found: Counts) -> str:
        """The buffer that an instruction of a statement accesses; all that it may be, where that is not known."""
        if self._by_instructions:
            return "shared"
        names: Mapping[str, None] = self._of.get((kind, statement), {})
        if found.shared and len(names) != 1:
            first, last = found.shared
            held = [name for name, (low, high) in self._ranges.items() if low <= first and last <= high]
            names = dict.fromkeys(name for name in held if name in names or not names) or names
        return ", ".join(names) or "shared"
