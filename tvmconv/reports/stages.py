"""A kernel at any stage of its way, and what is counted from its code, as text."""

from __future__ import annotations

from tvmconv import kernel
from tvmconv.kernel import Kernel

TRAFFIC = "traffic"  # what a block loads, stores and computes
STAGES = (*kernel.STAGES, TRAFFIC)


def stage_text(built: Kernel, name: str, *, full: bool = False) -> str:
    """One of `STAGES` of a kernel.

    Args:
        built: the kernel.
        name: of the stage.
        full: as for `Kernel.stage`.

    Raises:
        AnalysisError: what the kernel does cannot be counted.
        CompileError: the stage does not exist for the kernel's target.
        ValueError: `name` is not a stage.
    """
    if name != TRAFFIC:
        return built.stage(name, full=full)
    from tvmconv.analysis.memory.traffic import traffic
    from tvmconv.reports.traffic import text

    return "\n\n".join(built.titled(step, text(traffic(built, step))) for step in built.steps)
