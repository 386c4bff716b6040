"""Space-to-depth rewrite of convolutions with non-overlapping filters, such as the patches of a vision transformer.

If the positions of a filter neither overlap nor leave gaps and channels are last, the elements below one filter row are
contiguous in memory, in the input as in the weight. They can be viewed as the channels of a filter of width one:
patches of 16 × 16 × 3 have 48 channels instead of 3. The filter's height then becomes an axis of its own: the image is
(rows of patches, rows of a patch, patches per row). No data moves, because both are views of the same arrays.
"""

from __future__ import annotations

from dataclasses import replace

from tvmconv import tensor_map as maps
from tvmconv.workloads import Conv, Conv2d, Conv3d
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_LAST

MIN_ROW_BYTES = 128  # bytes of channels from which on a copied row is long enough


def fold_filter_row_into_channels(w: Conv) -> Conv:
    """Return the same convolution with filter rows as channels, if this is possible and channels are few."""
    filter_width, is_row_wide_enough = w.kernel[-1], w.C * get_itemsize(w.storage) >= MIN_ROW_BYTES
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
    """Return the same convolution with the filter's height as an axis if its stride exceeds TMA's limit."""
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
        out_dtype=w.out_dtype,
        weight_dtype=w.weight_dtype,
    )


def _is_non_overlapping(w: Conv, axis: int) -> bool:
    """Return whether filter positions along an axis do not overlap, leave no gaps and stay inside the image."""
    size, stride, dilation = w.kernel[axis], w.stride[axis], w.dilation[axis]
    return (
        size == stride
        and dilation == 1
        and w.pad_low[axis] == w.pad_high[axis] == 0
        and w.input_size[axis] % size == 0
        and w.reads_x_only
    )
