"""Base of tile configs whose persistent CTAs keep the filters of a block of channels, and compute tiles of pixels."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.target import H200

from .estimated_config import EstimatedTileConfig
from .tensor_cores.latency_model import count_ctas_per_sm


@dataclass(frozen=True)
class PersistentTileConfig(EstimatedTileConfig):
    """One config, or many configs as columns; as many CTAs as are resident divide the tiles of all images."""

    @property
    @abstractmethod
    def registers(self) -> Any:
        """Estimated registers per thread."""

    @property
    @abstractmethod
    def channel_blocks(self) -> Any:
        """Tiles along the channels."""

    @property
    @abstractmethod
    def tiles_y(self) -> Any:
        """Tiles along the rows of an image."""

    @property
    @abstractmethod
    def tiles_x(self) -> Any:
        """Tiles along the columns of an image."""

    @property
    def pixel_tiles(self) -> Any:
        """Tiles along the pixels of all images."""
        return self.w.N * self.tiles_y * self.tiles_x

    @property
    def ctas_per_sm(self) -> Any:
        """Number of CTAs that fit an SM."""
        limits = self.pixel_tiles * self.channel_blocks, H200.multiprocessors, self.smem_bytes
        return count_ctas_per_sm(*limits, self.registers, self.num_threads)

    @property
    def is_persistent(self) -> Any:
        """Whether a CTA computes several tiles, and copies the next ones ahead."""
        return True

    @property
    def ctas_per_block(self) -> Any:
        """CTAs that share the tiles of a block of channels."""
        resident = H200.multiprocessors * self.ctas_per_sm
        shared = np.clip(resident // self.channel_blocks, 1, self.pixel_tiles)
        return np.where(self.is_persistent, shared, self.pixel_tiles)

    @property
    def tiles_per_cta(self) -> Any:
        """Largest number of tiles of a CTA."""
        return ceil_div(self.pixel_tiles, self.ctas_per_block)

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid; each keeps the filters of its channels."""
        return self.ctas_per_block * self.channel_blocks

    @property
    def resident_ctas(self) -> Any:
        """CTAs that the busiest SM runs at a time."""
        return np.minimum(self._ctas_of_sm, self.ctas_per_sm)

    @property
    def tiles_per_sm(self) -> Any:
        """Tiles of the busiest SM."""
        return self.tiles_per_cta * self.resident_ctas * ceil_div(self._ctas_of_sm, self.ctas_per_sm)

    @property
    def _ctas_of_sm(self) -> Any:
        return np.maximum(ceil_div(self.num_blocks, H200.multiprocessors), 1)
