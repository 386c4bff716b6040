"""Per-channel arguments of an epilogue in shared memory, copied there once per work tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvmconv.target import WARPGROUP_SIZE

from ....tir_builder import Buffer, Expr, allocate, emit_ptx, items_loop, to_uint32
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES
from .atoms import ThreadPosition, named_barrier_sync
from .cp_async import cp_async
from .tile_scheduler import WorkTile


@dataclass(frozen=True)
class ChannelArgumentTile:
    """The arguments of the channels of a tile: a row of float32 numbers for each argument.

    Attributes:
        names: Names of the arguments.
        block_n: Channels of the tile.
        smem: Shared-memory address.
        first_row: Row of the first argument, if other tiles come first.
    """

    names: Sequence[str]
    block_n: int
    smem: Expr
    first_row: Expr = 0

    def address(self, name: str, channel: Expr) -> Expr:
        """Return the address of an argument of a channel of the tile."""
        row = self.first_row + self.names.index(name)
        return self.smem + to_uint32((row * self.block_n + channel) * ACCUMULATOR_BYTES)

    def load_pair(self, name: str, channel: Expr, pair: Sequence[Expr]) -> None:
        """Load an argument of two neighbouring channels to registers."""
        emit_ptx("ld.shared.v2.b32", *pair, self.address(name, channel))

    def copy_async(
        self,
        arguments: Mapping[str, Buffer],
        first_channel: Expr,
        is_inside: Callable[[Expr], Expr],
        vector: int,
        thread: Expr,
        num_threads: int,
    ) -> None:
        """Start the copies of all arguments by cp.async.

        Args:
            arguments: Argument buffers by name.
            first_channel: Index of the tile's first channel in the arguments.
            is_inside: Function from a channel of the tile to whether it exists; the others become zeros.
            vector: Channels per copy, of which all or none exist.
            thread: Index of this thread.
            num_threads: Threads that copy.
        """
        num_copies = self.block_n // vector
        for name in self.names:
            with items_loop(num_copies, thread, num_threads, is_unrolled=True) as copy:
                channel, source = copy * vector, arguments[name]
                address, nbytes = self.address(name, channel), vector * ACCUMULATOR_BYTES
                cp_async(address, source, first_channel + channel, nbytes, is_inside(channel))


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
    ) -> None:
        self._tile, self._arguments = ChannelArgumentTile(names, block_n, smem, warpgroup * len(names)), arguments
        self._channels_per_group, self._is_exact = channels_per_group, is_exact
        self._pairs = {name: allocate(f"{name}_pair", 2, "float32") for name in names}

    def prefetch(self, tile: WorkTile, thread: ThreadPosition) -> None:
        """Request the arguments of a tile; run by all threads of the warpgroup, which have read the previous ones."""
        if not self._pairs:
            return
        named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)
        channels = self._channels_per_group
        self._tile.copy_async(
            self._arguments,
            tile.group * channels + tile.n,
            lambda channel: True if self._is_exact else tile.n + channel < channels,
            math.gcd(channels, VECTOR_BYTES // ACCUMULATOR_BYTES),
            thread.warpgroup_thread,
            WARPGROUP_SIZE,
        )

    def wait(self, thread: ThreadPosition) -> None:
        """Wait until the arguments have arrived for all threads of the warpgroup."""
        if self._pairs:
            emit_ptx("cp.async.wait_all")
            named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)

    def load_pair(self, channel: Expr) -> dict[str, list[Expr]]:
        """Load the arguments of two neighbouring channels of the tile."""
        for name, pair in self._pairs.items():
            self._tile.load_pair(name, channel, [pair[0], pair[1]])
        return {name: [pair[0], pair[1]] for name, pair in self._pairs.items()}
