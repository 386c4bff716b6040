"""The knob waterfall: from a schedule's default config to another, one knob at a time, and what each knob buys.

The next knob is the one that lowers the least time most, when it is set to the value that it has in the end. What a
knob would buy is computed again only once it comes first by what it would have bought before (Minoux, "Accelerated
greedy algorithms", 1978): of ten knobs some thirty kernels are built, not fifty-five.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvmconv.analysis.block_accesses import count_block_accesses
from tvmconv.analysis.occupancy import compute_kernel_occupancy
from tvmconv.analysis.speed_of_light import compute_unit_times
from tvmconv.cost_model.features import DeviceSpec
from tvmconv.errors import Error
from tvmconv.kernel import Kernel, build_for_device
from tvmconv.space import Config, Value

MAX_BUILDS_PER_KNOB = 4  # kernels at most for each knob; after them the order is that of what was computed before


@dataclass(frozen=True)
class WaterfallStep:
    """A config on the way.

    Attributes:
        knobs: those that changed here, with their new values; none at the beginning, and several where the values
            between them make no kernel.
        unit: which takes the longest.
        seconds: the least time, by that unit.
        measured_seconds: seconds a launch, where it is known.
        occupancy: the share of a multiprocessor's warps, of the step that has the least.
        registers: a thread, of the step that has the most.
        wavefronts: of shared memory, in the whole kernel.
        sectors: of global memory, in the whole kernel.
    """

    knobs: tuple[tuple[str, Value], ...]
    unit: str
    seconds: float
    measured_seconds: float | None
    occupancy: float
    registers: int
    wavefronts: int
    sectors: int


def compute_waterfall(
    best: Kernel,
    device_spec: DeviceSpec,
    find_measured_seconds: Callable[[Config], float | None] = lambda config: None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[WaterfallStep]:
    """The way from a schedule's default config to a kernel's.

    Args:
        best: the kernel in the end, for an NVIDIA architecture.
        device_spec: the GPU's numbers.
        find_measured_seconds: how long a config takes, where that is known.
        on_progress: is called with what is being built.

    Raises:
        AnalysisError: what the first or the last kernel does cannot be counted.
        Error: the default config makes no kernel.
    """
    default = build_for_device(best.workload, best.schedule, best.device, None)
    current_config: Config = {**default.config}
    waterfall_steps = [_make_step((), default, device_spec, find_measured_seconds)]
    remaining_knobs = [name for name, value in best.config.items() if current_config.get(name) != value]
    best_seconds: dict[str, float] = dict.fromkeys(
        remaining_knobs, -math.inf
    )  # of the kernel with it, as last computed
    remaining_builds = MAX_BUILDS_PER_KNOB * len(remaining_knobs)
    pending_changes: tuple[tuple[str, Value], ...] = ()  # knobs that make no kernel before another has changed, too
    while remaining_knobs:
        built_kernels: dict[str, Kernel | None] = {}
        while True:
            name = min(remaining_knobs, key=lambda knob: (best_seconds[knob], knob in built_kernels))
            if name in built_kernels or (remaining_builds <= 0 and best_seconds[name] > -math.inf):
                break
            on_progress(name)
            remaining_builds -= 1
            built_kernels[name] = _build_kernel(best, {**current_config, name: best.config[name]})
            best_seconds[name] = _estimate_seconds(built_kernels[name], device_spec)
        current_config[name] = best.config[name]
        remaining_knobs.remove(name)
        pending_changes = (*pending_changes, (name, current_config[name]))
        kernel = built_kernels[name] if name in built_kernels else _build_kernel(best, current_config)
        if not remaining_knobs:
            kernel = best
        waterfall_step = (
            _try_make_step(pending_changes, kernel, device_spec, find_measured_seconds)
            if remaining_knobs
            else _make_step(pending_changes, best, device_spec, find_measured_seconds)
        )
        if waterfall_step:
            waterfall_steps.append(waterfall_step)
            pending_changes = ()
    return waterfall_steps


def _build_kernel(best: Kernel, config: Mapping[str, Value]) -> Kernel | None:
    """The kernel of a config; None if it makes none."""
    try:
        return build_for_device(best.workload, best.schedule, best.device, config)
    except Error:
        return None


def _estimate_seconds(kernel: Kernel | None, device_spec: DeviceSpec) -> float:
    if kernel is None:
        return math.inf
    try:
        return compute_unit_times(kernel, device_spec)[0].seconds
    except Error:
        return math.inf


def _try_make_step(
    knobs: Sequence[tuple[str, Value]],
    kernel: Kernel | None,
    device_spec: DeviceSpec,
    find_measured_seconds: Callable[[Config], float | None],
) -> WaterfallStep | None:
    try:
        return _make_step(knobs, kernel, device_spec, find_measured_seconds) if kernel else None
    except Error:  # what the compiler does not take is no step
        return None


def _make_step(
    knobs: Sequence[tuple[str, Value]],
    kernel: Kernel,
    device_spec: DeviceSpec,
    find_measured_seconds: Callable[[Config], float | None],
) -> WaterfallStep:
    slowest_unit, *_ = compute_unit_times(kernel, device_spec)
    blocks = [math.prod(lowered_kernel.launch.grid) for lowered_kernel in kernel.timed_kernels]
    access_counts = [count_block_accesses(kernel, lowered_kernel) for lowered_kernel in kernel.timed_kernels]
    wavefronts_per_block = [
        sum(item.wavefronts for item in kernel_counts.shared_accesses) for kernel_counts in access_counts
    ]
    sectors_per_block = [sum(item.sectors for item in kernel_counts.global_accesses) for kernel_counts in access_counts]
    return WaterfallStep(
        knobs=tuple(knobs),
        unit=slowest_unit.unit,
        seconds=slowest_unit.seconds,
        measured_seconds=find_measured_seconds(kernel.config),
        occupancy=min(
            compute_kernel_occupancy(kernel, lowered_kernel).warp_fraction for lowered_kernel in kernel.timed_kernels
        ),
        registers=max(kernel.cubin.kernels[lowered_kernel.name].registers for lowered_kernel in kernel.timed_kernels),
        wavefronts=int(sum(item * count for item, count in zip(wavefronts_per_block, blocks, strict=True))),
        sectors=int(sum(item * count for item, count in zip(sectors_per_block, blocks, strict=True))),
    )
