"""What programs do to sums before they store them: the epilogue, for neighbouring channels of a pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.workloads import Conv, epilogue

from ...program import Buffer, Expr, load_global, pack, store, unpack


def read_argument(
    w: Conv,
    arguments: dict[str, Buffer],
    operation: epilogue.Operation,
    m: Expr,
    o: Expr,
    width: int,
    words: Buffer,
) -> list[Expr]:
    """Load an operation's argument for neighbouring output channels of a pixel.

    Args:
        w: the workload, in NHWC.
        arguments: by name.
        operation: of the epilogue; it takes an argument.
        m: the pixel, of the whole batch.
        o: the first output channel.
        width: how many channels; `o` is a multiple of it.
        words: uint32, at least 8: what is loaded is there until the next load.

    Returns:
        The elements, in the accumulation dtype.
    """
    of_channels = operation.takes == "channel"
    dtype = "float32" if of_channels else w.storage
    load_global(words, arguments[operation.name], o if of_channels else m * w.O + o, width)
    return unpack(words, width, dtype)


def finish(
    w: Conv,
    arguments: dict[str, Buffer],
    operations: Sequence[epilogue.Operation],
    m: Expr,
    o: Expr,
    width: int,
    value: Buffer,
    words: Buffer,
    asked: Mapping[str, Buffer] | None = None,
) -> None:
    """Apply operations to neighbouring sums and round them to the storage dtype.

    Args:
        w: the workload, in NHWC.
        arguments: by name.
        operations: of the epilogue, in order.
        m: the pixel, of the whole batch.
        o: the first output channel.
        width: how many channels.
        value: the sums, float32; their results lie there afterwards, before they are rounded.
        words: uint32, at least 8: the results are packed there.
        asked: arguments that were loaded before, as `words` would have them, by name.
    """
    left, relu = without_relu(operations, w.storage)
    for operation in left:
        read = None
        if asked and operation.name in asked:
            read = unpack(asked[operation.name], width, w.storage)
        elif operation.takes:
            read = read_argument(w, arguments, operation, m, o, width, words)
        for e in range(width):
            store(value, e, operation.compute(value[e], *([read[e]] if read else [])))
    pack(words, 0, [value[e] for e in range(width)], w.storage, relu)


def without_relu(operations: Sequence[epilogue.Operation], dtype: str) -> tuple[Sequence[epilogue.Operation], bool]:
    """Operations without a ReLU at their end, if there is one and rounding to a dtype does that too."""
    relu = dtype != "float32" and bool(operations) and operations[-1].name == "relu"
    return operations[:-1] if relu else operations, relu
