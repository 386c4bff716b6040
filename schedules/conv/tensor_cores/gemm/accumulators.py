"""Accumulators of tensor cores, and the float32 sums that they become.

Accumulators of integers are int32. Those of 8-bit floats keep fewer bits than float32 has, and are added to a second
set of registers every so many products (promotion); `tvmconv.workloads.quantization` derives the error.

Source: CUTLASS, `include/cutlass/gemm/collective/fp8_accumulation.hpp`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads.dtypes import ACCUMULATOR

from ....tir_builder import Buffer, Expr, allocate, fill_zeros, store, unrolled_loop


@dataclass(frozen=True)
class Accumulators:
    """The accumulators of a thread."""

    registers: Buffer  # operands of the instructions
    count: int  # number of registers
    dtype: str  # float32 or int32
    promoted: Buffer | None  # float32 sums to which the registers are added; None if the registers are the sums
    has_integer_output: bool  # whether sums are stored as integers, without an epilogue

    @classmethod
    def allocate(
        cls,
        count: int,
        dtype: str,
        output_dtype: str = ACCUMULATOR,
        promoted: Buffer | None = None,
        num_buffers: int = 1,
    ) -> Accumulators:
        """Allocate the registers.

        Args:
            count: Number of accumulators.
            dtype: Type of the accumulators.
            output_dtype: Type of the output.
            promoted: Float32 sums, if the accumulators are added to a second set of registers.
            num_buffers: Number of sets of accumulators that are promoted in turn.
        """
        stored_dtype = "uint32" if dtype == "int32" else dtype  # the bits, as TVM's table of PTX has them
        name = "accumulators" if promoted is None else "products"
        registers = allocate(name, num_buffers * count, stored_dtype)
        return cls(registers, count, dtype, promoted, output_dtype == "int32")

    def clear(self) -> None:
        """Set the accumulators to zero."""
        zero = T.float32(0) if self.dtype == ACCUMULATOR else T.uint32(0)
        with unrolled_loop(self.count, "i") as i:
            store(self.registers, i, zero)

    def clear_promoted(self) -> None:
        """Set the promoted sums to zero."""
        assert self.promoted is not None
        fill_zeros(self.promoted, self.count)

    def promote(self, buffer: int = 0) -> None:
        """Add the accumulators to the promoted sums; integers that are stored as they are replace them.

        Args:
            buffer: Index of the set of accumulators.
        """
        promoted = self.promoted
        assert promoted is not None
        with unrolled_loop(self.count, "i") as i:
            value = self._widen(i + buffer * self.count if buffer else i)
            store(promoted, i, value if self.has_integer_output else promoted[i] + value)

    def list_sums(self) -> list[Expr]:
        """Return all sums in float32, or the bits of integers that are stored as they are."""
        promoted = self.promoted
        return [self._widen(i) if promoted is None else promoted[i] for i in range(self.count)]

    def _widen(self, index: Expr) -> Expr:
        """Return an accumulator in float32, or the bits of an integer that is stored as it is."""
        value = self.registers[index]
        if self.dtype == ACCUMULATOR:
            return value
        if self.has_integer_output:
            return T.reinterpret(ACCUMULATOR, value)
        return T.Cast(ACCUMULATOR, T.reinterpret("int32", value))
