"""Floating point in machine code: what an instruction multiplies and adds, and how long it keeps a lane busy."""

from __future__ import annotations

import math
import re

from tvmconv.analysis.sass.instruction_mix import MOVES, classify_instruction
from tvmconv.compiler.sass_listing import SassInstruction
from tvmconv.gpu_specs import WARP_SIZE, WARPGROUP_SIZE

# Clocks of a lane of float32, and what a thread multiplies and adds. Two halves take a lane as long as one float32:
# "Arithmetic Instructions" in the CUDA C++ Programming Guide.
_LANE_COSTS = {
    **{"FFMA": (1, 2), "FMUL": (1, 1), "FADD": (1, 1)},
    **{"FFMA2": (2, 4), "FMUL2": (2, 2), "FADD2": (2, 2)},  # of two float32 each
    **{"HFMA2": (1, 4), "HMUL2": (1, 2), "HADD2": (1, 2)},
}


def count_lane_clocks(instruction: SassInstruction) -> int:
    """Clocks that an instruction takes each of its warp's lanes of float32."""
    return _find_lane_cost(instruction)[0]


def count_lane_flops(instruction: SassInstruction) -> int:
    """What the threads of a warp multiply and add by one instruction, tensor cores aside."""
    return WARP_SIZE * _find_lane_cost(instruction)[1]


def count_matrix_flops(instruction: SassInstruction) -> int:
    """What a warp multiplies and adds by one instruction: `HMMA.16816` its tile, `HGMMA.64x96x16` a quarter of it."""
    shape_modifier = instruction.modifiers[0] if instruction.modifiers else ""
    if instruction.opcode == "HGMMA":
        return 2 * math.prod(map(int, shape_modifier.split("x"))) // (WARPGROUP_SIZE // WARP_SIZE)
    if instruction.opcode == "HMMA" and (match := re.fullmatch(r"(16)(8)(\d+)", shape_modifier)):
        return 2 * math.prod(map(int, match.groups()))
    return 0


def _find_lane_cost(instruction: SassInstruction) -> tuple[int, int]:
    if instruction.opcode not in _LANE_COSTS or classify_instruction(instruction) == MOVES:
        return 0, 0
    clocks, flops = _LANE_COSTS[instruction.opcode]
    is_conversion = instruction.opcode == "HADD2" and "F32" in instruction.modifiers  # a half to float32
    return clocks, 0 if is_conversion else flops
