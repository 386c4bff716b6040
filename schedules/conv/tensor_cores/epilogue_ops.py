"""Epilogue operations of tensor-core kernels: applied to the accumulators of neighbouring channels before the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.workloads import Conv, epilogue

from ...tir_builder import Buffer, Expr, load_global, pack, store, unpack


def read_argument(
    w: Conv,
    arguments: dict[str, Buffer],
    operation: epilogue.EpilogueOp,
    m: Expr,
    o: Expr,
    num_channels: int,
    registers: Buffer,
) -> list[Expr]:
    """Load an epilogue operation's argument for neighbouring output channels of a pixel.

    Args:
        w: The workload, in NHWC.
        arguments: Argument buffers by name.
        operation: Epilogue operation that takes an argument.
        m: Index of the pixel in the whole batch.
        o: First output channel, a multiple of `num_channels`.
        num_channels: Number of channels.
        registers: At least 8 uint32 registers; they hold the loaded values until the next load.

    Returns:
        The elements, in the accumulation dtype.
    """
    is_per_channel = operation.argument_kind == "channel"
    dtype = "float32" if is_per_channel else w.storage
    load_global(registers, arguments[operation.name], o if is_per_channel else m * w.O + o, num_channels)
    return unpack(registers, num_channels, dtype)


def apply_epilogue(
    w: Conv,
    arguments: dict[str, Buffer],
    operations: Sequence[epilogue.EpilogueOp],
    m: Expr,
    o: Expr,
    num_channels: int,
    accumulators: Buffer,
    registers: Buffer,
    prefetched: Mapping[str, Buffer] | None = None,
) -> None:
    """Apply epilogue operations to the accumulators of neighbouring channels and round them to the storage dtype.

    Args:
        w: The workload, in NHWC.
        arguments: Argument buffers by name.
        operations: Epilogue operations, in order.
        m: Index of the pixel in the whole batch.
        o: First output channel.
        num_channels: Number of channels.
        accumulators: Accumulators in float32; the unrounded results replace them.
        registers: At least 8 uint32 registers, which receive the packed results.
        prefetched: Arguments that were loaded earlier, by name, in the format of `registers`.
    """
    remaining_ops, relu = split_trailing_relu(operations, w.storage)
    for operation in remaining_ops:
        argument_values = None
        if prefetched and operation.name in prefetched:
            argument_values = unpack(prefetched[operation.name], num_channels, w.storage)
        elif operation.argument_kind:
            argument_values = read_argument(w, arguments, operation, m, o, num_channels, registers)
        for e in range(num_channels):
            value = [argument_values[e]] if argument_values else []
            store(accumulators, e, operation.compute(accumulators[e], *value))
    pack(registers, 0, [accumulators[e] for e in range(num_channels)], w.storage, relu)


def split_trailing_relu(ops: Sequence[epilogue.EpilogueOp], dtype: str) -> tuple[Sequence[epilogue.EpilogueOp], bool]:
    """Return the operations without a trailing ReLU, and whether the conversion to `dtype` applies that ReLU."""
    relu = dtype != "float32" and bool(ops) and ops[-1].name == "relu"
    return ops[:-1] if relu else ops, relu
