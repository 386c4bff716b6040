"""What gradients of the weights of depthwise convolutions by TMA share: parts of the pixels, and their sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads import epilogue
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ...primitives import disable_buffer_reuse
from ...tir_builder import Buffer, Expr, allocate, build_schedule, if_, is_below, serial_loop
from ..plane_shape import PlaneShape
from .sum_of_parts import emit_sum_of_parts

StoreResult = Callable[[Expr, Expr, Expr], None]  # of the index of a tap, a channel and a value


def build_depthwise_sums(
    w: WeightGradient,
    num_parts: int | None,
    emit_products: Callable[[dict[str, Buffer], Buffer | None, StoreResult], None],
    locate: Callable[[Expr], tuple[Expr, Expr]],
) -> Schedule:
    """Return a schedule whose first kernel stores sums of parts of the pixels, which a second kernel adds.

    Args:
        w: A depthwise gradient of weights.
        num_parts: Number of parts; None if the first kernel stores the gradient.
        emit_products: Emits the first kernel for arguments, a float32 workspace (parts, sums) or None, and a function
            that applies the epilogue to an element of the gradient and stores it.
        locate: Returns the tap and the channel of a sum of a part.
    """
    shape, num_sums = PlaneShape.from_workload(w.forward), math.prod(w.argument_shapes[-1])

    def emit(arguments: dict[str, Buffer]) -> None:
        def store_result(tap: Expr, channel: Expr, value: Expr) -> None:
            index = shape.array_index(channel, shape.tap_from_index(tap), 0)
            result = epilogue.apply_to_expression(
                w.epilogue, value, lambda name: arguments[name][index].astype(ACCUMULATOR)
            )
            T.buffer_store(arguments[w.RESULT], result.astype(w.argument_dtypes[-1]), [*index])

        if num_parts is None:
            emit_products(arguments, None, store_result)
            return
        workspace = allocate("partial_sums", num_parts * num_sums, ACCUMULATOR, "global")
        emit_products(arguments, workspace, store_result)
        emit_sum_of_parts(num_parts, num_sums, workspace, lambda number, value: store_result(*locate(number), value))

    built = build_schedule(w, emit)
    disable_buffer_reuse(built)  # TVM does not see the accesses of TMA
    return built


@contextmanager
def part_tiles(part: Expr, iterations: int, num_tiles: int) -> Iterator[Expr]:
    """Open the loop over the tiles of a part, which has `iterations` of them; those of the last part may be fewer."""
    with serial_loop(iterations, "iteration") as iteration:
        tile = part * iterations + iteration
        with if_(is_below(tile, num_tiles, iterations)):
            yield tile
