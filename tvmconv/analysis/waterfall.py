"""Knob waterfall: the cumulative effect of the knobs between a schedule's default config and another config.

Each step sets the knob that lowers the estimated time most to its final value. The gain of a knob is computed again
only if the knob comes first by its previous gain (Minoux, "Accelerated greedy algorithms", 1978). For ten knobs some
thirty kernels are built instead of 55.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from tvmconv.analysis.block_accesses import count_block_accesses
from tvmconv.analysis.occupancy import compute_kernel_occupancy
from tvmconv.analysis.speed_of_light import compute_unit_times
from tvmconv.errors import Error
from tvmconv.kernel import Kernel, build_for_device
from tvmconv.space import Config, Value
from tvmconv.target import Target

MAX_BUILDS_PER_KNOB = 4  # after this many kernels per knob, the order is that of the gains computed so far


@dataclass(frozen=True)
class WaterfallStep:
    """One config of the waterfall."""

    # knobs that this step changes, with their new values. The first step changes none. A step changes several if the
    # configs between them make no valid kernel
    knobs: tuple[tuple[str, Value], ...]
    unit: str  # unit that takes the longest time
    seconds: float  # estimated seconds of that unit
    measured_seconds: float | None  # measured seconds per launch; None if unknown
    occupancy: float  # fraction of a multiprocessor's warps in use, the minimum over the device kernels
    registers: int  # registers per thread, the maximum over the device kernels
    wavefronts: int  # shared-memory wavefronts of the whole kernel
    sectors: int  # global-memory sectors of the whole kernel


def compute_waterfall(
    best: Kernel,
    device_spec: Target,
    find_measured_seconds: Callable[[Config], float | None] = lambda config: None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[WaterfallStep]:
    """Compute the steps from a schedule's default config to the config of a kernel."""

    def make_step(knobs: tuple[tuple[str, Value], ...], kernel: Kernel) -> WaterfallStep:
        return _describe_step(knobs, kernel, device_spec, find_measured_seconds(kernel.config))

    default = build_for_device(best.workload, best.schedule, best.device, None)
    current_config: Config = {**default.config}
    waterfall_steps = [make_step((), default)]
    remaining_knobs = [name for name, value in best.config.items() if current_config.get(name) != value]
    best_seconds = dict.fromkeys(remaining_knobs, -math.inf)  # last estimate with the knob at its final value
    remaining_builds = MAX_BUILDS_PER_KNOB * len(remaining_knobs)
    pending_changes: tuple[tuple[str, Value], ...] = ()  # changes that make no valid kernel without a later one
    while remaining_knobs:
        built_kernels: dict[str, Kernel | None] = {}
        while True:
            name = min(remaining_knobs, key=lambda knob: (best_seconds[knob], knob in built_kernels))
            if name in built_kernels or (remaining_builds <= 0 and best_seconds[name] > -math.inf):
                break
            on_progress(name)
            remaining_builds -= 1
            built_kernels[name], best_seconds[name] = None, math.inf
            with suppress(Error):  # the config makes no valid kernel, or the compiler rejects it
                kernel = _build_kernel(best, {**current_config, name: best.config[name]})
                built_kernels[name] = kernel
                best_seconds[name] = compute_unit_times(kernel, device_spec)[0].seconds
        current_config[name] = best.config[name]
        remaining_knobs.remove(name)
        pending_changes = (*pending_changes, (name, current_config[name]))
        if not remaining_knobs:
            waterfall_steps.append(make_step(pending_changes, best))
            break
        with suppress(Error):
            step_kernel = built_kernels[name] if name in built_kernels else _build_kernel(best, current_config)
            if step_kernel:
                waterfall_steps.append(make_step(pending_changes, step_kernel))
                pending_changes = ()
    return waterfall_steps


def _build_kernel(best: Kernel, config: Mapping[str, Value]) -> Kernel:
    return build_for_device(best.workload, best.schedule, best.device, config)


def _describe_step(
    knobs: tuple[tuple[str, Value], ...], kernel: Kernel, device_spec: Target, measured_seconds: float | None
) -> WaterfallStep:
    slowest_unit, *_ = compute_unit_times(kernel, device_spec)
    wavefronts = sectors = 0
    for lowered_kernel in kernel.timed_kernels:
        counts, blocks = count_block_accesses(kernel, lowered_kernel), math.prod(lowered_kernel.launch.grid)
        wavefronts += blocks * sum(access.wavefronts for access in counts.shared_accesses)
        sectors += blocks * sum(access.sectors for access in counts.global_accesses)
    return WaterfallStep(
        knobs=knobs,
        unit=slowest_unit.unit,
        seconds=slowest_unit.seconds,
        measured_seconds=measured_seconds,
        occupancy=min(
            compute_kernel_occupancy(kernel, lowered_kernel).warp_fraction for lowered_kernel in kernel.timed_kernels
        ),
        registers=max(kernel.cubin.kernels[lowered_kernel.name].registers for lowered_kernel in kernel.timed_kernels),
        wavefronts=int(wavefronts),
        sectors=int(sectors),
    )
