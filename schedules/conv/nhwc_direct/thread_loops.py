"""Building blocks of the NHWC direct kernels: thread coordinates, loops, guards, and vector copies of channels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.target import MAX_BLOCKS_YZ
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_numpy_dtype

from ...tir_builder import build_schedule
from ..plane_shape import PlaneShape
from .thread_tile import MAX_LOAD_BYTES, ThreadTile

MAX_UNROLLED_COPIES = 32  # copies per thread to shared memory


class ThreadCoords(NamedTuple):
    """Coordinates of a thread.

    Attributes:
        image: Image of the batch.
        plane: Output plane; 0 if there is only one.
        block_channel: First channel of the thread's block.
        vector_idx: Index of the thread's channel vector in the whole tensor; it may exceed the last one.
        row: First output row of the thread.
        column: First output column of the thread.
        thread_idx: Index of the thread in its block.
    """

    image: Any
    plane: Any
    block_channel: Any
    vector_idx: Any
    row: Any
    column: Any
    thread_idx: Any


def build_conv_schedule(
    w: Conv, thread_tile: ThreadTile, emit_thread: Callable[[dict[str, Any], ThreadCoords], None]
) -> Schedule:
    """Return a convolution as a scheduled function of its arguments.

    Args:
        w: The convolution.
        thread_tile: Tile of a thread.
        emit_thread: Function that emits a thread's work, given the arguments by name and the thread's coordinates.
    """

    def body(arguments: dict[str, Any]) -> None:
        with open_launch_loops(w, thread_tile) as thread_coords:
            emit_thread(arguments, thread_coords)

    return build_schedule(w, body)


def allocate_local(name: str, shape: Sequence[int], dtype: str) -> Any:
    """Allocate an array in registers."""
    return IRBuilder.name(name, T.sblock_alloc_buffer(tuple(shape), dtype, scope="local"))


@contextlib.contextmanager
def open_loop(name: str, extent: int, loop_kind: Callable[[int], Any] = T.unroll) -> Iterator[Any]:
    """Open a loop of the builder with a named variable."""
    with loop_kind(extent) as variable:
        yield IRBuilder.name(name, variable)


@contextlib.contextmanager
def open_launch_loops(w: Conv, thread_tile: ThreadTile) -> Iterator[ThreadCoords]:
    """Open the loops over blocks and threads; the device's compiler unrolls the unrolled loops inside them."""
    channel_tile, row_tile, column_tile = thread_tile.channels, thread_tile.rows, thread_tile.columns
    channel_blocks, pixel_blocks = channel_tile.block, column_tile.block * row_tile.block
    plane_shape = PlaneShape.from_workload(w)
    num_images, planes_per_image = plane_shape.num_output_planes, plane_shape.output_size[0]
    with contextlib.ExitStack() as stack:

        def bind(extent: int, thread: str) -> Any:
            return stack.enter_context(T.thread_binding(extent, thread=thread))

        if max(pixel_blocks, num_images) > MAX_BLOCKS_YZ:
            block = bind(num_images * pixel_blocks * channel_blocks, "blockIdx.x")
            image, pixel = block // (pixel_blocks * channel_blocks), block // channel_blocks % pixel_blocks
            channel = block % channel_blocks
        else:
            image, pixel = bind(num_images, "blockIdx.z"), bind(pixel_blocks, "blockIdx.y")
            channel = bind(channel_blocks, "blockIdx.x")
        z, y, x = (
            bind(axis_tile.thread, f"threadIdx.{axis_letter}")
            for axis_tile, axis_letter in ((row_tile, "z"), (column_tile, "y"), (channel_tile, "x"))
        )
        stack.enter_context(T.attr(0, "pragma_unroll_explicit", 0))
        yield ThreadCoords(
            image=image // planes_per_image if planes_per_image > 1 else image,
            plane=image % planes_per_image if planes_per_image > 1 else 0,
            block_channel=channel * channel_tile.thread * thread_tile.vector,
            vector_idx=channel * channel_tile.thread + x,
            row=(pixel // column_tile.block * row_tile.thread + z) * row_tile.local,
            column=(pixel % column_tile.block * column_tile.thread + y) * column_tile.local,
            thread_idx=(z * column_tile.thread + y) * channel_tile.thread + x,
        )


def get_thread_channel(thread_tile: ThreadTile, thread_coords: ThreadCoords) -> Any:
    """Return the first channel of a thread; a thread without channels reads the last vector, but never stores."""
    channels = thread_tile.channels
    return (
        thread_coords.vector_idx if channels.divides else tirx.min(thread_coords.vector_idx, channels.extent - 1)
    ) * thread_tile.vector


def emit_guarded(
    conditions: Sequence[Any], emit_then: Callable[[], None], emit_else: Callable[[], None] | None = None
) -> None:
    """Emit `emit_then` under all conditions, and `emit_else` otherwise."""
    if not conditions:
        emit_then()
        return
    with T.If(tirx.all(*conditions)):
        with T.Then():
            emit_then()
        if emit_else:
            with T.Else():
                emit_else()


def emit_vector_copy(
    num_lanes: int, target: Any, target_index: Callable[[Any], Sequence[Any]], value: Callable[[Any], Any]
) -> None:
    """Emit `target[target_index(lane)] = value(lane)` for all lanes, in the widest possible vectors."""
    width = min(num_lanes, MAX_LOAD_BYTES // get_numpy_dtype(str(target.dtype)).itemsize)
    for first_lane in range(0, num_lanes, width):
        if width == 1:
            T.buffer_store(target, value(first_lane), [*target_index(first_lane)])
        else:
            with open_loop("lane", width, T.vectorized) as lane:
                T.buffer_store(target, value(lane + first_lane), [*target_index(lane + first_lane)])


def load_filters_to_smem(w: Conv, thread_tile: ThreadTile, thread_coords: ThreadCoords, K: Any) -> Any:
    """Copy a block's filters to shared memory, transposed to (taps and input channels, output channels of the block).

    Neighbouring threads copy neighbouring output channels, whose filters are a filter apart in global memory. They
    store to neighbouring words, and the L1 cache serves the other elements of the sectors that they read.
    """
    plane_shape = PlaneShape.from_workload(w)
    block_channels, channels_per_group = thread_tile.channels.thread * thread_tile.vector, w.C // w.groups
    num_rows = plane_shape.num_taps * channels_per_group
    shared = IRBuilder.name("filters", T.sblock_alloc_buffer((num_rows, block_channels), w.storage, scope="shared"))
    num_copies = ceil_div(num_rows * block_channels, thread_tile.num_threads)
    with open_loop("copy", num_copies, T.unroll if num_copies <= MAX_UNROLLED_COPIES else T.serial) as copy_idx:
        element = (copy_idx * thread_tile.num_threads + thread_coords.thread_idx) // block_channels
        channel = (copy_idx * thread_tile.num_threads + thread_coords.thread_idx) % block_channels
        conditions = [element < num_rows] * (num_rows * block_channels % thread_tile.num_threads > 0)
        conditions += [thread_coords.block_channel + channel < w.O] * (not thread_tile.channels.divides)
        tap, channel_in = element // channels_per_group, element % channels_per_group
        value = K[
            plane_shape.array_index(thread_coords.block_channel + channel, plane_shape.tap_from_index(tap), channel_in)
        ]
        emit_guarded(conditions, lambda: T.buffer_store(shared, value, [element, channel]))
    return shared
