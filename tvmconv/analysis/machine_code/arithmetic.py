"""Floating point in machine code: what an instruction multiplies and adds, and how long it keeps a lane busy."""

from __future__ import annotations

import math
import re

from tvmconv.analysis.machine_code.mix import MOVES, class_of
from tvmconv.compiler.listing import Instruction
from tvmconv.gpu import WARP, WARPGROUP

# Clocks of a lane of float32, and what a thread multiplies and adds. Two halves take a lane as long as one float32:
# "Arithmetic Instructions" in the CUDA C++ Programming Guide.
_LANES = {
    **{"FFMA": (1, 2), "FMUL": (1, 1), "FADD": (1, 1)},
    **{"FFMA2": (2, 4), "FMUL2": (2, 2), "FADD2": (2, 2)},  # of two float32 each
    **{"HFMA2": (1, 4), "HMUL2": (1, 2), "HADD2": (1, 2)},
}


def lane_clocks(instruction: Instruction) -> int:
    """Clocks that an instruction takes each of its warp's lanes of float32."""
    return _of_a_lane(instruction)[0]


def lane_flops(instruction: Instruction) -> int:
    """What the threads of a warp multiply and add by one instruction, tensor cores aside."""
    return WARP * _of_a_lane(instruction)[1]


def matrix_flops(instruction: Instruction) -> int:
    """What a warp multiplies and adds by one instruction: `HMMA.16816` its tile, `HGMMA.64x96x16` a quarter of it."""
    first = instruction.modifiers[0] if instruction.modifiers else ""
    if instruction.opcode == "HGMMA":
        return 2 * math.prod(map(int, first.split("x"))) // (WARPGROUP // WARP)
    if instruction.opcode == "HMMA" and (match := re.fullmatch(r"(16)(8)(\d+)", first)):
        return 2 * math.prod(map(int, match.groups()))
    return 0


def _of_a_lane(instruction: Instruction) -> tuple[int, int]:
    if instruction.opcode not in _LANES or class_of(instruction) == MOVES:
        return 0, 0
    clocks, flops = _LANES[instruction.opcode]
    widens = instruction.opcode == "HADD2" and "F32" in instruction.modifiers  # a half to float32
    return clocks, 0 if widens else flops
