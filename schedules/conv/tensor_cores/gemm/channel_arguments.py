"""Per-channel arguments of an epilogue in shared memory, copied there once per work tile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvmconv.target import WARPGROUP_SIZE

from ....tir_builder import Buffer, Expr, allocate, emit_ptx, items_loop, logical_and, to_uint32
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES
from .atoms import ThreadPosition, named_barrier_sync
from .cp_async import cp_async
from .tile_scheduler import WorkTile


@dataclass(frozen=True)
class ChannelArgumentTile:
    """The arguments of the channels of a tile: a row of float32 numbers for each argument."""

    names: Sequence[str]  # names of the arguments
    block_n: int  # channels of the tile
    smem: Expr  # shared-memory address
    first_row: Expr = 0  # row of the first argument, if other tiles come first

    def address(self, name: str, channel: Expr) -> Expr:
        """Return the address of an argument of a channel of the tile."""
        row = self.first_row + self.names.index(name)
        return self.smem + to_uint32((row * self.block_n + channel) * ACCUMULATOR_BYTES)

    def load(self, name: str, channel: Expr, registers: Sequence[Expr]) -> None:
        """Load an argument of two or four neighbouring channels to registers."""
        emit_ptx(f"ld.shared.v{len(registers)}.b32", *registers, self.address(name, channel))

    def copy_async(
        self,
        arguments: Mapping[str, Buffer],
        tile: WorkTile,
        extent: int,
        thread: Expr,
        num_threads: int,
        *,
        is_exact: bool,
        is_needed: Expr = True,
    ) -> None:
        """Start the copies of all arguments by cp.async, in vectors of up to 16 bytes.

        Args:
            arguments: Argument buffers by name.
            tile: The work tile.
            extent: Channels of a group.
            thread: Index of this thread.
            num_threads: Threads that copy.
            is_exact: Whether all channels of all tiles exist; the others become zeros.
            is_needed: Whether the arguments are not zeros.
        """
        vector = math.gcd(extent, VECTOR_BYTES // ACCUMULATOR_BYTES)
        for name in self.names:
            with items_loop(self.block_n // vector, thread, num_threads, is_unrolled=True) as copy:
                channel, nbytes = copy * vector, vector * ACCUMULATOR_BYTES
                index = tile.group * extent + tile.n + channel
                is_inside = logical_and(True if is_exact else tile.n + channel < extent, is_needed)
                cp_async(self.address(name, channel), arguments[name], index, nbytes, is_inside)


class ChannelArguments:
    """The arguments of a warpgroup's work tiles: requested before the mainloop, in shared memory after it.

    Args:
        names: Names of the arguments.
        arguments: Argument buffers by name.
        block_n: Channels per work tile.
        channels_per_group: Output channels of a group, beyond which no channel is valid.
        is_exact: Whether tiles have no channels beyond the group.
        smem: Shared-memory address of the copies of all warpgroups, a multiple of 16 bytes.
        warpgroup: Index of this warpgroup.
        width: Neighbouring channels that a thread loads at a time: 2 or 4.
    """

    def __init__(
        self,
        names: list[str],
        arguments: Mapping[str, Buffer],
        block_n: int,
        channels_per_group: int,
        is_exact: bool,
        smem: Expr,
        warpgroup: Expr,
        width: int = 2,
    ) -> None:
        self._tile, self._arguments = ChannelArgumentTile(names, block_n, smem, warpgroup * len(names)), arguments
        self._channels_per_group, self._is_exact = channels_per_group, is_exact
        self._width = width
        self._values = {name: allocate(f"{name}_values", width, "float32") for name in names}

    def prefetch(self, tile: WorkTile, thread: ThreadPosition) -> None:
        """Request the arguments of a tile; run by all threads of the warpgroup, which have read the previous ones."""
        if not self._values:
            return
        named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)
        threads, is_exact = (thread.warpgroup_thread, WARPGROUP_SIZE), self._is_exact
        self._tile.copy_async(self._arguments, tile, self._channels_per_group, *threads, is_exact=is_exact)

    def wait(self, thread: ThreadPosition) -> None:
        """Wait until the arguments have arrived for all threads of the warpgroup."""
        if self._values:
            emit_ptx("cp.async.wait_all")
            named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)

    def load(self, channel: Expr) -> dict[str, list[Expr]]:
        """Load the arguments of neighbouring channels of the tile."""
        values = {name: [registers[e] for e in range(self._width)] for name, registers in self._values.items()}
        for name, registers in values.items():
            self._tile.load(name, channel, registers)
        return values
