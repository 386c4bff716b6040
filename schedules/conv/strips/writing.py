"""The words that kernels of strips are written in: where a thread is, loops, guards, vectors of channels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.gpu import MAX_BLOCKS_YZ
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import numpy_dtype

from ...program import write
from ..planes import Planes
from .strip import LOAD_BYTES, Strip

MAX_COPIES = 32  # of a thread to shared memory, unrolled


class Place(NamedTuple):
    """Where a thread is.

    Attributes:
        image: of the batch.
        plane: of the output; 0 where there is one.
        first: the first channel of its block.
        vector: its vector of channels in the whole tensor; may lie behind the last one.
        row: its first output row.
        column: its first output column.
        number: its number in the block.
    """

    image: Any
    plane: Any
    first: Any
    vector: Any
    row: Any
    column: Any
    number: Any


def program(w: Conv, strip: Strip, emit: Callable[[dict[str, Any], Place], None]) -> Schedule:
    """A convolution as a scheduled function of its arguments.

    Args:
        w: the convolution.
        strip: of a thread.
        emit: writes what a thread does, given the arguments by name and where the thread is.
    """

    def body(arguments: dict[str, Any]) -> None:
        with launched(w, strip) as at:
            emit(arguments, at)

    return write(w, body)


def local(name: str, shape: Sequence[int], dtype: str) -> Any:
    """An array in registers."""
    return IRBuilder.name(name, T.sblock_alloc_buffer(tuple(shape), dtype, scope="local"))


@contextlib.contextmanager
def loop(name: str, extent: int, kind: Callable[[int], Any] = T.unroll) -> Iterator[Any]:
    """A loop of the builder, its variable called by a name."""
    with kind(extent) as variable:
        yield IRBuilder.name(name, variable)


@contextlib.contextmanager
def launched(w: Conv, strip: Strip) -> Iterator[Place]:
    """The loops of blocks and threads. What is unrolled inside them is left to the device's compiler to unroll."""
    channels, rows, columns = strip.channels, strip.rows, strip.columns
    across, pixels = channels.block, columns.block * rows.block
    images, planes = Planes.of(w).count, Planes.of(w).out[0]
    with contextlib.ExitStack() as stack:

        def bind(extent: int, thread: str) -> Any:
            return stack.enter_context(T.thread_binding(extent, thread=thread))

        if max(pixels, images) > MAX_BLOCKS_YZ:
            block = bind(images * pixels * across, "blockIdx.x")
            image, pixel, channel = block // (pixels * across), block // across % pixels, block % across
        else:
            image, pixel, channel = bind(images, "blockIdx.z"), bind(pixels, "blockIdx.y"), bind(across, "blockIdx.x")
        z, y, x = (bind(t.thread, f"threadIdx.{i}") for t, i in ((rows, "z"), (columns, "y"), (channels, "x")))
        stack.enter_context(T.attr(0, "pragma_unroll_explicit", 0))
        yield Place(
            image=image // planes if planes > 1 else image,
            plane=image % planes if planes > 1 else 0,
            first=channel * channels.thread * strip.vector,
            vector=channel * channels.thread + x,
            row=(pixel // columns.block * rows.thread + z) * rows.local,
            column=(pixel % columns.block * columns.thread + y) * columns.local,
            number=(z * columns.thread + y) * channels.thread + x,
        )


def own_channel(strip: Strip, at: Place) -> Any:
    """The first channel of a thread: of one that has none, the last thread's, so that it may read and not store."""
    channels = strip.channels
    return (at.vector if channels.divides else tirx.min(at.vector, channels.extent - 1)) * strip.vector


def guarded(tests: Sequence[Any], then: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
    """Write `then` where all tests hold and `otherwise` where not."""
    if not tests:
        then()
        return
    with T.If(tirx.all(*tests)):
        with T.Then():
            then()
        if otherwise:
            with T.Else():
                otherwise()


def copy(lanes: int, target: Any, at: Callable[[Any], Sequence[Any]], value: Callable[[Any], Any]) -> None:
    """Write `target[at(lane)] = value(lane)` for all lanes, in vectors as wide as they can be."""
    width = min(lanes, LOAD_BYTES // numpy_dtype(str(target.dtype)).itemsize)
    for first in range(0, lanes, width):
        if width == 1:
            T.buffer_store(target, value(first), [*at(first)])
        else:
            with loop("lane", width, T.vectorized) as lane:
                T.buffer_store(target, value(lane + first), [*at(lane + first)])


def stage_filters(w: Conv, strip: Strip, at: Place, K: Any) -> Any:
    """Turn the filters of a block around in shared memory: (taps and input channels, output channels of the block).

    Neighbouring threads copy neighbouring output channels, which lie a filter apart: they store to neighbouring words,
    and what they read of a sector is in the L1 cache for the taps that follow.
    """
    channels, depth, sizes = strip.channels.thread * strip.vector, w.C // w.groups, Planes.of(w)
    elements = sizes.all_taps * depth
    shared = IRBuilder.name("filters", T.sblock_alloc_buffer((elements, channels), w.storage, scope="shared"))
    copies = ceil_div(elements * channels, strip.threads)
    with loop("copy", copies, T.unroll if copies <= MAX_COPIES else T.serial) as step:
        element = (step * strip.threads + at.number) // channels
        channel = (step * strip.threads + at.number) % channels
        tests = [element < elements] * (elements * channels % strip.threads > 0)
        tests += [at.first + channel < w.O] * (not strip.channels.divides)
        tap, d = element // depth, element % depth
        value = K[sizes.place(at.first + channel, sizes.tap(tap), d)]
        guarded(tests, lambda: T.buffer_store(shared, value, [element, channel]))
    return shared
