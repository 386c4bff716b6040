"""Instructions between the lanes of a warp: election of a lane, and shuffles of registers.

Source: PTX ISA, "elect.sync" and "shfl.sync".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions.operands import DestinationOperands, PtxCall
from tvmconv.emulator.lane_code import ExpressionCode, StatementCode, TirTranslator
from tvmconv.emulator.state import EmulatorState, Mask
from tvmconv.emulator.threads import Lanes
from tvmconv.target import WARP_SIZE


def make_election(state: EmulatorState) -> ExpressionCode:
    """elect.sync: 1 in the first active lane of each warp, and 0 in the others."""

    def elect(mask: Mask) -> NDArray[np.int64]:
        active = state.thread_mask if mask is None else mask
        first_lanes = active.reshape(-1, WARP_SIZE).argmax(axis=1) + np.arange(0, len(active), WARP_SIZE)
        is_elected = np.zeros(len(active), np.int64)
        is_elected[first_lanes] = 1
        return is_elected * active

    return elect


def _translate_elect_sync(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """elect.sync lane|elected, mask: the mask is assumed to be that of the active lanes."""
    destinations, state = DestinationOperands(call.operands[:2], translator), translator.state
    elect = make_election(state)

    def run(mask: Mask) -> None:
        lanes, is_elected = state.find_lanes(mask), np.asarray(elect(mask))
        elected_by_warp = is_elected.reshape(-1, WARP_SIZE)
        leader_lanes = np.repeat(elected_by_warp.argmax(axis=1), WARP_SIZE)
        columns = np.stack([leader_lanes[lanes], is_elected[lanes]], axis=1).astype(np.uint8)
        destinations.write(mask, lanes, columns, depends_on_memory=False)

    return run


def _exchange_values(
    state: EmulatorState, value: Any, mode: str, lane_operand: Any, width: int, lanes: Lanes
) -> NDArray[Any]:
    """Return the value that each lane receives; from an inactive lane it is NaN."""
    all_lanes = state.all_lanes
    values = np.broadcast_to(np.asarray(value), all_lanes.shape)
    lane_operand = np.broadcast_to(np.asarray(lane_operand), all_lanes.shape).astype(np.int64)
    lane = all_lanes % WARP_SIZE
    segment_start = lane // width * width
    target_lanes = {
        "": segment_start + lane_operand % width,
        "_up": lane - lane_operand,
        "_down": lane + lane_operand,
        "_xor": lane ^ lane_operand,
    }[mode]
    is_outside = (target_lanes < segment_start) | (target_lanes >= segment_start + width)
    source_lanes = all_lanes - lane + np.where(is_outside, lane, target_lanes)
    is_active = np.zeros(len(all_lanes), bool)
    is_active[lanes] = True
    received = values[source_lanes].copy()
    is_missing = ~is_active[source_lanes] & is_active
    if is_missing.any():
        if received.dtype.kind in "iub":
            raise ExecutionError("a shuffle reads an integer from an inactive lane")
        received[is_missing] = np.nan
    return received


def translate_shuffle(node: Any, translator: TirTranslator) -> ExpressionCode:
    """Translate `__shfl_sync`, `__shfl_up_sync`, `__shfl_down_sync` and `__shfl_xor_sync`."""
    mode = str(node.op.name).removeprefix("tirx.cuda.__shfl").removesuffix("sync").removesuffix("_")
    value_code, lane_operand = map(translator.translate_expression, node.args[1:3])
    width = int(node.args[3]) if len(node.args) > 3 else WARP_SIZE
    state = translator.state
    itemsize = node.ty.dtype.itemsize

    def shuffle(mask: Mask) -> Any:
        lanes = state.find_lanes(mask)
        received = _exchange_values(state, value_code(mask), mode, lane_operand(mask), width, lanes)
        if state.observer is not None:
            state.observer.on_operation("shuffle", lanes, 1, itemsize)
        return received

    return shuffle


INSTRUCTIONS: dict[str, Callable[[PtxCall, TirTranslator], StatementCode]] = {"elect_sync": _translate_elect_sync}
