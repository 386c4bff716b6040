"""Which convolutions of a network read what the one before them wrote."""

from tvmconv.baselines.cudnn_chain import find_linked_workloads
from tvmconv.workloads import parse


def test_convolution_reads_the_output_before_it_if_it_fits():
    texts = (
        "conv2d:1x16x8x8,32x16x1x1,f16,nhwc",
        "conv2d:1x32x8x8,32x32x3x3,p1,f16,nhwc,bias,add,relu",
        "conv2d:1x32x8x8,32x32x3x3,s2,p1,f16,nhwc",
        "conv2d:1x32x8x8,64x32x1x1,s2,f16,nhwc",
    )
    assert find_linked_workloads([parse(text) for text in texts]) == [False, True, True, False]


def test_another_layout_or_dtype_does_not_fit():
    square = "conv2d:1x8x6x6,8x8x3x3,p1"
    assert find_linked_workloads([parse(square), parse(f"{square},f16")]) == [False, False]
    assert find_linked_workloads([parse(f"{square},f16"), parse(f"{square},f16,nhwc")]) == [False, False]
