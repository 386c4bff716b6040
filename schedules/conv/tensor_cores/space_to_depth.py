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
from tvmconv.workloads.dtypes import get_numpy_dtype
from tvmconv.workloads.layout import CHANNELS_LAST

MIN_ROW_BYTES = 128  # of channels, that a copy brings as one row


def fold_filter_row_into_channels(w: Conv) -> Conv:
    """The same convolution with a line of the filter as channels, where that is possible and channels are few."""
    filter_width, is_row_wide_enough = w.kernel[-1], w.C * get_numpy_dtype(w.storage).itemsize >= MIN_ROW_BYTES
    if (
        filter_width == 1
        or is_row_wide_enough
        or w.groups > 1
        or w.layout != CHANNELS_LAST
        or not _is_non_overlapping(w, -1)
    ):
        return w
    sizes = {"C": w.C * filter_width, w.SPACE[-1]: w.input_size[-1] // filter_width, w.KERNEL[-1]: 1}
    return replace(w, **sizes, stride=(*w.stride[:-1], 1))  # type: ignore[type-var]  # operators are dataclasses


def split_filter_height(w: Conv) -> Conv:
    """The same with the filter's height as an axis of its own, where TMA's steps are too short for it; or `w`."""
    if (
        not isinstance(w, Conv2d)
        or w.R <= maps.MAX_ELEMENT_STRIDE
        or w.layout != CHANNELS_LAST
        or not _is_non_overlapping(w, 0)
    ):
        return w
    padding = (0, 0, w.padding[1], 0, 0, w.padding[3])
    return Conv3d(
        *(w.N, w.C, w.H // w.R, w.R, w.W, w.O, 1, w.R, w.S, (1, 1, w.stride[1]), padding, (1, 1, w.dilation[1])),
        *(w.groups, w.dtype, w.layout, w.epilogue),
    )


def _is_non_overlapping(w: Conv, axis: int) -> bool:
    """Whether the filter's places along an axis neither overlap, nor leave gaps, nor leave the image."""
    size, stride, dilation = w.kernel[axis], w.stride[axis], w.dilation[axis]
    return (
        size == stride and dilation == 1 and w.pad_low[axis] == w.pad_high[axis] == 0 and w.input_size[axis] % size == 0
    )
