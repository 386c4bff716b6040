"""Floating-point arithmetic of SASS instructions: the operations of an instruction, and its clocks per lane."""

from __future__ import annotations

import math
import re

from tvmconv.analysis.sass.instruction_mix import MOVES, classify_instruction
from tvmconv.compiler.sass_listing import SassInstruction
from tvmconv.gpu_specs import WARP_SIZE, WARPGROUP_SIZE

# Clocks per float32 lane, and operations per thread. Two halves take a lane as long as one float32: "Arithmetic
# Instructions" in the CUDA C++ Programming Guide.
_LANE_COSTS = {
    **{"FFMA": (1, 2), "FMUL": (1, 1), "FADD": (1, 1)},
    **{"FFMA2": (2, 4), "FMUL2": (2, 2), "FADD2": (2, 2)},  # two float32 each
    **{"HFMA2": (1, 4), "HMUL2": (1, 2), "HADD2": (1, 2)},
}


def count_lane_clocks(instruction: SassInstruction) -> int:
    """Return the clocks that an instruction takes in each float32 lane of its warp."""
    return _find_lane_cost(instruction)[0]


def count_lane_flops(instruction: SassInstruction) -> int:
    """Return the multiplications and additions of an instruction of one warp, tensor cores excluded."""
    return WARP_SIZE * _find_lane_cost(instruction)[1]


def count_matrix_flops(instruction: SassInstruction) -> int:
    """Return a warp's tensor-core multiplications and additions: the tile of `HMMA.16816`, a quarter of `HGMMA`'s."""
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
    is_conversion = instruction.opcode == "HADD2" and "F32" in instruction.modifiers  # converts a half to float32
    return clocks, 0 if is_conversion else flops
