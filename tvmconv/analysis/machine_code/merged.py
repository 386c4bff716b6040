"""Shared accesses as the compiler makes them: neighbouring ones of a thread as one of 8 or 16 bytes.

What the text reads element by element, the compiler reads in words of up to 16 bytes, where it has unrolled the loops
around it and knows where a thread's first element lies. Which loops it has unrolled is seen from the machine code: the
accesses of a body are merged for as many of its innermost loops as give the instructions that are there. Where none
give them, accesses are counted as they stand in the text.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.analysis.lowered.accesses import Access, accesses
from tvmconv.analysis.lowered.tir import has_instructions, statements
from tvmconv.analysis.machine_code.chunks import Chunks, Places
from tvmconv.analysis.machine_code.linked import Linked, linked
from tvmconv.analysis.machine_code.runs import runs
from tvmconv.analysis.memory.banks import FIRST_BLOCK, SharedAccess, count, is_shared, shared_accesses
from tvmconv.compiler.barriers import BARRIER
from tvmconv.errors import CompileError

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from tvmconv.analysis.emulation.blocks import Block
    from tvmconv.compiler.listing import Instruction
    from tvmconv.compiler.lower import LoweredStep
    from tvmconv.compiler.program import Launch
    from tvmconv.kernel import Kernel

NEAR = 0.15  # a share by which instructions may differ from what is expected
_OPCODES = {"load": "LDS", "store": "STS"}
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
Body = tuple[Any, ...]  # the loops around a statement


def as_compiled(kernel: Kernel, step: LoweredStep, block: Block = FIRST_BLOCK) -> list[SharedAccess]:
    """The shared accesses of a step in one block, by the width that the compiler gave them.

    Kernels of instructions by name have their widths in the text; so do all where there is no nvdisasm to ask.

    Args:
        kernel: for an NVIDIA architecture.
        step: one of `kernel.steps`.
        block: of the grid, as (x, y, z).

    Raises:
        AnalysisError: an access cannot be executed, or depends on the data.
    """
    if has_instructions(step.function):
        return shared_accesses(kernel, step, block)
    if next(accesses(step.function, is_shared), None) is None:
        return []
    try:
        (own,) = (each for each in linked(kernel) if each.step.name == step.name)
    except CompileError:
        return shared_accesses(kernel, step, block)
    return _of_step(own, runs(kernel, step, own.listing), block)


def bodies(function: PrimFunc) -> dict[tuple[str, Body], list[Access]]:
    """The shared accesses of a function's text that may be merged: those of a kind with the same loops around them."""
    found: defaultdict[tuple[str, Body], list[Access]] = defaultdict(list)
    for access in accesses(function, is_shared):
        found[access.kind, tuple(variable for variable, _, _ in access.scope.loops)].append(access)
    return dict(found)


def _of_step(linked: Linked, often: Mapping[Instruction, float], block: Block) -> list[SharedAccess]:
    waiting = _waiting(linked.step.function)
    found: list[SharedAccess] = []
    for (kind, loops), own in bodies(linked.step.function).items():
        made = _Made.of(linked, kind, {access.statement for access in own}, often)
        if not made.widths and all(access.statement in linked.source for access in own):
            continue  # the compiler has the values from elsewhere
        free = next((n for n, variable in enumerate(reversed(loops)) if variable in waiting), len(loops))
        found += _merged(own, made, free, linked.step.launch, block)
    return found


def _waiting(function: PrimFunc) -> set[Any]:
    """The variables of loops that have a barrier in them: what is read before it is read again after it."""
    return {
        variable
        for statement, scope in statements(function)
        if type(statement).__name__ == "Evaluate" and _called(statement.value) == BARRIER
        for variable, _, _ in scope.loops
    }


def _called(value: Any) -> str | None:
    return str(value.op.name) if type(value).__name__ == "Call" else None


@dataclass(frozen=True)
class _Made:
    """The shared instructions of some statements.

    Attributes:
        widths: how many there are, by the bytes that each moves.
        runs: how often a warp runs them, by these bytes.
    """

    widths: Counter[int]
    runs: Mapping[int, float]

    @classmethod
    def of(cls, linked: Linked, kind: str, statements: set[int], often: Mapping[Instruction, float]) -> _Made:
        """Those of a kind."""
        widths: Counter[int] = Counter()
        runs: defaultdict[int, float] = defaultdict(float)
        for statement in statements:
            for each in linked.by_statement.get(statement, ()):
                if each.opcode == _OPCODES[kind]:
                    widths[_width(each)] += 1
                    runs[_width(each)] += often[each]
        return cls(widths, runs)


def _width(instruction: Instruction) -> int:
    return next((_BYTES[m] for m in instruction.modifiers if m in _BYTES), 4)


def _merged(own: Sequence[Access], made: _Made, free: int, launch: Launch, block: Block) -> list[SharedAccess]:
    """The accesses of one body as they were made; as they stand in the text where that is not understood.

    Args:
        own: the accesses.
        made: the instructions of their statements.
        free: how many of the innermost loops have no barrier in them.
        launch: of the step.
        block: of the grid.
    """
    nearest, best = (math.inf, math.inf), None
    for unrolled in range(free, -1, -1):
        placed = [Places.of(each, unrolled, launch, block) for each in _by_buffer(own)]
        known = [each for each in placed if each]
        if len(known) < len(placed):
            continue
        for widest, roomy in itertools.product((16, 8, 4, 2), (False, True)):
            chunks = [each.cut(widest, roomy=roomy) for each in known]
            apart = _difference(made.widths, sum((Counter(each.widths) for each in chunks), Counter()))
            if widest >= own[0].itemsize and apart < NEAR:
                how = round(abs(math.log(_runs(chunks) / sum(made.runs.values()))), 1), apart
                nearest, best = min((nearest, best), (how, chunks), key=lambda each: each[0])
    if best is None:
        return [count(access, launch, block) for access in own]
    expected = sum(len(each.cut) for each in best)
    more = max(1.0, made.widths.total() / expected / _times(made.widths.total(), expected))
    return [access for each in best for access in each.accesses(more)]


def _runs(chunks: Sequence[Chunks]) -> float:
    """How often a warp would run some instructions."""
    return sum(len(each.cut) * each.places.repeats * len(each.places.begins) for each in chunks)


def _difference(made: Counter[int], expected: Counter[int]) -> float:
    """By how much the instructions that are there differ from those that are expected, as a share of the latter.

    All of them may be there several times, or a part of them: where a loop is unrolled by a factor.
    """
    if not made:
        return math.inf
    times = _times(made.total(), expected.total())
    return sum(abs(made[w] / times - expected[w]) for w in made.keys() | expected.keys()) / expected.total()


def _times(made: int, expected: int) -> float:
    """How many times what is expected is there, as a whole number, or one over that."""
    ratio = made / expected
    return round(ratio) if ratio > 1 else 1 / round(1 / ratio)


def _by_buffer(own: Sequence[Access]) -> list[list[Access]]:
    found: defaultdict[Any, list[Access]] = defaultdict(list)
    for access in own:
        found[access.buffer].append(access)
    return list(found.values())
