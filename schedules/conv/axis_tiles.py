"""Knobs of the tiled schedules: d2l-tvm's factors if they fit the shape and shared memory, otherwise near ones."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tvmconv.space import Knobs, Tile, find_nearest_factors
from tvmconv.target import STATIC_SHARED_BYTES
from tvmconv.workloads import Conv, Conv2d

from .reduction import get_tiled_channels

Factors = dict[str, int]  # inner factors of an axis by level


class AxisTiles(NamedTuple):
    """Tiles of a schedule.

    Attributes:
        output: Tiles of channels, rows and columns.
        reduction: Tiles of input channels, and of rows and columns of the filter.
    """

    output: tuple[Tile, ...]
    reduction: tuple[Tile, ...]


def declare_tile_knobs(
    k: Knobs, w: Conv2d, output_factors: Mapping[str, Factors], reduction_factors: Mapping[str, Factors]
) -> AxisTiles:
    """Declare the tiles of the output and of the reduction as knobs, and return them.

    Args:
        k: The knobs, to which a knob `tile_AXIS` is added for each axis.
        w: The workload.
        output_factors: Preferred factors by level of the axes c, h and w; the outermost level is `block`.
        reduction_factors: Preferred factors of rc, rh and rw, which must divide their axes; the outermost level is
            `step`.
    """
    extents = {"c": get_tiled_channels(w), "h": w.P, "w": w.Q, "rc": w.C // w.groups, "rh": w.R, "rw": w.S}
    preferred_factors = {**output_factors, **reduction_factors}
    fitting_factors = {
        axis: find_nearest_factors(extents[axis], tuple(factors.values()), exact_divisors=axis in reduction_factors)
        for axis, factors in preferred_factors.items()
    }
    fitting_factors = shrink_to_shared_memory(w, fitting_factors)

    def declare_tile(axis: str, outermost: str) -> Tile:
        default = dict(zip(preferred_factors[axis], fitting_factors[axis], strict=True))
        return k.tile(f"tile_{axis}", extents[axis], (outermost, *default), default, exact=axis in reduction_factors)

    return AxisTiles(
        tuple(declare_tile(axis, "block") for axis in output_factors),
        tuple(declare_tile(axis, "step") for axis in reduction_factors),
    )


def shrink_to_shared_memory(w: Conv2d, factors: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Halve factors until a block's operands fit into shared memory, each time the factor that saves most.

    Strides and dilations can make the default tiles too wide.
    """
    while compute_staged_bytes(w, factors) > STATIC_SHARED_BYTES and (halved_factors := _list_halved_tiles(factors)):
        factors = min(halved_factors, key=lambda candidate: compute_staged_bytes(w, candidate))
    return factors


def compute_staged_bytes(w: Conv2d, tile_factors: Mapping[str, tuple[int, ...]]) -> int:
    """Return the shared memory in bytes for one k-tile of input and weight."""
    tile_sizes = {axis: math.prod(factors) for axis, factors in tile_factors.items()}
    rows = (tile_sizes["h"] - 1) * w.stride[0] + (tile_sizes["rh"] - 1) * w.dilation[0] + 1
    columns = (tile_sizes["w"] - 1) * w.stride[1] + (tile_sizes["rw"] - 1) * w.dilation[1] + 1
    # Each group has its own input channels.
    channels = tile_sizes["c"] * tile_sizes["rc"] if w.groups == w.O else tile_sizes["rc"]
    weights = tile_sizes["c"] * tile_sizes["rc"] * tile_sizes["rh"] * tile_sizes["rw"]
    return get_element_bytes(w) * (channels * rows * columns + weights)


def get_element_bytes(w: Conv) -> int:
    """Return the bytes of an operand's element in shared memory."""
    return np.dtype("uint16" if w.storage == "bfloat16" else w.storage).itemsize


def _list_halved_tiles(factors_by_axis: Mapping[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """Return the tiles with one factor above 1 halved; a reduction factor becomes 1, so that it divides its axis."""
    return [
        {**factors_by_axis, axis: (*factors[:i], 1 if axis.startswith("r") else factor // 2, *factors[i + 1 :])}
        for axis, factors in factors_by_axis.items()
        for i, factor in enumerate(factors)
        if factor > 1
    ]
