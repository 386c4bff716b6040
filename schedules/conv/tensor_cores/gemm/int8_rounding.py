"""Rounding of an epilogue's results to int8 by few instructions.

A result times a factor has to be rounded to the nearest even integer, shifted by a zero point, and saturated.

* `fma.rn.sat.f32` multiplies by the factor times 2^-24, adds 0.75, rounds once, and limits the result to [0, 1]. Floats
  in [0.5, 1) are multiples of 2^-24. Their bits are thus those of 0.75 plus the rounded product, if that is smaller
  than 2^22. Larger products give larger bits, which never wrap: infinities become 0 and 1, and NaN becomes 0.
* An addition of integers subtracts the bits of 0.75 and adds the zero point. Where a ReLU comes before, Hopper adds and
  takes the maximum by one instruction.
* `cvt.pack.sat` saturates two integers at a time.

With the conversion of an int32 sum and its scale, a result takes four instructions and a half.

Source: PTX ISA, "fma" and "cvt.pack" (from sm_72 on).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import te
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads.epilogue import QUANTIZE, ZERO_POINT

from ....tir_builder import Buffer, Expr, Register, allocate, emit_ptx

STEP = 2.0**-24  # of float32 numbers in [0.5, 1)
CENTER = 0.75  # what stands for zero
CENTER_BITS = int(np.float32(CENTER).view(np.int32))
WORD_RESULTS = 4  # results in a register


@dataclass(frozen=True)
class Int8Rounding:
    """The factor and the zero point of the rounding."""

    step_factor: Expr  # factor of the results, times `STEP`
    zero_point: Expr  # integer that is added to rounded results
    offset: Expr  # the zero point, less the bits of `CENTER`

    @classmethod
    def bind(cls, names: Sequence[str], arguments: Mapping[str, Buffer], *, uses_registers: bool) -> Int8Rounding:
        """Return the rounding of an epilogue.

        Args:
            names: Names of the epilogue's last operations: `quantize`, and `zero_point` if there is one.
            arguments: Argument buffers by name.
            uses_registers: Whether registers of each thread hold the numbers, which are loaded here.
        """

        def keep(name: str, dtype: str, value: Expr) -> Expr:
            return Register(name, dtype, value).value if uses_registers else value

        step_factor = keep("step_factor", "float32", arguments[QUANTIZE][0] * T.float32(STEP))
        if ZERO_POINT not in names:
            return cls(step_factor, T.int32(0), T.int32(-CENTER_BITS))
        zero_point = keep("rounded_zero_point", "int32", T.Cast("int32", arguments[ZERO_POINT][0]))
        return cls(step_factor, zero_point, keep("rounding_offset", "int32", zero_point - T.int32(CENTER_BITS)))

    def pack(self, registers: Buffer, first_register: int, values: Sequence[Expr], *, applies_relu: bool) -> None:
        """Round values and pack them, four to a 32-bit register.

        Args:
            registers: Destination registers, an array of uint32.
            first_register: Index of the first destination register.
            values: Values in float32.
            applies_relu: Whether negative values become zero.
        """
        bits = allocate("centered", WORD_RESULTS, "float32")
        for first in range(0, len(values), WORD_RESULTS):
            word = values[first : first + WORD_RESULTS]
            for e, value in enumerate(word):
                emit_ptx("fma.rn.sat.f32", bits[e], value, self.step_factor, T.float32(CENTER))
            integers = [self._read_integer(bits[e], applies_relu=applies_relu) for e in range(len(word))]
            integers += [T.int32(0)] * (-len(word) % 2)
            register = registers[first_register + first // WORD_RESULTS]
            upper: Expr = T.uint32(0)
            for pair in reversed(range(0, len(integers), 2)):
                emit_ptx("cvt_pack.sat.s8.s32.b32", register, integers[pair + 1], integers[pair], upper)
                upper = register

    def _read_integer(self, bits: Expr, *, applies_relu: bool) -> Expr:
        """Return the rounded integer that the result of the fma stands for, which is not saturated yet."""
        integer = T.reinterpret("int32", bits) + self.offset
        return te.max(integer, self.zero_point) if applies_relu else integer
