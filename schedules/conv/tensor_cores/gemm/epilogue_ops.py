"""Operations of an epilogue, applied to accumulators in registers before they are stored.

Each operation is one file of `tvmconv/workloads/epilogues`, with its declaration, its reference and the expression that
all kernels emit. This module decides where the arguments come from, and rounds the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvmconv.workloads import epilogue
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.dtypes import INT8, get_itemsize

from ....tir_builder import Buffer, Expr, Register, load_global, pack, store, unpack
from .int8_rounding import Int8Rounding


@dataclass(frozen=True)
class EpilogueOps:
    """The operations of an epilogue in order, and the dtype to which results are rounded."""

    ops: tuple[epilogue.EpilogueOp, ...]  # the operations
    dtype: str  # storage dtype of the output and of residuals
    # Rounding to int8, which computes `quantize` and `zero_point`; None before these operations are bound.
    int8_rounding: Int8Rounding | None = None

    @classmethod
    def from_workload(cls, w: ConvOperator) -> EpilogueOps:
        """Return the epilogue of a convolution, without the operation `stats`, which leaves the results as they are."""
        ops = tuple(op for op in epilogue.get_ops(w.epilogue) if op.name != epilogue.STATS)
        return cls(ops, w.argument_dtypes[-1])

    def bind_tensor_args(self, arguments: Mapping[str, Buffer], *, uses_registers: bool) -> EpilogueOps:
        """Return the same epilogue, in which arguments of one number are part of the operations.

        Args:
            arguments: Argument buffers by name.
            uses_registers: Whether a register of each thread holds a number, which is loaded here.
        """

        def bind(op: epilogue.EpilogueOp) -> epilogue.EpilogueOp:
            if op.argument_kind != "tensor":
                return op
            number = arguments[op.name][0]
            if uses_registers:
                number = Register(op.name, "float32", number).value
            return dataclasses.replace(op, argument_kind=None, compute=lambda value: op.compute(value, number))

        rounding = {op.name for op in self.ops} & {epilogue.QUANTIZE, epilogue.ZERO_POINT}
        if self.dtype != INT8.name or not rounding:
            return self.replace_ops([bind(op) for op in self.ops])
        ops = tuple(bind(op) for op in self.ops if op.name not in rounding)
        int8_rounding = Int8Rounding.bind([*rounding], arguments, uses_registers=uses_registers)
        return EpilogueOps(ops, self.dtype, int8_rounding)

    def replace_ops(self, ops: Sequence[epilogue.EpilogueOp]) -> EpilogueOps:
        """Return the same epilogue with other operations."""
        return dataclasses.replace(self, ops=tuple(ops))

    @property
    def channel_args(self) -> list[str]:
        """Names of the arguments with one number per output channel."""
        return [op.name for op in self.ops if op.argument_kind == "channel"]

    @property
    def residuals(self) -> list[str]:
        """Names of the arguments with the shape of the output."""
        return [op.name for op in self.ops if op.argument_kind == "output"]

    @property
    def fuses_relu(self) -> bool:
        """Whether the conversion to the output dtype applies a ReLU, at no cost.

        The ReLU is the last operation of 16-bit results. Those of 8 bits have `quantize` behind it, whose factor is
        positive and may come first.
        """
        return bool(self._relu_end) and tuple(op.name for op in self.ops)[-len(self._relu_end) :] == self._relu_end

    @property
    def _relu_end(self) -> tuple[str, ...]:
        """Names of the last operations of an epilogue whose conversion may apply a ReLU; empty if none may."""
        if self.int8_rounding:
            return ("relu",)
        return {2: ("relu",), 1: ("relu", epilogue.QUANTIZE)}.get(get_itemsize(self.dtype), ())

    @property
    def computed_ops(self) -> tuple[epilogue.EpilogueOp, ...]:
        """The operations that `pack` does not apply."""
        relu = len(self.ops) - len(self._relu_end)
        return self.ops[:relu] + self.ops[relu + 1 :] if self.fuses_relu else self.ops

    def apply(self, value: Expr, read: Callable[[str], Expr]) -> Expr:
        """Return a value after the operations that `pack` does not apply.

        Args:
            value: The value, in float32.
            read: Function from an operation's name to its argument for this output.
        """
        for op in self.computed_ops:
            value = op.compute(value, read(op.name)) if op.argument_kind else op.compute(value)
        return value

    def pack(self, registers: Buffer, first_register: int, values: Sequence[Expr]) -> None:
        """Round values to the output dtype and pack them into 32-bit registers."""
        if self.dtype == INT8.name:
            assert self.int8_rounding
            self.int8_rounding.pack(registers, first_register, values, applies_relu=self.fuses_relu)
            return
        pack(registers, first_register, values, self.dtype, self.fuses_relu)


def apply_to_columns(
    ops: EpilogueOps,
    accumulators: Sequence[Expr],
    channel_values: Mapping[str, Sequence[Expr]],
    residuals: Mapping[str, Sequence[Expr]],
    values: Buffer,
    packed: Buffer,
    first_register: int = 0,
) -> None:
    """Apply an epilogue to two or four neighbouring columns of a fragment, and pack the rounded results.

    Args:
        ops: The epilogue.
        accumulators: The accumulators.
        channel_values: Per-channel arguments of the columns by name.
        residuals: Elements of residuals by name, packed into 32-bit registers as the results will be.
        values: As many float32 registers.
        packed: uint32 registers that receive the results.
        first_register: First register of `packed` that is written.
    """
    count = len(accumulators)
    arguments = {**channel_values, **{name: unpack(words, count, ops.dtype) for name, words in residuals.items()}}
    for e in range(count):
        store(values, e, ops.apply(accumulators[e], lambda name, e=e: arguments[name][e]))  # type: ignore[misc]
    ops.pack(packed, first_register, [values[e] for e in range(count)])


def load_argument(
    op: epilogue.EpilogueOp,
    arguments: Mapping[str, Buffer],
    dtype: str,
    channel: Expr,
    output_index: Expr,
    num_channels: int,
    registers: Buffer,
) -> list[Expr]:
    """Load an operation's argument for neighbouring output channels of a pixel.

    Args:
        op: The operation.
        arguments: Argument buffers by name, channels last.
        dtype: Dtype of a residual.
        channel: First output channel, a multiple of `num_channels`.
        output_index: Index of the first output element.
        num_channels: Number of channels.
        registers: At least 8 uint32 registers; they hold the loaded values until the next load.

    Returns:
        The elements, in the accumulation dtype.
    """
    is_per_channel = op.argument_kind == "channel"
    load_global(registers, arguments[op.name], channel if is_per_channel else output_index, num_channels)
    return unpack(registers, num_channels, "float32" if is_per_channel else dtype)


def apply_to_vector(
    epilogue_ops: EpilogueOps,
    arguments: Mapping[str, Buffer],
    channel: Expr,
    output_index: Expr,
    num_channels: int,
    accumulators: Buffer,
    registers: Buffer,
    prefetched: Mapping[str, Buffer] | None = None,
) -> None:
    """Apply an epilogue to the accumulators of neighbouring channels of a pixel, and round them.

    Args:
        epilogue_ops: The epilogue.
        arguments: Argument buffers by name, channels last.
        channel: First output channel.
        output_index: Index of the first output element.
        num_channels: Number of channels.
        accumulators: Accumulators in float32; the unrounded results replace them.
        registers: At least 8 uint32 registers, which receive the packed results.
        prefetched: Residuals that were loaded earlier, by name, in the format of `registers`.
    """
    for op in epilogue_ops.computed_ops:
        values: list[Expr] = []
        if prefetched and op.name in prefetched:
            values = unpack(prefetched[op.name], num_channels, epilogue_ops.dtype)
        elif op.argument_kind:
            values = load_argument(op, arguments, epilogue_ops.dtype, channel, output_index, num_channels, registers)
        for e in range(num_channels):
            store(accumulators, e, op.compute(accumulators[e], *values[e : e + 1]))
    epilogue_ops.pack(registers, 0, [accumulators[e] for e in range(num_channels)])


def apply_to_pixels(
    epilogue_ops: EpilogueOps,
    arguments: Mapping[str, Buffer],
    channel: Expr,
    output_index: Expr,
    num_pixels: int,
    accumulators: Buffer,
    registers: Buffer,
    prefetched: Mapping[str, Buffer] | None = None,
) -> None:
    """Apply an epilogue to the accumulators of neighbouring pixels of a channel, and round them.

    The arguments are those of `apply_to_vector`, but the output and residuals are channels first.
    """
    for op in epilogue_ops.computed_ops:
        values: list[Expr] = []
        if prefetched and op.name in prefetched:
            values = unpack(prefetched[op.name], num_pixels, epilogue_ops.dtype)
        elif op.argument_kind == "channel":
            values = load_argument(op, arguments, epilogue_ops.dtype, channel, output_index, 1, registers) * num_pixels
        elif op.argument_kind:
            values = load_argument(op, arguments, epilogue_ops.dtype, channel, output_index, num_pixels, registers)
        for e in range(num_pixels):
            store(accumulators, e, op.compute(accumulators[e], *values[e : e + 1]))
    epilogue_ops.pack(registers, 0, [accumulators[e] for e in range(num_pixels)])
