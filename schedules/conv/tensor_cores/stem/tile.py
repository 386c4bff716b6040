"""What `stem` computes at a time, and what that takes of a GPU.

`Tile` is one config as numbers, or many configs as columns: each formula serves the schedule, the limits and the cost
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.gpu import WARP
from tvmconv.knobs import Columns
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv2d

from .lines import CHANNELS, PIXELS, SUM_BYTES, VECTOR, Lines
from .placement import Placement, place


@dataclass(frozen=True)
class Tile:
    """What a block computes at a time, and how many blocks there are.

    Attributes:
        w: the convolution.
        rows: output rows.
        warps: of a block; each computes 16 pixels of every row.
        block_n: output channels, a multiple of 16.
        stages: tiles whose inputs are in shared memory at a time.
        blocks: that share all tiles, at most; 0 for a block a tile.
        hold: whether a warp keeps the weight in registers; else it loads it for each tile from shared memory.
    """

    w: Conv2d
    rows: Any
    warps: Any
    block_n: Any
    stages: Any
    blocks: Any
    hold: Any

    @classmethod
    def of_columns(cls, w: Conv2d, c: Columns) -> Tile:
        """The tiles of many configs."""
        return cls(w, *(c[name] for name in ("rows", "warps", "block_n", "stages", "blocks", "hold")))

    @property
    def lines(self) -> Lines:
        """The convolution as lines of memory."""
        return Lines(self.w)

    @property
    def threads(self) -> Any:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def columns(self) -> Any:
        """Output columns of a tile."""
        return self.warps * PIXELS

    @property
    def channel_tiles(self) -> Any:
        """Tiles along the output channels."""
        return ceil_div(self.w.O, self.block_n)

    @property
    def tiles_across(self) -> Any:
        """Tiles of an output row."""
        return ceil_div(self.w.Q, self.columns)

    @property
    def tiles_down(self) -> Any:
        """Tiles of an output column."""
        return ceil_div(self.w.P, self.rows)

    @property
    def tiles(self) -> Any:
        """Tiles of pixels, of the whole batch."""
        return self.w.N * self.tiles_down * self.tiles_across

    @property
    def grid(self) -> Any:
        """Blocks along the tiles of pixels."""
        share = ceil_div(self.blocks, self.channel_tiles)
        return np.where(self.blocks == 0, self.tiles, np.minimum(self.tiles, share))

    @property
    def rounds(self) -> Any:
        """Tiles of a block, at most."""
        return ceil_div(self.tiles, self.grid)

    @property
    def buffers(self) -> Any:
        """Tiles whose inputs are in shared memory at a time: no more than a block has."""
        return np.minimum(self.stages, self.rounds)

    @property
    def ahead(self) -> Any:
        """Tiles whose inputs are asked for before the first is computed."""
        return np.maximum(1, self.buffers - 1)

    @property
    def accumulators(self) -> Any:
        """Sums of a thread."""
        return self.rows * self.block_n // 2

    @property
    def weight_registers(self) -> Any:
        """Registers of a thread for the weight, all steps together."""
        return self.lines.steps * self.block_n // CHANNELS * 2

    @property
    def products(self) -> Any:
        """The mma of a warp for a tile, all of them unrolled."""
        return self.lines.steps * self.rows * self.block_n // CHANNELS

    @property
    def placed(self) -> Placement:
        """Where the lines lie."""
        return place(self.w, int(self.rows), int(self.warps))

    @property
    def plane_lines(self) -> Any:
        """Lines of a plane that a tile needs."""
        return (self.rows - 1) * self.w.stride[0] + self.w.window[0]

    @property
    def input_bytes(self) -> Any:
        """Shared memory for the inputs of a tile."""
        rows, warps = np.broadcast_arrays(self.rows, self.warps)
        pairs = zip(rows.ravel().tolist(), warps.ravel().tolist(), strict=True)
        line = np.array([place(self.w, *pair).line_bytes for pair in pairs], dtype=np.int64).reshape(rows.shape)
        return _whole(self.lines.planes * self.plane_lines * line)

    @property
    def weight_bytes(self) -> Any:
        """Shared memory for the weight, once for each phase."""
        return self.lines.phases * self.block_n * self.lines.weight_row_bytes

    @property
    def filter_bytes(self) -> Any:
        """Shared memory for the filters as they are in memory, which the weight is spread from."""
        return self.block_n * self.lines.filter_size * self.lines.size

    @property
    def argument_bytes(self) -> Any:
        """Shared memory for what the epilogue has for each channel."""
        return self.block_n * SUM_BYTES * sum(operation.takes == "channel" for operation in self.w.reading)

    @property
    def output_row_bytes(self) -> Any:
        """Shared memory from one pixel's outputs to the next's, or where channels come first from one channel's.

        What is behind them shifts eight of the first, or four of every second of the others, against the banks.
        """
        if self.lines.channels_last:
            return self.block_n * self.lines.size + VECTOR * self.lines.size // 2
        return PIXELS * self.lines.size + VECTOR

    @property
    def output_bytes(self) -> Any:
        """Shared memory in which a warp puts its outputs in the order of their store."""
        return self.output_row_bytes * (PIXELS if self.lines.channels_last else self.block_n)

    @property
    def shared_bytes(self) -> Any:
        """Shared memory of a block: the filters lie where later the last inputs and the outputs are."""
        later = (self.buffers - self.ahead) * self.input_bytes + self.warps * self.output_bytes
        fixed = self.weight_bytes + self.argument_bytes + self.ahead * self.input_bytes
        return fixed + np.maximum(later, self.filter_bytes)

    def usage(self) -> Usage:
        """What configs use of a device."""
        blocks = self.grid * self.channel_tiles
        staged = self.input_bytes + self.weight_bytes / self.rounds
        return Usage(
            threads=self.threads,
            shared_bytes=np.zeros_like(blocks),
            accumulators=self.accumulators,
            blocks=blocks,
            dynamic_shared_bytes=self.shared_bytes,
            steps=self.rounds,
            products=self.products,
            staged_bytes=staged / self.threads,
            traffic=self.tiles * self.channel_tiles * staged,
            all_threads=blocks * self.threads,
            held=self.accumulators + np.where(self.hold == 1, self.weight_registers, 0),
            computed=self.tiles * self.rows * self.columns * self.channel_tiles * self.block_n,
        )


def _whole(nbytes: Any) -> Any:
    """Rounded up to the widest copy."""
    return round_up(nbytes, VECTOR)
