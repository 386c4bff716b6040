"""The knobs of the tiled rungs: the chapter's factors where they fit the shape and shared memory, else near ones."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tvmconv.gpu import STATIC_SHARED_BYTES
from tvmconv.knobs import Knobs, Tile, nearest_factors
from tvmconv.workloads import Conv, Conv2d

from .sums import tiled_channels

Factors = dict[str, int]  # of one axis, by level, without the outermost


class Tiles(NamedTuple):
    """The tiles of a rung.

    Attributes:
        output: of channels, rows, columns.
        reduction: of input channels, and rows and columns of the filter.
    """

    output: tuple[Tile, ...]
    reduction: tuple[Tile, ...]


def ask_tiles(k: Knobs, w: Conv2d, output: Mapping[str, Factors], reduction: Mapping[str, Factors]) -> Tiles:
    """Ask for the tiles of the output and of the reduction.

    Args:
        k: gets a knob `tile_AXIS` for each axis.
        w: the workload.
        output: the preferred factors by level of the axes c, h and w; the outermost is `block`.
        reduction: those of rc, rh and rw, which have to divide their axes; the outermost is `step`.
    """
    extents = {"c": tiled_channels(w), "h": w.P, "w": w.Q, "rc": w.C // w.groups, "rh": w.R, "rw": w.S}
    wanted = {**output, **reduction}
    fitting = {
        axis: nearest_factors(extents[axis], tuple(factors.values()), exact=axis in reduction)
        for axis, factors in wanted.items()
    }
    fitting = shrink_to_shared_memory(w, fitting)

    def ask(axis: str, outermost: str) -> Tile:
        default = dict(zip(wanted[axis], fitting[axis], strict=True))
        return k.tile(f"tile_{axis}", extents[axis], (outermost, *default), default, exact=axis in reduction)

    return Tiles(tuple(ask(axis, "block") for axis in output), tuple(ask(axis, "step") for axis in reduction))


def shrink_to_shared_memory(w: Conv2d, tiles: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Halve factors, each time the one that saves most, until what a block stages fits: strides make tiles wide."""
    while staged_bytes(w, tiles) > STATIC_SHARED_BYTES and (smaller := _halvings(tiles)):
        tiles = min(smaller, key=lambda candidate: staged_bytes(w, candidate))
    return tiles


def staged_bytes(w: Conv2d, tiles: Mapping[str, tuple[int, ...]]) -> int:
    """Shared memory for what one step of the reduction needs of input and weight."""
    size = {axis: math.prod(factors) for axis, factors in tiles.items()}
    rows = (size["h"] - 1) * w.stride[0] + (size["rh"] - 1) * w.dilation[0] + 1
    columns = (size["w"] - 1) * w.stride[1] + (size["rw"] - 1) * w.dilation[1] + 1
    channels = size["c"] * size["rc"] if w.groups == w.O else size["rc"]  # each group has its own input channels
    weights = size["c"] * size["rc"] * size["rh"] * size["rw"]
    return element_bytes(w) * (channels * rows * columns + weights)


def element_bytes(w: Conv) -> int:
    """Of an element of the operands in shared memory."""
    return np.dtype("uint16" if w.storage == "bfloat16" else w.storage).itemsize


def _halvings(tiles: Mapping[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """The tiles with one factor halved, for each factor that is not 1; those of the reduction become 1, to divide."""
    return [
        {**tiles, axis: (*factors[:i], 1 if axis.startswith("r") else factor // 2, *factors[i + 1 :])}
        for axis, factors in tiles.items()
        for i, factor in enumerate(factors)
        if factor > 1
    ]
