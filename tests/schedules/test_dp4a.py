"""`dp4a`: words of four integers, by the instruction in CUDA and by a function in OpenCL."""

import pytest

import tvmconv as tc
from tvmconv.analysis.races import find_races
from tvmconv.errors import AnalysisError, ScheduleError
from tvmconv.verification import Problem


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:2x16x14x14,32x16x3x3,s1,p1,i8,nhwc,scale,bias,relu,quantize",  # tiles overhang
        "conv2d:1x4x37x33,32x4x7x7,s2,p3,i8,nhwc",
        "conv2d:3x24x9x11,14x12x2x3,s2x1,p1x0x0x1,d1x2,g2,i8,nhwc",
    ],
)
def test_words_of_channels_are_multiplied(opencl, text):
    w = tc.parse(text)
    found = tc.build(w, "dp4a", device=opencl).verify(Problem(w, seed=0))
    assert found.ok, found.fault


def test_cuda_has_the_instruction_and_copies_of_words():
    source = tc.build("conv2d:1x16x8x8,16x16x3x3,s1,p1,i8,nhwc", "dp4a", arch="sm_75").source
    kernel = source.rpartition("__global__")[2]
    assert "__dp4a(" in kernel
    assert "*(int*)(X_ptr" in kernel


def test_the_emulator_refuses_vectors_in_shared_memory():
    kernel = tc.build("conv2d:1x16x8x8,16x16x3x3,s1,p1,i8,nhwc", "dp4a", arch="sm_90")
    with pytest.raises(AnalysisError, match="shared memory of int8x4"):
        find_races(kernel)


@pytest.mark.parametrize("options", ["1x3x8x8,4x3x3x3,s1,p1,i8,nhwc", "1x4x8x8,4x4x3x3,s1,p1,i8"])
def test_other_layouts_are_refused(options):
    with pytest.raises(ScheduleError, match="channels are last and input channels of a group are multiples of 4"):
        tc.build(f"conv2d:{options}", "dp4a", arch="sm_90")
