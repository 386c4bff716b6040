"""Random inputs: the same for a seed on every machine, and those of large tensors by several threads."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.workloads import dtypes

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGE_ELEMENTS = 1 << 24  # elements: one thread takes 0.1 s to draw them
BLOCK_ELEMENTS = 1 << 20  # elements that have a stream of their own
NUM_THREADS = min(16, len(os.sched_getaffinity(0)))


def draw_normal(
    seed: int, arrays: Sequence[tuple[tuple[int, ...], str]], large_elements: int = LARGE_ELEMENTS
) -> tuple[NDArray[Any], ...]:
    """Draw standard normal numbers, rounded to the dtype.

    Small arrays come from one stream, one after another. An array of more than `large_elements` elements comes in
    blocks, each from a stream of its own that `SeedSequence` derives from the seed, the array's number and the block's.

    Args:
        seed: not negative.
        arrays: shape and dtype (one of `dtypes.DTYPES`) of each.
        large_elements: elements of the largest array that is drawn from the one stream.
    """
    rng = np.random.default_rng(seed)
    return tuple(
        _draw_blocks(np.random.SeedSequence(seed, spawn_key=(number,)), shape, dtype)
        if math.prod(shape) > large_elements
        else dtypes.round_operand(dtype, rng.standard_normal(shape, np.float32))
        for number, (shape, dtype) in enumerate(arrays)
    )


def _draw_blocks(seed: np.random.SeedSequence, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """One large array."""
    values = np.empty(math.prod(shape), dtypes.get_numpy_dtype(dtypes.DTYPES[dtype].storage))
    starts = range(0, len(values), BLOCK_ELEMENTS)

    def draw_block(start: int, block_seed: np.random.SeedSequence) -> None:
        block = values[start : start + BLOCK_ELEMENTS]
        numbers = np.random.Generator(np.random.SFC64(block_seed)).standard_normal(len(block), np.float32)
        block.view(f"u{block.itemsize}")[:] = dtypes.round_operand(dtype, numbers).view(f"u{block.itemsize}")

    with ThreadPoolExecutor(NUM_THREADS) as threads:  # NumPy draws and rounds without Python's lock
        for _ in threads.map(draw_block, starts, seed.spawn(len(starts))):
            pass
    return values.reshape(shape)
