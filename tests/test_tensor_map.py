"""Tensor maps as plain data: what they say of an array, and what TMA cannot take."""

from dataclasses import replace

import mapped
import pytest

from tvmconv.errors import CompileError
from tvmconv.tensor_map import TensorMap, make_im2col_map

TILED, IM2COL = mapped.WEIGHT, mapped.IMAGE


@pytest.mark.parametrize(
    ("extent", "taps", "dilation", "stride", "padding"), [(8, 3, 1, 1, 1), (9, 3, 1, 2, 0), (32, 5, 2, 1, 4)]
)
def test_corners_are_those_of_the_filters_places(extent, taps, dilation, stride, padding):
    out = (extent + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
    told = make_im2col_map("float16", 2, (64, extent, 1), (64, 64), (stride,), (-padding,), (out,), 128)
    last = -padding + (out - 1) * stride
    assert (told.lower_corner, told.upper_corner) == ((-padding,), (last - (extent - 1),))
    assert told.element_strides == (1, stride, 1)


@pytest.mark.parametrize(("told", "nbytes"), [(TILED, 2 * 64 * 9 * 64), (IM2COL, 2 * 64 * 64)])
def test_a_dense_array_is_described_as_a_whole(told, nbytes):
    assert told.nbytes == nbytes


@pytest.mark.parametrize("told", [TILED, IM2COL])
def test_what_goes_out_as_text_comes_back(told):
    assert TensorMap.from_json(told.to_json()) == told


WRONG = {
    "elements": (TILED, {"dtype": "complex64"}, "expected elements of float16, bfloat16, float32"),
    "no axis": (TILED, {"extents": ()}, "expected 1 to 5 axes"),
    "axes": (TILED, {"extents": (64,) * 6}, "expected 1 to 5 axes"),
    "axes of an image": (IM2COL, {"extents": (64, 8)}, "expected 3 to 5 axes"),
    "strides": (TILED, {"strides": (128,)}, "expected 2 strides and 3 steps"),
    "box": (TILED, {"box": (64, 1)}, "expected a box of 3 numbers, and corners of 0 and 0"),
    "corners": (IM2COL, {"upper_corner": (0,)}, "expected a box of 2 numbers, and corners of 2 and 2"),
    "nothing": (TILED, {"extents": (64, 0, 64)}, "expected extents of 1 to 4294967296"),
    "odd stride": (TILED, {"strides": (128, 1160)}, "multiples of 16 bytes"),
    "long stride": (TILED, {"strides": (128, 1 << 40)}, "below 1099511627776"),
    "large tile": (TILED, {"box": (64, 1, 257)}, "expected a copy of at most 256·256·256 elements"),
    "many pixels": (IM2COL, {"box": (64, 1025)}, "expected a copy of at most 256·1024 elements"),
    "step": (IM2COL, {"element_strides": (1, 9, 9, 1)}, "expected steps of 1 to 8"),
    "swizzle": (TILED, {"swizzle": 16}, "expected one of 0, 32, 64, 128 bytes to swizzle, not 16"),
    "long row": (TILED, {"swizzle": 64}, "multiple of 16 bytes, at most 64, which are swizzled: 128"),
    "odd row": (TILED, {"box": (63, 1, 64)}, "multiple of 16 bytes, at most 128, which are swizzled: 126"),
    "corner below": (IM2COL, {"lower_corner": (-129, -1)}, "expected corners from -128 to 127"),
    "corner above": (IM2COL, {"upper_corner": (128, -1)}, "expected corners from -128 to 127"),
}


@pytest.mark.parametrize(("told", "change", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_tma_cannot_take_is_refused_in_a_line(told, change, message):
    with pytest.raises(CompileError, match=message) as caught:
        replace(told, **change).validate()
    assert str(caught.value).startswith("the tensor map of ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_corners_may_be_as_far_as_the_number_of_axes_allows(rank):
    far = {3: 1 << 15, 4: 1 << 7, 5: 1 << 4}[rank]
    space = rank - 2
    told = replace(
        IM2COL,
        extents=(64,) * rank,
        strides=(128,) * (rank - 1),
        element_strides=(1,) * rank,
        lower_corner=(-far,) * space,
        upper_corner=(far - 1,) * space,
    )
    told.validate()
    with pytest.raises(CompileError, match="expected corners"):
        replace(told, upper_corner=(far,) * space).validate()


PLAIN = TILED.to_dict()
UNTRUSTED = {
    "nothing": None,
    "a list": [1, 2],
    "no box": {key: value for key, value in PLAIN.items() if key != "box"},
    "a text for numbers": {**PLAIN, "extents": "64"},
    "a number for numbers": {**PLAIN, "extents": 64},
    "fractions": {**PLAIN, "box": [0.5, 1, 64]},
    "no number": {**PLAIN, "swizzle": "128"},
    "deep": {**PLAIN, "strides": [[128], [1152]]},
    "too much": {**PLAIN, "box": [64, 1, 1 << 70]},
}


@pytest.mark.parametrize("told", UNTRUSTED.values(), ids=UNTRUSTED.keys())
def test_whatever_else_is_sent_is_refused(told):
    with pytest.raises(CompileError, match="tensor map"):
        TensorMap.from_dict(told)


def test_a_text_that_is_no_json_is_refused():
    with pytest.raises(CompileError, match="expected a tensor map"):
        TensorMap.from_json("{")
