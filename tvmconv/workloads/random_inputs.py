"""Random inputs that are the same for a seed on every machine; several threads draw large tensors."""

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

LARGE_ELEMENTS = 1 << 24  # one thread takes 0.1 s to draw as many
BLOCK_ELEMENTS = 1 << 20  # elements per random stream of a large array
NUM_THREADS = min(16, len(os.sched_getaffinity(0)))


def draw_normal(
    seed: int, arrays: Sequence[tuple[tuple[int, ...], str]], large_elements: int = LARGE_ELEMENTS
) -> tuple[NDArray[Any], ...]:
    """Draw standard normal numbers of each shape, rounded to its dtype (one of `dtypes.DTYPES`). Small arrays are drawn
    from one stream in order. An array of more than `large_elements` elements is drawn in blocks. `SeedSequence` derives
    the stream of each block from the seed, the array's index and the block's index.
    """
    rng = np.random.default_rng(seed)
    return tuple(
        _draw_blocks(np.random.SeedSequence(seed, spawn_key=(number,)), shape, dtype)
        if math.prod(shape) > large_elements
        else dtypes.round_operand(dtype, rng.standard_normal(shape, np.float32))
        for number, (shape, dtype) in enumerate(arrays)
    )


def _draw_blocks(seed: np.random.SeedSequence, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Draw one large array in blocks."""
    values = np.empty(math.prod(shape), dtypes.get_numpy_dtype(dtypes.DTYPES[dtype].storage))
    starts = range(0, len(values), BLOCK_ELEMENTS)

    def draw_block(start: int, block_seed: np.random.SeedSequence) -> None:
        block = values[start : start + BLOCK_ELEMENTS]
        numbers = np.random.Generator(np.random.SFC64(block_seed)).standard_normal(len(block), np.float32)
        block.view(f"u{block.itemsize}")[:] = dtypes.round_operand(dtype, numbers).view(f"u{block.itemsize}")

    with ThreadPoolExecutor(NUM_THREADS) as threads:  # NumPy draws and rounds without the GIL
        list(threads.map(draw_block, starts, seed.spawn(len(starts))))
    return values.reshape(shape)
