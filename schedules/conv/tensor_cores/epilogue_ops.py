"""What programs do to sums before they store them: the epilogue, for neighbouring channels of a pixel."""

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
    """Load an operation's argument for neighbouring output channels of a pixel.

    Args:
        w: the workload, in NHWC.
        arguments: by name.
        operation: of the epilogue; it takes an argument.
        m: the pixel, of the whole batch.
        o: the first output channel.
        num_channels: how many channels; `o` is a multiple of it.
        registers: uint32, at least 8: what is loaded is there until the next load.

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
    """Apply operations to neighbouring sums and round them to the storage dtype.

    Args:
        w: the workload, in NHWC.
        arguments: by name.
        operations: of the epilogue, in order.
        m: the pixel, of the whole batch.
        o: the first output channel.
        num_channels: how many channels.
        accumulators: the sums, float32; their results lie there afterwards, before they are rounded.
        registers: uint32, at least 8: the results are packed there.
        prefetched: arguments that were loaded before, as `registers` would have them, by name.
    """
    remaining_ops, relu = split_trailing_relu(operations, w.storage)
    for operation in remaining_ops:
        argument_values = None
        if prefetched and operation.name in prefetched:
            argument_values = unpack(prefetched[operation.name], num_channels, w.storage)
        elif operation.argument_kind:
            argument_values = read_argument(w, arguments, operation, m, o, num_channels, registers)
        for e in range(num_channels):
            store(
                accumulators, e, operation.compute(accumulators[e], *([argument_values[e]] if argument_values else []))
            )
    pack(registers, 0, [accumulators[e] for e in range(num_channels)], w.storage, relu)


def split_trailing_relu(ops: Sequence[epilogue.EpilogueOp], dtype: str) -> tuple[Sequence[epilogue.EpilogueOp], bool]:
    """Operations without a ReLU at their end, if there is one and rounding to a dtype does that too."""
    relu = dtype != "float32" and bool(ops) and ops[-1].name == "relu"
    return ops[:-1] if relu else ops, relu
