import pytest
from hypothesis import given
from strategies import any_convolutions, filters

from tvmconv.errors import WorkloadError
from tvmconv.workloads import parse


@given(any_convolutions() | filters())
def test_text_round_trip_is_exact(workload):
    assert parse(str(workload)) == workload


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:1x64x56x56,64x64x3x3,s1,p1",
        "conv2d:1x1x1x1,1x1x1x1,s1,p0",
        "conv2d:2x6x17x5,9x2x3x2,s2x1,p1x2,d1x3,g3",
        "conv2d:2x6x17x5,9x2x3x2,s2,p1x2x0x2,d2,g3,f16",
        "conv2d:1x32x112x112,32x1x3x3,s1,p1,g32",
        "conv2d:1x64x56x56,64x64x3x3,s1,p1,bf16,nhwc,bias,add,silu",
        "conv2d:1x4x8x8,4x4x3x3,s1,p0,tf32,gelu",
        "conv1d:1x64x16000,64x64x9,s1,p4",
        "conv1d:2x6x17,9x2x3,s2,p1x2,d3,g3,nhwc,clamp",
        "conv3d:1x64x8x56x56,64x64x3x3x3,s1,p1",
        "conv3d:2x6x9x17x5,9x2x1x3x2,s2x1x1,p1x2x0x1x0x1,d1x3x1,g3,f16",
        "filter1d:16777216,k5",
        "filter1d:1,k31,clamp",
        "filter2d:4096x4096x3,5x5",
        "filter2d:1x7x1,1x17,clamp",
    ],
)
def test_canonical_text_is_printed_as_it_was_read(text):
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("conv2d:1x4x8x8,4x4x3x3", "conv2d:1x4x8x8,4x4x3x3,s1,p0"),
        ("conv2d:1x4x8x8,4x4x3x3,f32,g1,d1,p1,s1", "conv2d:1x4x8x8,4x4x3x3,s1,p1"),
        ("conv2d:1x4x8x8,4x4x3x3,p1x1x1x1,s2x2", "conv2d:1x4x8x8,4x4x3x3,s2,p1"),
        ("conv2d:1x4x8x8,4x4x3x3,p0x1x0x1", "conv2d:1x4x8x8,4x4x3x3,s1,p0x1"),
        ("conv2d:1x4x8x8,4x4x3x3,nchw,relu,f32", "conv2d:1x4x8x8,4x4x3x3,s1,p0,relu"),
        ("conv2d:1x4x8x8,4x4x3x3,relu,nhwc,p1,bias,bf16", "conv2d:1x4x8x8,4x4x3x3,s1,p1,bf16,nhwc,relu,bias"),
        ("conv1d:1x4x8,4x4x3,p2x2", "conv1d:1x4x8,4x4x3,s1,p2"),
        ("conv3d:1x4x8x8x8,4x4x3x3x3,s2x2x2,p0x1x1x0x1x1", "conv3d:1x4x8x8x8,4x4x3x3x3,s2,p0x1x1"),
    ],
)
def test_other_spellings_print_canonically(text, canonical):
    assert str(parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected OPERATOR:SIZES, as in conv2d:"),
        ("conv2d", "expected OPERATOR:SIZES, as in conv2d:"),
        ("conv4d:1x4x8x8,4x4x3x3", "unknown operator 'conv4d': expected one of conv1d, conv2d, conv3d"),
        ("conv2d:1x4x8x8", "expected conv2d:INPUT,WEIGHT[,OPTION…], as in conv2d:"),
        ("conv2d:1x4x8,4x4x3x3", "'1x4x8': expected the input's NxCxHxW, as in conv2d:"),
        ("conv2d:1x4x8x8,4x3x3", "'4x3x3': expected the weight's Ox(C/groups)xRxS, as in conv2d:"),
        ("conv2d:1x4x8x-8,4x4x3x3", "'1x4x8x-8': expected the input's NxCxHxW"),
        ("conv2d:1x4x8x٨,4x4x3x3", "'1x4x8x٨': expected the input's NxCxHxW"),
        ("conv2d: 1x4x8x8,4x4x3x3", "' 1x4x8x8': expected the input's NxCxHxW"),
        ("conv2d:1x4x8x99999999999999999999,4x4x3x3", "expected numbers of at most 10 digits"),
        ("conv2d:1x4x8x9999999999,4x4x3x3", "W is out of range: expected at most 2147483647"),
        ("conv2d:1x4x8x8,4x4x3x3,", "'': expected an option, one of"),
        ("conv2d:1x4x8x8,4x4x3x3,q1", "'q1': expected an option, one of"),
        ("conv2d:1x4x8x8,4x4x3x3,s1x1x1", "'1x1x1': expected 1 or 2 integers after the s of stride, as in s1"),
        ("conv2d:1x4x8x8,4x4x3x3,p", "'p': expected an option, one of"),
        ("conv2d:1x4x8x8,4x4x3x3,p1x", "'1x': expected 1 or 2 or 4 integers after the p of padding, as in p1"),
        ("conv2d:1x4x8x8,4x4x3x3,relu7", "'relu7': expected an option, one of s2 (or s2x1), p1, d2, g4, f32, tf32"),
        ("conv2d:1x4x8x8,4x4x3x3,relu,bias,relu", "expected relu at most once"),
        ("conv2d:1x4x8x8,4x4x3x3,nhwc,nchw", "'nchw': expected layout at most once"),
        ("conv2d:1x4x8x8,4x4x3x3,f64", "'f64': expected an option"),
        ("conv1d:1x4x8x8,4x4x3", "'1x4x8x8': expected the input's NxCxW, as in conv1d:"),
        ("conv1d:1x4x8,4x4x3,s1x2", "'1x2': expected 1 integer after the s of stride, as in s1"),
        ("conv1d:1x4x8,4x4x3,p1x2x3", "'1x2x3': expected 1 or 2 integers after the p of padding, as in p1"),
        ("conv3d:1x4x8x8,4x4x3x3x3", "'1x4x8x8': expected the input's NxCxDxHxW, as in conv3d:"),
        ("conv3d:1x4x8x8x8,4x4x3x3", "'4x4x3x3': expected the weight's Ox(C/groups)xTxRxS, as in conv3d:"),
        ("conv3d:1x4x8x8x8,4x4x3x3x3,p1x1x1x1", "expected 1 or 3 or 6 integers after the p of padding, as in p1"),
        ("conv2d:1x4x8x8,4x4x3x3,s1,p1,s1", "'s1': expected stride at most once"),
        ("conv2d:1x4x8x8,4x4x3x3,f16,f32", "'f32': expected dtype at most once"),
        ("conv2d:1x4x8x8,4x2x3x3", "'4x2x3x3' has 2 input channels: 4 channels in 1 group need 4x4x3x3"),
        ("conv2d:1x4x8x8,4x4x3x3,g2", "'4x4x3x3' has 4 input channels: 4 channels in 2 groups need 4x2x3x3"),
        ("filter1d", "expected OPERATOR:SIZES"),
        (
            "filter3d:8x8x8,k3",
            "unknown operator 'filter3d': expected one of conv1d, conv2d, conv3d, conv1d_dgrad, ",
        ),
        ("filter1d:8", "expected filter1d:SIGNAL,MASK[,clamp], as in filter1d:16777216,k5"),
        ("filter1d:8,3", "'3': expected k and the number of the mask's taps, as in filter1d:16777216,k5"),
        ("filter1d:8,k", "'': expected a number after the k of the mask"),
        ("filter1d:8,k-3", "'-3': expected a number after the k of the mask"),
        ("filter1d:8x8,k3", "'8x8': expected the number of samples"),
        ("filter1d:0,k3", "n=0: expected at least 1"),
        ("filter1d:8,k4", "mask '4': expected odd sizes"),
        ("filter1d:8,k3,", "'': expected nothing or 'clamp' after the mask"),
        ("filter1d:8,k3,clamp,clamp", "'clamp,clamp': expected nothing or 'clamp' after the mask"),
        ("filter1d:2147483647,k3", "the padded X of 2147483649 has 2147483649 elements"),
        ("filter1d:8,k2147483649", "k is out of range: expected at most 2147483647"),
        ("filter2d:8x8,3x3", "'8x8': expected the image's HxWxC, as in filter2d:4096x4096x3,5x5"),
        ("filter2d:8x8x1,k3", "'k3': expected the mask's RxS"),
        ("filter2d:8x8x1,3x4", "mask '3x4': expected odd sizes"),
        ("filter2d:8x0x1,3x3", "W=0: expected at least 1"),
        ("filter2d:8x8x1,3x3,f16", "'f16': expected nothing or 'clamp' after the mask"),
        ("filter2d:1x1x1,46341x46341", "the padded X of 46341x46341x1 has 2147488281 elements"),
    ],
)
def test_malformed_text_is_refused_with_what_would_be_right(text, expected):
    with pytest.raises(WorkloadError) as error:
        parse(text)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "x" * 10**6,
        "conv2d:" + "1x" * 10**6,
        "conv2d:1x4x8x" + "8" * 10**6 + ",4x4x3x3",
        "conv2d:1x4x8x8,4x4x3x3" + ",s1" * 10**5,
        "conv2d:1x4x8x8\n,4x4x3x3",
        "conv2d:1x4x8x8,4x4x3x3,\x00\x1b[31m",
        "x" * 10**6 + ":",
        "conv2d:1x4x8x8,4x4x3x3" + ",relu" * 10**5,
        "conv3d:1x4x8x8x8,4x4x3x3x3,re\nlu",
        "filter1d:8,k3" + ",clamp" * 10**5,
        "filter1d:8,k" + "3" * 10**6,
        "filter2d:8x8x1\n,3x3",
    ],
)
def test_absurd_text_is_refused_in_one_short_line(text):
    with pytest.raises(WorkloadError) as error:
        parse(text)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300
