"""A kernel at any stage of its way, and what is counted from its code, as text."""

from __future__ import annotations

from tvmconv import kernel
from tvmconv.kernel import Kernel

TRAFFIC_LEVEL = "traffic"  # what a block loads, stores and computes
IR_LEVELS = (*kernel.IR_LEVELS, TRAFFIC_LEVEL)


def format_ir_level(built_kernel: Kernel, name: str, *, is_full: bool = False) -> str:
    """One of `IR_LEVELS` of a kernel.

    Args:
        built_kernel: the kernel.
        name: of the stage.
        is_full: as for `Kernel.format_ir_level`.

    Raises:
        AnalysisError: what the kernel does cannot be counted.
        CompileError: the stage does not exist for the kernel's target.
        ValueError: `name` is not a stage.
    """
    if name != TRAFFIC_LEVEL:
        return built_kernel.format_ir_level(name, full=is_full)
    from tvmconv.analysis.memory.traffic import count_traffic
    from tvmconv.reports.traffic import format_text

    return "\n\n".join(
        built_kernel.add_kernel_title(lowered_kernel, format_text(count_traffic(built_kernel, lowered_kernel)))
        for lowered_kernel in built_kernel.kernels
    )
