"""Pixels × channels in shared memory with a padded pitch, which lanes read at any stride without bank conflicts.

A pixel is a row, and its channels are contiguous. `ldmatrix` reads 16 bytes of eight pixels at a time, so the pitch is
an odd multiple of 16 bytes. Lanes read eight neighbouring elements of 32 bits of four pixels at a time, so the pitch is
an odd multiple of 32 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import Buffer, Expr, allocate, logical_and, to_uint32
from ..grouped.pixel_copies import for_each_element
from ..implicit_gemm_shape import VECTOR_BYTES
from .cp_async import copy_elements


def compute_pitch_bytes(channels: Any, itemsize: int) -> Any:
    """Return the bytes from a pixel to the next; `channels` is a multiple of 16."""
    return channels * itemsize + (2 if itemsize == 4 else 1) * VECTOR_BYTES


@dataclass(frozen=True)
class PaddedPixels:
    """Pixels of an array of images, of which a CTA copies some channels."""

    array: Buffer  # the array (images, rows, columns, channels)
    size: tuple[int, ...]  # rows and columns of an image
    num_pixels: int  # pixels in shared memory
    block: int  # channels in shared memory
    channels: int  # channels that exist from the first one of the group on; others become zeros

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_itemsize(str(self.array.dtype))

    @property
    def pitch_bytes(self) -> int:
        """Bytes from a pixel to the next."""
        return int(compute_pitch_bytes(self.block, self.itemsize))

    def copy(
        self,
        address: Expr,
        first_channel: Expr,
        group_channel: Expr,
        thread: Expr,
        num_threads: int,
        locate: Callable[[Expr], tuple[Expr, Expr, Expr, Expr]],
    ) -> None:
        """Start the copies: neighbouring threads copy neighbouring chunks of 16 bytes of a pixel.

        Args:
            address: Shared-memory address of the first pixel.
            first_channel: First channel, counted from that of the group.
            group_channel: First channel of the group.
            thread: Index of the thread.
            num_threads: Threads of the CTA.
            locate: Function from a pixel in shared memory to its image, row and column, and whether it is inside;
                others become zeros.
        """
        elements, half = VECTOR_BYTES // self.itemsize, allocate("gathered", 1, "uint32")
        chunks, contiguous = self.block // elements, math.gcd(self.channels, elements)
        all_channels = int(self.array.shape[-1])

        def emit_copy(number: Expr) -> None:
            pixel, chunk = number // chunks, number % chunks
            image, y, x, is_inside = locate(pixel)
            destination = address + to_uint32(pixel * self.pitch_bytes + chunk * VECTOR_BYTES)
            base = ((image * self.size[0] + y) * self.size[1] + x) * all_channels + group_channel
            for element in range(0, elements, contiguous):
                channel = first_channel + chunk * elements + element
                exists = logical_and(is_inside, True if self.channels % self.block == 0 else channel < self.channels)
                index = T.Select(exists, base + channel, 0)
                piece = destination + to_uint32(element * self.itemsize) if element else destination
                copy_elements(piece, self.array, index, contiguous * self.itemsize, exists, half)

        for_each_element(self.num_pixels * chunks, thread, num_threads, emit_copy)
