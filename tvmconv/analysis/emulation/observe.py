"""Executing blocks of a kernel's step on zeros, to see what they do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tvmconv.analysis.emulation.arguments import zeros
from tvmconv.analysis.emulation.blocks import Block
from tvmconv.analysis.emulation.execute import execute
from tvmconv.analysis.emulation.memory.arrays import Mapped

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.watch import Watch
    from tvmconv.compiler.lowered import LoweredStep


def observe(step: LoweredStep, arguments: Iterable[str], blocks: Sequence[Block], watch: Watch) -> None:
    """Execute some blocks of a step.

    Args:
        step: of a kernel.
        arguments: the names of the kernel's arrays, as in `kernel.spaces`.
        blocks: of the grid, as (x, y, z).
        watch: is told what they do, with the arrays under these names.

    Raises:
        AnalysisError: the step does what cannot be executed.
    """
    arrays, names = zeros(step), dict(enumerate(arguments))
    for index, each in zip(step.arguments, arrays, strict=True):
        array = each.array if isinstance(each, Mapped) else each
        array.name = names.get(index, array.name)
    execute(step.function, step.launch, arrays, blocks=blocks, watch=watch, checked=False)
