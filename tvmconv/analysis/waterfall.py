"""The knob waterfall: from a schedule's default config to another, one knob at a time, and what each knob buys.

The next knob is the one that lowers the least time most, when it is set to the value that it has in the end. What a
knob would buy is computed again only once it comes first by what it would have bought before (Minoux, "Accelerated
greedy algorithms", 1978): of ten knobs some thirty kernels are built, not fifty-five.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvmconv.analysis.asked import asked_by
from tvmconv.analysis.bounds import bounds
from tvmconv.analysis.occupancy import occupancy_of
from tvmconv.errors import Error
from tvmconv.kernel import Kernel, build_on
from tvmconv.knobs import Config, Value
from tvmconv.knowledge.features import Machine

BUILDS = 4  # kernels at most for each knob; after them the order is that of what was computed before


@dataclass(frozen=True)
class Fall:
    """A config on the way.

    Attributes:
        knobs: those that changed here, with their new values; none at the beginning, and several where the values
            between them make no kernel.
        unit: which takes the longest.
        seconds: the least time, by that unit.
        measured: seconds a launch, where it is known.
        occupancy: the share of a multiprocessor's warps, of the step that has the least.
        registers: a thread, of the step that has the most.
        wavefronts: of shared memory, in the whole kernel.
        sectors: of global memory, in the whole kernel.
    """

    knobs: tuple[tuple[str, Value], ...]
    unit: str
    seconds: float
    measured: float | None
    occupancy: float
    registers: int
    wavefronts: int
    sectors: int


def waterfall(
    best: Kernel,
    machine: Machine,
    measured: Callable[[Config], float | None] = lambda config: None,
    told: Callable[[str], None] = lambda text: None,
) -> list[Fall]:
    """The way from a schedule's default config to a kernel's.

    Args:
        best: the kernel in the end, for an NVIDIA architecture.
        machine: the GPU's numbers.
        measured: how long a config takes, where that is known.
        told: is called with what is being built.

    Raises:
        AnalysisError: what the first or the last kernel does cannot be counted.
        Error: the default config makes no kernel.
    """
    default = build_on(best.workload, best.schedule, best.device, None)
    now: Config = {**default.config}
    way = [_fall((), default, machine, measured)]
    waiting = [name for name, value in best.config.items() if now.get(name) != value]
    least: dict[str, float] = dict.fromkeys(waiting, -math.inf)  # of the kernel with it, as last computed
    left = BUILDS * len(waiting)
    carried: tuple[tuple[str, Value], ...] = ()  # knobs that make no kernel before another has changed, too
    while waiting:
        fresh: dict[str, Kernel | None] = {}
        while True:
            name = min(waiting, key=lambda each: (least[each], each in fresh))
            if name in fresh or (left <= 0 and least[name] > -math.inf):
                break
            told(name)
            left -= 1
            fresh[name] = _try(best, {**now, name: best.config[name]})
            least[name] = _seconds(fresh[name], machine)
        now[name] = best.config[name]
        waiting.remove(name)
        carried = (*carried, (name, now[name]))
        kernel = fresh[name] if name in fresh else _try(best, now)
        if not waiting:
            kernel = best
        fall = _maybe_fall(carried, kernel, machine, measured) if waiting else _fall(carried, best, machine, measured)
        if fall:
            way.append(fall)
            carried = ()
    return way


def _try(best: Kernel, config: Mapping[str, Value]) -> Kernel | None:
    """The kernel of a config; None if it makes none."""
    try:
        return build_on(best.workload, best.schedule, best.device, config)
    except Error:
        return None


def _seconds(kernel: Kernel | None, machine: Machine) -> float:
    if kernel is None:
        return math.inf
    try:
        return bounds(kernel, machine)[0].seconds
    except Error:
        return math.inf


def _maybe_fall(
    knobs: Sequence[tuple[str, Value]],
    kernel: Kernel | None,
    machine: Machine,
    measured: Callable[[Config], float | None],
) -> Fall | None:
    try:
        return _fall(knobs, kernel, machine, measured) if kernel else None
    except Error:  # what the compiler does not take is no step
        return None


def _fall(
    knobs: Sequence[tuple[str, Value]], kernel: Kernel, machine: Machine, measured: Callable[[Config], float | None]
) -> Fall:
    first, *_ = bounds(kernel, machine)
    blocks = [math.prod(step.launch.grid) for step in kernel.timed_steps]
    asks = [asked_by(kernel, step) for step in kernel.timed_steps]
    shared = [sum(each.wavefronts for each in one.shared) for one in asks]
    touched = [sum(each.sectors for each in one.touched) for one in asks]
    return Fall(
        knobs=tuple(knobs),
        unit=first.unit,
        seconds=first.seconds,
        measured=measured(kernel.config),
        occupancy=min(occupancy_of(kernel, step).share for step in kernel.timed_steps),
        registers=max(kernel.cubin.kernels[step.name].registers for step in kernel.timed_steps),
        wavefronts=int(sum(each * count for each, count in zip(shared, blocks, strict=True))),
        sectors=int(sum(each * count for each, count in zip(touched, blocks, strict=True))),
    )
