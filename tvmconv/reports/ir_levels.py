"""The code of a kernel at each IR level, and the operations counted from it, as text."""

from __future__ import annotations

from tvmconv import kernel
from tvmconv.kernel import Kernel

TRAFFIC_LEVEL = "traffic"  # loads, stores and FLOP of a block
IR_LEVELS = (*kernel.IR_LEVELS, TRAFFIC_LEVEL)


def format_ir_level(built_kernel: Kernel, name: str, *, is_full: bool = False) -> str:
    """Return a kernel's text at one of `IR_LEVELS`.

    Args:
        built_kernel: The kernel.
        name: Name of the level.
        is_full: As for `Kernel.format_ir_level`.

    Raises:
        AnalysisError: The kernel's operations cannot be counted.
        CompileError: The level does not exist for the kernel's target.
        ValueError: `name` is not a level.
    """
    if name != TRAFFIC_LEVEL:
        return built_kernel.format_ir_level(name, full=is_full)
    from tvmconv.analysis.memory.traffic import count_traffic
    from tvmconv.reports.traffic import format_text

    return "\n\n".join(
        built_kernel.add_kernel_title(lowered_kernel, format_text(count_traffic(built_kernel, lowered_kernel)))
        for lowered_kernel in built_kernel.kernels
    )
