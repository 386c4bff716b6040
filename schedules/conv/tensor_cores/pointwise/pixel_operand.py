"""Pixels that cp.async copies to shared memory as they are: a tile of them is contiguous in channels-last arrays.

The pitch of a pixel is an odd multiple of 16 bytes, so that `ldmatrix` reads eight pixels without bank conflicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Buffer, Expr, is_below, items_loop, logical_and, to_uint32
from ..gemm.cp_async import cp_async
from ..implicit_gemm_shape import VECTOR_BYTES

OCTET = 8  # 16-bit channels of 16 bytes


def compute_pitch_bytes(channels: Any) -> Any:
    """Return the bytes from a pixel to the next in shared memory: an odd multiple of 16, free of bank conflicts."""
    return (channels // OCTET | 1) * VECTOR_BYTES


@dataclass(frozen=True)
class PixelOperand:
    """dY or X, of whose pixels a stage has some."""

    array: Buffer
    all_channels: int  # channels of the array
    channels: int  # channels of the CTA
    first_channel: Expr = 0  # the first of them
    offset: int = 0  # bytes from the start of a stage
    first_chunk: Expr = 0  # chunk of 16 bytes of a pixel from which this warp and lane load
    max_first_chunk: int = 0  # its maximum among all warps and lanes

    @property
    def chunks(self) -> int:
        """Chunks of 16 bytes of a pixel."""
        return self.channels // OCTET

    @property
    def pitch_bytes(self) -> int:
        """Bytes from a pixel to the next."""
        return int(compute_pitch_bytes(self.channels))

    def locate(self, pixel: Expr, distance: int) -> Expr:
        """Return the offset in a stage of the chunk that is some chunks from the first one, in a pixel.

        Beyond the last channel, it is the last chunk, whose sums are not stored.
        """
        chunk = self.first_chunk + distance
        if self.max_first_chunk + distance >= self.chunks:
            chunk = T.min(chunk, self.chunks - 1)
        return to_uint32(pixel * self.pitch_bytes + chunk * VECTOR_BYTES + self.offset)

    def copy(self, address: Expr, tile: Expr, num_pixels: int, block_k: int, thread: Expr, num_threads: int) -> None:
        """Start the copies of a tile to a stage, with zeros beyond the last pixel and the last channel."""
        first = tile * (block_k * self.all_channels) + self.first_channel
        with items_loop(block_k * self.chunks, thread, num_threads, is_unrolled=True) as chunk:
            pixel, place, index = chunk // self.chunks, chunk * VECTOR_BYTES, first + chunk * OCTET
            if self.pitch_bytes > self.chunks * VECTOR_BYTES:
                place = pixel * self.pitch_bytes + chunk % self.chunks * VECTOR_BYTES
            if self.channels < self.all_channels:
                index = first + pixel * self.all_channels + chunk % self.chunks * OCTET
            channel = self.first_channel + chunk % self.chunks * OCTET
            is_inside = logical_and(
                is_below(tile * block_k + pixel, num_pixels, block_k),
                is_below(channel, self.all_channels, self.channels),
            )
            index = index if is_inside is True else T.Select(is_inside, index, 0)
            cp_async(address + to_uint32(place + self.offset), self.array, index, VECTOR_BYTES, is_inside)
