"""Frames of a volume that lies in two arrays, cached frames and X, as TMA reads them.

A work tile belongs to one output frame, and a K tile to one tap. All its pixels then lie in one input frame: each copy
chooses between the tensor maps of two arrays, whose frames are images in two dimensions. Frames that are padding lie
outside of both arrays, where TMA fills zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.workloads import Conv2d, Conv3d

from ....tir_builder import Expr, Register, emit_if_else
from .tma import TmaCopy
from .tma_loaders import Im2colImage, ImageLines, Position, TapIterator


def count_output_frames(w: Conv3d) -> int:
    """Return the number of output frames of all images."""
    return w.N * w.output_size[0]


def view_frames(w: Conv3d, num_frames: int) -> Conv2d:
    """Return the convolution of the planes of a filter with frames as images."""
    sides = [(low, high) for low, high in zip(w.pad_low[1:], w.pad_high[1:], strict=True)]
    return Conv2d(
        *(num_frames, w.C, w.H, w.W, w.O, w.R, w.S),
        stride=w.stride[1:],
        padding=(*(low for low, _ in sides), *(high for _, high in sides)),
        dilation=w.dilation[1:],
        groups=w.groups,
        dtype=w.dtype,
        layout=w.layout,
    )


class FrameTapIterator(TapIterator):
    """Output frame, filter tap and first channel of a K tile.

    Args:
        w: The convolution.
        taps: Taps along each spatial axis that K tiles visit.
        tiles_per_tap: K tiles per tap.
        block_k: Channels per K tile.
    """

    def __init__(self, w: Conv3d, taps: Sequence[int], tiles_per_tap: int, block_k: int) -> None:
        super().__init__(taps, tiles_per_tap, block_k)
        self._w = w
        self._image, self._first_frame = Register("image"), Register("first_frame")

    @property
    def taps(self) -> list[Expr]:
        """Image, input frame under the first tap, then the tap along each spatial axis."""
        return [self._image.value, self._first_frame.value, *super().taps]

    def seek(self, k_tile: Expr, residue: Expr = 0) -> None:
        """Move to a K tile of an output frame."""
        super().seek(k_tile)
        w = self._w
        self._image.set(residue // w.output_size[0])
        self._first_frame.set(residue % w.output_size[0] * w.stride[0] - w.pad_low[0])


@dataclass(frozen=True)
class FrameImages:
    """Cached frames and X: rows are the filter positions of one output frame."""

    w: Conv3d  # the convolution
    shares_taps: bool  # whether all taps along a line are multiplied from one copy of its pixels

    def _planes(self, num_frames: int) -> Im2colImage | ImageLines:
        """Return an array of frames as images."""
        return (ImageLines if self.shares_taps else Im2colImage)(view_frames(self.w, self.w.N * num_frames))

    def tensor_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map of X."""
        return self._planes(self.w.D).tensor_map(box_rows, box_channels, swizzle_bytes)

    def cache_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map of cached frames."""
        return self._planes(self.w.cached_frames).tensor_map(box_rows, box_channels, swizzle_bytes)

    def locate(self, row: Expr, name: str) -> Position:
        """Return the pixel under the first tap of filter position `row` of a frame, and the frames before it."""
        return self._planes(self.w.D).locate(row, name)

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy the pixels under one tap; `k` is the first channel, the image, its first frame, then the tap."""
        w, planes, (channel, image, first_frame, tap, *taps) = self.w, self._planes(self.w.D), k
        *pixel, later_frames = position
        frame = first_frame + tap * w.dilation[0]

        def load_frame(array: TmaCopy, frames: int, first: int) -> None:
            is_inside = T.And(frame >= first, frame < first + frames)
            index = T.Select(is_inside, image * frames + (frame - first), w.N * frames)  # beyond the last: zeros
            planes.load(destination, array, [*pixel, index + later_frames], (channel, *taps))

        emit_if_else(
            frame < w.cached_frames,
            lambda: load_frame(replace(copy, tensor_map=copy.cache_map), w.cached_frames, 0),
            lambda: load_frame(copy, w.D, w.cached_frames),
        )
