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

LARGE = 1 << 24  # elements: one thread takes 0.1 s to draw them
BLOCK = 1 << 20  # elements that have a stream of their own
THREADS = min(16, len(os.sched_getaffinity(0)))


def normal(seed: int, arrays: Sequence[tuple[tuple[int, ...], str]], large: int = LARGE) -> tuple[NDArray[Any], ...]:
    """Draw standard normal numbers, rounded to the dtype.

    Small arrays come from one stream, one after another. An array of more than `large` elements comes in blocks, each
    from a stream of its own that `SeedSequence` derives from the seed, the array's number and the block's.

    Args:
        seed: not negative.
        arrays: shape and dtype (one of `dtypes.DTYPES`) of each.
        large: elements of the largest array that is drawn from the one stream.
    """
    rng = np.random.default_rng(seed)
    return tuple(
        _draw_blocks(np.random.SeedSequence(seed, spawn_key=(number,)), shape, dtype)
        if math.prod(shape) > large
        else dtypes.round_operand(dtype, rng.standard_normal(shape, np.float32))
        for number, (shape, dtype) in enumerate(arrays)
    )


def _draw_blocks(seed: np.random.SeedSequence, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """One large array."""
    drawn = np.empty(math.prod(shape), dtypes.numpy_dtype(dtypes.DTYPES[dtype].storage))
    starts = range(0, len(drawn), BLOCK)

    def draw_block(start: int, own: np.random.SeedSequence) -> None:
        part = drawn[start : start + BLOCK]
        numbers = np.random.Generator(np.random.SFC64(own)).standard_normal(len(part), np.float32)
        part.view(f"u{part.itemsize}")[:] = dtypes.round_operand(dtype, numbers).view(f"u{part.itemsize}")

    with ThreadPoolExecutor(THREADS) as threads:  # NumPy draws and rounds without Python's lock
        for _ in threads.map(draw_block, starts, seed.spawn(len(starts))):
            pass
    return drawn.reshape(shape)
