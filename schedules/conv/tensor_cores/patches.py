"""Filters that cut the image into pieces, as a vision transformer's patches are, seen so that they are easy to copy.

Where the lines of a filter neither overlap nor leave gaps, and the channels come last, the elements under one line lie
together in memory, in the input as in the weight. So they are the channels of a filter that is one element wide: of
16×16 patches of three channels, 48 in place of 3. And what such a filter is high is an axis of its own, on which it has
one place: images of lines of patches × lines of a patch × patches of a line. Nothing is moved: both are other views of
the same arrays.
"""

from __future__ import annotations

from dataclasses import replace

from tvmconv import tensor_map as maps
from tvmconv.workloads import Conv, Conv2d, Conv3d
from tvmconv.workloads.dtypes import numpy_dtype
from tvmconv.workloads.layout import CHANNELS_LAST

ENOUGH_BYTES = 128  # of channels, that a copy brings as one row


def with_lines_as_channels(w: Conv) -> Conv:
    """The same convolution with a line of the filter as channels, where that is possible and channels are few."""
    line, wide = w.kernel[-1], w.C * numpy_dtype(w.storage).itemsize >= ENOUGH_BYTES
    if line == 1 or wide or w.groups > 1 or w.layout != CHANNELS_LAST or not _tiles(w, -1):
        return w
    sizes = {"C": w.C * line, w.SPACE[-1]: w.space[-1] // line, w.KERNEL[-1]: 1}
    return replace(w, **sizes, stride=(*w.stride[:-1], 1))  # type: ignore[type-var]  # operators are dataclasses


def in_short_steps(w: Conv) -> Conv:
    """The same with the filter's height as an axis of its own, where TMA's steps are too short for it; or `w`."""
    if not isinstance(w, Conv2d) or w.R <= maps.MAX_STEP or w.layout != CHANNELS_LAST or not _tiles(w, 0):
        return w
    padding = (0, 0, w.padding[1], 0, 0, w.padding[3])
    return Conv3d(
        *(w.N, w.C, w.H // w.R, w.R, w.W, w.O, 1, w.R, w.S, (1, 1, w.stride[1]), padding, (1, 1, w.dilation[1])),
        *(w.groups, w.dtype, w.layout, w.epilogue),
    )


def _tiles(w: Conv, axis: int) -> bool:
    """Whether the filter's places along an axis neither overlap, nor leave gaps, nor leave the image."""
    size, step, dilation = w.kernel[axis], w.stride[axis], w.dilation[axis]
    return size == step and dilation == 1 and w.before[axis] == w.behind[axis] == 0 and w.space[axis] % size == 0
