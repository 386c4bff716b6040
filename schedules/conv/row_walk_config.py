"""Configs of depthwise convolutions whose threads walk down rows of X in shared memory (`row_walk`).

A warp of its own copies the tiles of a persistent CTA ahead. A CTA that has one tile copies it by one of its threads.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import H200, SCHEDULERS, WARP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from .persistent_tiles import PersistentTileConfig
from .tensor_cores.gemm.pipelines import BARRIER_BYTES
from .tile_config import Rule

COPY_BYTES = 16  # of which the innermost axis of a copy by TMA has a multiple
CACHE_RATIOS = 0.95, 1.3  # of the bytes of the arrays and the L2 cache, between which eviction makes kernels faster
INPUT_EVICTIONS = NORMAL, FIRST = "normal", "first"  # when lines of X leave the L2 cache
STAGE_ALIGNMENT_BYTES = 128
MIN_PROMISING_BYTES = 8 << 20  # of inputs and outputs, below which the latency of a launch decides
# Bytes per clock of an SM, approximately, of an H200: its share of the bandwidth of memory and of L2.
MEMORY_BYTES_PER_CLOCK, L2_BYTES_PER_CLOCK = 17, 36
START_CYCLES = 3000  # of a launch, and of the first copy


def count_lead_lines(w: Conv) -> int:
    """Return the rows of X before the one that completes an output row, from its first one on."""
    return (w.kernel[0] - 1) * w.dilation[0]


def count_period_lines(w: Conv) -> int:
    """Return the rows of X after which a walk repeats itself: those of the sums under way."""
    return ceil_div(count_lead_lines(w) + 1, w.stride[0]) * w.stride[0]


def count_periods(w: Conv, end_line: Any, period_lines: Any) -> Any:
    """Return the rounds of a loop over rows, which begins after the lead and ends before a row."""
    return np.maximum(0, end_line - count_lead_lines(w)) // period_lines


def competes_for_cache(w: Conv) -> bool:
    """Return whether the arrays exceed the L2 cache by little, so that Y stays there if X leaves it first."""
    low, high = CACHE_RATIOS
    return bool(low < w.min_bytes / H200.architecture.l2_bytes <= high)


@functools.lru_cache(maxsize=64)
def can_skip_padding(w: Conv) -> bool:
    """Return whether a walk can leave out the rows outside of an image.

    An output row that begins above the image has to begin before the first one is complete, where the loop over rows
    begins. Each output row has to meet a row of the image, at which it is stored: a dilated filter may reach over a
    small image, and wide padding may hold whole output rows.
    """
    image = range(w.pad_low[0], w.pad_low[0] + w.input_size[0])
    starts = range(0, w.output_size[0] * w.stride[0], w.stride[0])
    taps = range(0, count_lead_lines(w) + 1, w.dilation[0])
    is_short = w.pad_low[0] <= max(0, count_lead_lines(w) - w.dilation[0])
    return is_short and all(any(start + tap in image for tap in taps) for start in starts)


def is_plain_depthwise(w: Conv) -> bool:
    """Return whether each channel of an image has one filter, without cached frames, upsampling or statistics."""
    return (
        w.spatial_ndim == 2
        and w.C == w.O == w.groups > 1
        and not w.returns_stats
        and not w.has_large_tensors
        and not w.cached_frames
        and max(w.upsampling) == 1
    )


def is_promising(w: Conv) -> bool:
    """Return whether memory may bound the layer."""
    return bool(w.min_bytes >= MIN_PROMISING_BYTES)


@dataclass(frozen=True)
class RowWalkConfig(PersistentTileConfig):
    """One config, or many configs as columns."""

    channels: Any  # channels per tile
    stages: Any  # copies in shared memory; one if several CTAs of an SM take turns, 0 if a CTA has one tile

    @classmethod
    def list_pruned(cls, w: Conv) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [
            ("most threads of the last warp compute", lambda t: t.num_items >= 0.8 * t.compute_threads),
            (
                "X leaves L2 first if it competes for it",
                lambda t: np.equal(t.input_eviction, FIRST if competes_for_cache(w) else NORMAL),
            ),
        ]

    @property
    @abstractmethod
    def num_items(self) -> Any:
        """Threads of a tile that have work."""

    @property
    @abstractmethod
    def buffers(self) -> Any:
        """Copies in shared memory, at least one."""

    @property
    @abstractmethod
    def copy_bytes(self) -> Any:
        """Bytes of a copy."""

    @property
    @abstractmethod
    def filter_offset_bytes(self) -> Any:
        """Shared-memory offset of the filters."""

    @property
    def is_persistent(self) -> Any:
        """Whether a CTA computes several tiles, and copies the next ones ahead."""
        return self.stages > 0

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_itemsize(self.w.storage)

    @property
    def compute_threads(self) -> Any:
        """Threads that compute, whole warps."""
        return round_up(self.num_items, WARP_SIZE)

    @property
    def num_warps(self) -> Any:
        """Warps per CTA, the last of which copies tiles if there are several."""
        return np.maximum(self.compute_threads // WARP_SIZE + self.is_persistent, 1)

    @property
    def stage_bytes(self) -> Any:
        """Bytes from one stage to the next."""
        return round_up(self.copy_bytes, STAGE_ALIGNMENT_BYTES)

    @property
    def barrier_offset_bytes(self) -> Any:
        """Shared-memory offset of the barriers, behind the filters of a tile's channels."""
        filter_bytes = self.channels * math.prod(self.w.kernel) * self.itemsize
        return self.filter_offset_bytes + round_up(filter_bytes, COPY_BYTES)

    @property
    def smem_bytes(self) -> Any:
        """Dynamic shared memory per CTA in bytes, including the alignment of its start."""
        return STAGE_ALIGNMENT_BYTES + self.barrier_offset_bytes + 2 * self.buffers * BARRIER_BYTES

    @property
    def memory_cycles(self) -> Any:
        """Estimated clock cycles in which the L2 cache or the memory transfers all arrays."""
        rate = L2_BYTES_PER_CLOCK if self.w.min_bytes <= H200.architecture.l2_bytes else MEMORY_BYTES_PER_CLOCK
        return self.w.min_bytes / (H200.multiprocessors * rate)

    def count_issue_cycles(self, instructions: Any) -> Any:
        """Return the estimated clock cycles in which an SM issues the instructions of each thread of a tile.

        Few warps do not hide the latency of their instructions, and schedulers may have different numbers of them.
        """
        warps = self.compute_threads // WARP_SIZE
        resident = np.maximum(1, self.resident_ctas * warps)  # of configs without a whole strip as well
        balance = ceil_div(resident, SCHEDULERS) * SCHEDULERS / resident
        return instructions * warps / SCHEDULERS * np.maximum(1.0, 8 / resident) ** 0.5 * balance
