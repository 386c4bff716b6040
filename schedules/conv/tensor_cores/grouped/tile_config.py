"""What the configs of `grouped_mma_sync` share: units of groups, and tiles of pixels that CTAs compute in turn.

Channels come in octets of 16 bytes, the rows of the matrices of ldmatrix. A *unit* has the fewest whole groups whose
channels of both images are octets. If it has several groups, products between them are computed and not stored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvmconv.arithmetic import ceil_div
from tvmconv.target import PORTABLE_SHARED_BYTES

from ....tir_builder import Expr, Register, if_, serial_loop
from ...estimated_config import EstimatedTileConfig
from ...plane_shape import PlaneShape
from ...tile_config import Rule
from .pixel_copies import ITEM_BYTES, OCTET, pad_pixel

MMA_PIXELS = 16  # of an mma
MAX_UNIT_GROUPS = 4
MAX_WARPS = 16
SM_SHARED_BYTES = 227 << 10
UNITS_CHOICES = (1, 2, 3, 4, 6, 8)
PIXELS_Y_CHOICES = (1, 2, 4, 7, 8)
PIXELS_X_CHOICES = (16, 28, 32, 56, 64)
WARPS_PIXELS_CHOICES = (1, 2, 4, 8)
LDMATRIX_CYCLES = 4  # of shared memory: four matrices of 128 bytes
MMA_LATENCY = 33  # clock cycles: HMMA in `tvmconv.target.INSTRUCTION_CLOCKS`
COPY_INSTRUCTIONS = 25  # of the copy of an octet, with its address and guards
ADDRESS_INSTRUCTIONS = 30  # of a step of 16 pixels, with the stores of its sums


@dataclasses.dataclass(frozen=True)
class GroupedTileConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS = ("units", "pixels_y", "pixels_x")

    units: Any  # units of groups per CTA
    pixels_y: Any  # rows of a tile; for gradients of inputs, rows of each class
    pixels_x: Any  # columns of a tile, likewise
    warps_pixels: Any  # warps along the pixels of a tile

    @classmethod
    def list_required(cls, w: Any) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (f"at most {MAX_WARPS} warps", lambda t: t.num_warps <= MAX_WARPS),
            (
                f"at most {PORTABLE_SHARED_BYTES} bytes of shared memory",
                lambda t: t.smem_bytes <= PORTABLE_SHARED_BYTES,
            ),
        ]

    @property
    @abstractmethod
    def convolution(self) -> Any:
        """The convolution whose input and output channels are those of the two images."""

    @property
    def shape(self) -> PlaneShape:
        """Sizes of the convolution over planes, rows and columns."""
        return PlaneShape.from_workload(self.convolution)

    @property
    def groups_per_unit(self) -> int:
        """Groups of a unit."""
        return count_unit_groups(self.convolution)

    @property
    def inputs_per_unit(self) -> int:
        """Input channels of a unit."""
        return self.groups_per_unit * self.convolution.C // self.convolution.groups

    @property
    def outputs_per_unit(self) -> int:
        """Output channels of a unit."""
        return self.groups_per_unit * self.convolution.O // self.convolution.groups

    @property
    def unit_blocks(self) -> Any:
        """CTAs along the units."""
        return ceil_div(self.convolution.groups // self.groups_per_unit, self.units)

    @property
    @abstractmethod
    def window(self) -> tuple[Any, Any]:
        """Rows and columns of the input below the taps of a tile."""

    @property
    def num_pixels(self) -> Any:
        """Pixels of a tile; for gradients of inputs, of each class."""
        return self.pixels_y * self.pixels_x

    @property
    def input_pitch(self) -> Any:
        """Elements from a pixel of the input to the next in shared memory."""
        return pad_pixel(self.units * self.inputs_per_unit)

    @property
    def output_pitch(self) -> Any:
        """Elements from a pixel of the output to the next in shared memory."""
        return pad_pixel(self.units * self.outputs_per_unit)

    @property
    def input_bytes(self) -> Any:
        """Bytes of the window in shared memory."""
        return self.window[0] * self.window[1] * self.input_pitch * ITEM_BYTES

    @property
    def tile_size(self) -> tuple[Any, Any]:
        """Rows and columns of the output of a tile."""
        _, step_y, step_x = self.shape.upsampling
        return self.pixels_y * step_y, self.pixels_x * step_x

    @property
    def pixel_tiles(self) -> tuple[Any, Any]:
        """Numbers of tiles of an image along rows and columns."""
        _, rows, columns = self.shape.output_size
        return ceil_div(rows, self.tile_size[0]), ceil_div(columns, self.tile_size[1])

    @property
    def num_tiles(self) -> Any:
        """Tiles of pixels of the batch."""
        return self.shape.num_output_planes * self.pixel_tiles[0] * self.pixel_tiles[1]

    @property
    @abstractmethod
    def iterations(self) -> Any:
        """Tiles of a CTA."""

    @property
    def pixel_blocks(self) -> Any:
        """CTAs along the tiles."""
        return ceil_div(self.num_tiles, self.iterations)

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        return self.pixel_blocks * self.unit_blocks

    @contextmanager
    def for_each_tile(self, pixel_block: Expr) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Emit a loop over the tiles of a CTA, whose body is that of the context.

        Args:
            pixel_block: Index of the CTA along the tiles.

        Yields:
            Image, first row and first column of the tile.
        """
        image, row, column = (Register(name) for name in ("image", "row", "column"))
        tiles_y, tiles_x = self.pixel_tiles
        iterations, pixel_blocks = int(self.iterations), int(self.pixel_blocks)
        with serial_loop(iterations, "iteration") as iteration:
            tile = pixel_block * iterations + iteration
            with if_(True if pixel_blocks * iterations == self.num_tiles else tile < self.num_tiles):
                image.set(tile // (tiles_x * tiles_y))
                row.set(tile // tiles_x % tiles_y * self.tile_size[0])
                column.set(tile % tiles_x * self.tile_size[1])
                yield image.value, row.value, column.value


@functools.lru_cache(maxsize=64)
def count_unit_groups(w: Any) -> int:
    """Return the fewest groups whose channels of both images are octets."""
    inputs, outputs = w.C // w.groups, w.O // w.groups
    return math.lcm(OCTET // math.gcd(inputs, OCTET), OCTET // math.gcd(outputs, OCTET))


def can_divide_into_units(convolution: Any, max_channels: int) -> bool:
    """Return whether groups are units of at most `max_channels` channels in octets, and filters have one plane."""
    groups, shape = count_unit_groups(convolution), PlaneShape.from_workload(convolution)
    return (
        1 < convolution.groups < min(convolution.C, convolution.O)
        and shape.kernel_size[0] == shape.strides[0] == shape.upsampling[0] == 1
        and shape.pad_low[0] == 0
        and shape.input_size[0] == shape.output_size[0]
        and convolution.groups % groups == 0
        and groups <= MAX_UNIT_GROUPS
        and groups * max(convolution.C, convolution.O) // convolution.groups <= max_channels
    )
