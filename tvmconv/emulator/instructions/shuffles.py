"""Instructions between the lanes of a warp: election of a lane, and shuffles of registers.

Source: PTX ISA, "elect.sync" and "shfl.sync".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions.operands import Instruction, executes
from tvmconv.emulator.lane_code import ExpressionCode, TirTranslator
from tvmconv.emulator.state import EmulatorState, Mask
from tvmconv.target import WARP_SIZE


def elect_lanes(state: EmulatorState, mask: Mask) -> NDArray[np.int64]:
    """Return 1 for the first active lane of each warp, and 0 for the others."""
    active = state.thread_mask if mask is None else mask
    first_lanes = active.reshape(-1, WARP_SIZE).argmax(axis=1) + np.arange(0, len(active), WARP_SIZE)
    is_elected = np.zeros(len(active), np.int64)
    is_elected[first_lanes] = 1
    return is_elected * active


@executes("elect_sync")
def _elect(op: Instruction, mask: Mask) -> None:
    """elect.sync lane|elected, mask: the mask is assumed to be that of the active lanes."""
    lanes, is_elected = op.state.find_lanes(mask), elect_lanes(op.state, mask)
    leader_lanes = np.repeat(is_elected.reshape(-1, WARP_SIZE).argmax(axis=1), WARP_SIZE)
    columns = np.stack([leader_lanes[lanes], is_elected[lanes]], axis=1).astype(np.uint8)
    op.write(mask, columns, depends_on_memory=False)


def translate_shuffle(node: Any, translator: TirTranslator) -> ExpressionCode:
    """Translate `__shfl_sync`, `__shfl_up_sync`, `__shfl_down_sync` and `__shfl_xor_sync`."""
    mode = str(node.op.name).removeprefix("tirx.cuda.__shfl").removesuffix("sync").removesuffix("_")
    value_code, lane_operand = map(translator.translate_expression, node.args[1:3])
    width = int(node.args[3]) if len(node.args) > 3 else WARP_SIZE
    state, itemsize = translator.state, node.ty.dtype.itemsize

    def shuffle(mask: Mask) -> NDArray[Any]:
        if state.observer is not None:
            state.observer.on_operation("shuffle", state.find_lanes(mask), 1, itemsize)
        return _exchange_values(state, value_code(mask), mode, lane_operand(mask), width, mask)

    return shuffle


def _exchange_values(
    state: EmulatorState, value: Any, mode: str, lane_operand: Any, width: int, mask: Mask
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
    active = state.thread_mask if mask is None else mask
    received = values[source_lanes].copy()
    is_missing = ~active[source_lanes] & active
    if is_missing.any():
        if received.dtype.kind in "iub":
            raise ExecutionError("a shuffle reads an integer from an inactive lane")
        received[is_missing] = np.nan
    return received
