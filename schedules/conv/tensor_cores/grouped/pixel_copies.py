"""Copies of pixels to shared memory by cp.async, an octet of channels at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div

from ....tir_builder import Buffer, Expr, emit_call, emit_ptx, if_, serial_loop, to_uint32, unrolled_loop
from ..gemm.cp_async import cp_async
from ..implicit_gemm_shape import VECTOR_BYTES

OCTET = 8  # channels of 16 bytes
ITEM_BYTES = 2
COPIES_AT_A_TIME = 4  # unrolled copies of a thread


def pad_pixel(channels: Any) -> Any:
    """Return the elements from a pixel to the next: an odd multiple of 16 bytes, against bank conflicts."""
    return channels + OCTET * (channels // OCTET % 2 == 0)


@dataclass(frozen=True)
class PixelTile:
    """Pixels of an array in shared memory."""

    array: Buffer  # the array, channels last
    address: Expr  # address of the first pixel in shared memory
    num_pixels: int  # number of pixels
    channels: int  # channels of the CTA
    first_channel: Expr  # first of these channels

    @property
    def pitch(self) -> int:
        """Elements from a pixel to the next in shared memory."""
        return int(pad_pixel(self.channels))

    def copy(
        self,
        thread: Expr,
        num_threads: int,
        image: Expr,
        size: tuple[int, int],
        locate: Callable[[Expr], tuple[Expr, Expr, Expr]],
    ) -> None:
        """Start the copies: neighbouring threads copy neighbouring octets of a pixel.

        `size` has the rows and columns of an image. `locate` is a function from a pixel of the tile to its row, its
        column, and whether it is inside of the image; others become zeros.
        """
        octets, all_channels = self.channels // OCTET, int(self.array.shape[-1])
        total = self.num_pixels * octets

        def emit_copy(number: Expr) -> None:
            pixel, octet = number // octets, number % octets
            y, x, is_inside = locate(pixel)
            index = ((image * size[0] + y) * size[1] + x) * all_channels + self.first_channel + octet * OCTET
            address = self.address + to_uint32((pixel * self.pitch + octet * OCTET) * ITEM_BYTES)
            cp_async(address, self.array, T.Select(is_inside, index, 0), VECTOR_BYTES, is_inside)

        for_each_element(total, thread, num_threads, emit_copy)


def for_each_element(total: int, thread: Expr, num_threads: int, emit: Callable[[Expr], None]) -> None:
    """Divide elements among the threads of a CTA, neighbouring elements among neighbouring threads."""
    steps = ceil_div(total, num_threads)
    group = min(steps, COPIES_AT_A_TIME)
    is_exact = ceil_div(steps, group) * group * num_threads == total
    with serial_loop(ceil_div(steps, group), "step") as step, unrolled_loop(group, "copy") as copy:
        number = (step * group + copy) * num_threads + thread
        with if_(True if is_exact else number < total):
            emit(number)


def wait_for_copies() -> None:
    """Wait for the copies of all threads of the CTA."""
    emit_ptx("cp.async.commit_group")
    emit_ptx("cp.async.wait_group", 0)
    emit_call(T.cuda.cta_sync())
