"""The knobs of the tiled rungs: the chapter's factors where they fit the shape and shared memory, else near ones."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tvmconv.gpu_specs import STATIC_SHARED_BYTES
from tvmconv.space import Knobs, Tile, find_nearest_factors
from tvmconv.workloads import Conv, Conv2d

from .reduction import get_tiled_channels

Factors = dict[str, int]  # of one axis, by level, without the outermost


class AxisTiles(NamedTuple):
    """The tiles of a rung.

    Attributes:
        output: of channels, rows, columns.
        reduction: of input channels, and rows and columns of the filter.
    """

    output: tuple[Tile, ...]
    reduction: tuple[Tile, ...]


def declare_tile_knobs(
    k: Knobs, w: Conv2d, output_factors: Mapping[str, Factors], reduction_factors: Mapping[str, Factors]
) -> AxisTiles:
    """Ask for the tiles of the output and of the reduction.

    Args:
        k: gets a knob `tile_AXIS` for each axis.
        w: the workload.
        output_factors: the preferred factors by level of the axes c, h and w; the outermost is `block`.
        reduction_factors: those of rc, rh and rw, which have to divide their axes; the outermost is `step`.
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
    """Halve factors, each time the one that saves most, until what a block stages fits: strides make tiles wide."""
    while compute_staged_bytes(w, factors) > STATIC_SHARED_BYTES and (halved_factors := _list_halved_tiles(factors)):
        factors = min(halved_factors, key=lambda candidate: compute_staged_bytes(w, candidate))
    return factors


def compute_staged_bytes(w: Conv2d, tile_factors: Mapping[str, tuple[int, ...]]) -> int:
    """Shared memory for what one step of the reduction needs of input and weight."""
    tile_sizes = {axis: math.prod(factors) for axis, factors in tile_factors.items()}
    rows = (tile_sizes["h"] - 1) * w.stride[0] + (tile_sizes["rh"] - 1) * w.dilation[0] + 1
    columns = (tile_sizes["w"] - 1) * w.stride[1] + (tile_sizes["rw"] - 1) * w.dilation[1] + 1
    channels = (
        tile_sizes["c"] * tile_sizes["rc"] if w.groups == w.O else tile_sizes["rc"]
    )  # each group has its own input channels
    weights = tile_sizes["c"] * tile_sizes["rc"] * tile_sizes["rh"] * tile_sizes["rw"]
    return get_element_bytes(w) * (channels * rows * columns + weights)


def get_element_bytes(w: Conv) -> int:
    """Of an element of the operands in shared memory."""
    return np.dtype("uint16" if w.storage == "bfloat16" else w.storage).itemsize


def _list_halved_tiles(factors_by_axis: Mapping[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """The tiles with one factor halved, for each factor that is not 1; those of the reduction become 1, to divide."""
    return [
        {**factors_by_axis, axis: (*factors[:i], 1 if axis.startswith("r") else factor // 2, *factors[i + 1 :])}
        for axis, factors in factors_by_axis.items()
        for i, factor in enumerate(factors)
        if factor > 1
    ]
