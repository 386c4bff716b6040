"""The second kernel of `mma_sync`, where a split reduction's sums meet in scratch memory."""

from __future__ import annotations

import math

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads import Conv, epilogue

from ....program import Buffer, allocate, load_global, parallel, store, store_global, unpack, unrolled, when, zeros
from ..outputs import finish
from ..product import CHUNK, Product

ADDING_THREADS = 256  # of a block that adds up partial sums


def add_up(w: Conv, parts: int, arguments: dict[str, Buffer], partial: Buffer) -> None:
    """Emit the kernel that adds up the sums in scratch memory and applies the epilogue.

    Args:
        w: the workload.
        parts: how many sums each output has.
        arguments: by name.
        partial: the sums, (parts, pixels, channels).
    """
    p = Product.of(w)
    vector = math.gcd(w.O, CHUNK // p.itemsize)
    pixels, across = p.m, w.O // vector
    value, words = allocate("total", 8, "float32"), allocate("read", 8, "uint32")
    with (
        parallel(ceil_div(pixels * across, ADDING_THREADS), "blockIdx.x") as block,
        parallel(ADDING_THREADS, "threadIdx.x") as thread,
    ):
        index = block * ADDING_THREADS + thread
        m, o = index // across, index % across * vector
        with when(True if pixels * across % ADDING_THREADS == 0 else index < pixels * across):
            zeros(value, vector)
            with unrolled(parts, "g") as g:
                load_global(words, partial, (g * pixels + m) * w.O + o, vector)
                for e, part in enumerate(unpack(words, vector, "float32")):
                    store(value, e, value[e] + part)
            finish(w, arguments, epilogue.steps(w.epilogue), m, o, vector, value, words)
            store_global(arguments["Y"], m * w.O + o, words, vector)
