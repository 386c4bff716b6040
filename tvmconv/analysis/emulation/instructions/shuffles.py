"""Between the lanes of a warp: who is elected, and what one gets of another's registers.

Source: PTX ISA, "elect.sync" and "shfl.sync".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.compiled import Code, Compiler, Run
from tvmconv.analysis.emulation.errors import ExecutionError
from tvmconv.analysis.emulation.instructions.operands import Call, Destinations
from tvmconv.analysis.emulation.machine import Machine, Mask
from tvmconv.analysis.emulation.threads import Lanes
from tvmconv.gpu import WARP


def elected(machine: Machine) -> Code:
    """elect.sync: 1 in the first lane of each warp that takes part, and 0 in the others."""

    def elect(mask: Mask) -> NDArray[np.int64]:
        taking = machine.real if mask is None else mask
        first = taking.reshape(-1, WARP).argmax(axis=1) + np.arange(0, len(taking), WARP)
        found = np.zeros(len(taking), np.int64)
        found[first] = 1
        return found * taking

    return elect


def _elect_sync(call: Call, compiler: Compiler) -> Run:
    """elect.sync lane|elected, mask: the mask is taken to be the lanes that are there."""
    destinations, machine = Destinations(call.operands[:2], compiler), compiler.machine
    elect = elected(machine)

    def run(mask: Mask) -> None:
        lanes, found = machine.lanes(mask), np.asarray(elect(mask))
        by_warp = found.reshape(-1, WARP)
        leader = np.repeat(by_warp.argmax(axis=1), WARP)
        columns = np.stack([leader[lanes], found[lanes]], axis=1).astype(np.uint8)
        destinations.write(mask, lanes, columns, loaded=False)

    return run


def _exchange(machine: Machine, value: Any, mode: str, by: Any, width: int, lanes: Lanes) -> NDArray[Any]:
    """What each lane gets of the others' values; from a lane that takes no part, poison."""
    everyone = machine.all_lanes
    values = np.broadcast_to(np.asarray(value), everyone.shape)
    by = np.broadcast_to(np.asarray(by), everyone.shape).astype(np.int64)
    lane = everyone % WARP
    segment = lane // width * width
    target = {"": segment + by % width, "_up": lane - by, "_down": lane + by, "_xor": lane ^ by}[mode]
    outside = (target < segment) | (target >= segment + width)
    source = everyone - lane + np.where(outside, lane, target)
    taking = np.zeros(len(everyone), bool)
    taking[lanes] = True
    found = values[source].copy()
    missing = ~taking[source] & taking
    if missing.any():
        if found.dtype.kind in "iub":
            raise ExecutionError("a shuffle from a lane that takes no part")
        found[missing] = np.nan
    return found


def shuffled(node: Any, compiler: Compiler) -> Code:
    """`__shfl_sync`, `__shfl_up_sync`, `__shfl_down_sync` and `__shfl_xor_sync`."""
    mode = str(node.op.name).removeprefix("tirx.cuda.__shfl").removesuffix("sync").removesuffix("_")
    value, by = compiler.code(node.args[1]), compiler.code(node.args[2])
    width = int(node.args[3]) if len(node.args) > 3 else WARP
    machine = compiler.machine
    itemsize = node.ty.dtype.itemsize

    def shuffle(mask: Mask) -> Any:
        lanes = machine.lanes(mask)
        found = _exchange(machine, value(mask), mode, by(mask), width, lanes)
        if machine.watch is not None:
            machine.watch.operation("shuffle", lanes, 1, itemsize)
        return found

    return shuffle


INSTRUCTIONS: dict[str, Callable[[Call, Compiler], Run]] = {"elect_sync": _elect_sync}
