"""Arguments in constant memory and behind textures: what the generated text says of them, and what is refused."""

import re

import pytest
from placed import lower_filter, lower_shift

import tvmconv as tc
from tvmconv.compiler import nvrtc, sass
from tvmconv.devices import find
from tvmconv.workloads import Filter1d

needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))


@pytest.fixture(scope="module")
def sm_90():
    return find("sm_90")


def signature(lowered):
    """The parameters of the kernel, in its text."""
    return re.findall(rf"\b{lowered.steps[0].name}\((.*?)\)", lowered.source)[-1]


def test_a_constant_argument_is_a_symbol_and_no_parameter_in_cuda(sm_90):
    lowered = lower_filter(sm_90, K="constant")
    assert "__constant__ float K_ptr[5];" in lowered.source
    assert signature(lowered) == "float* __restrict__ X_ptr, float* __restrict__ Y_ptr"


def test_a_constant_argument_is_a_constant_pointer_in_opencl(opencl):
    assert "__constant float* restrict K_ptr" in signature(lower_filter(opencl, K="constant"))


def test_arguments_that_are_not_placed_are_global(sm_90):
    lowered = lower_filter(sm_90)
    assert lowered.spaces == {"X": "global", "K": "global", "Y": "global"}
    assert signature(lowered).count("float*") == 3


@needs_nvrtc
def test_a_program_tells_which_symbol_to_fill_with_which_array(sm_90):
    (step,) = lower_filter(sm_90, K="constant").program.steps
    assert step.constants == ((1, "K_ptr"),)
    assert step.arguments == (0, 2)


def test_opencl_takes_a_constant_argument_as_any_other(opencl):
    (step,) = lower_filter(opencl, K="constant").program.steps
    assert step.constants == ()
    assert sorted(step.arguments) == [0, 1, 2]


@needs_nvrtc
def test_the_mask_is_read_with_constant_operands(sm_90):
    image = lower_filter(sm_90, K="constant").cubin.image
    assert "c[0x3]" in sass.disassemble(image)  # the bank of `__constant__` arrays; parameters lie in c[0x0]


def test_a_constant_larger_than_constant_memory_is_refused(sm_90):
    full, over = Filter1d(10, 16383), Filter1d(10, 16385)
    assert "__constant__ float K_ptr[16383];" in lower_filter(sm_90, full, K="constant").source
    with pytest.raises(tc.CompileError, match="K has 65540 bytes: constant memory has 65536"):
        _ = lower_filter(sm_90, over, K="constant").source


def test_a_texture_is_a_texture_object_in_cuda(sm_90):
    lowered = lower_shift(sm_90, (4, 5, 3), 1, 2)
    assert "cudaTextureObject_t X_ptr" in signature(lowered)
    assert "tex2D<float>(X_ptr, " in lowered.source


@needs_nvrtc
def test_a_program_tells_which_arrays_are_textures(sm_90):
    (step,) = lower_shift(sm_90, (4, 5, 3), 1, 2).program.steps
    assert step.textures == (0,)
    assert step.arguments == (0, 1)


def test_a_texture_is_refused_for_opencl(opencl):
    with pytest.raises(tc.CompileError, match="X is read through a texture, which is for CUDA, not for opencl"):
        _ = lower_shift(opencl, (4, 5, 3), 1, 2).source


@pytest.mark.parametrize(
    ("spaces", "said"),
    [
        ({"M": "constant"}, "the schedule places 'M': expected one of X, K, Y"),
        ({"K": "shared"}, "the schedule places K in 'shared': expected global, constant, texture"),
    ],
)
def test_what_cannot_be_placed_is_refused(sm_90, spaces, said):
    with pytest.raises(tc.CompileError, match=said):
        lower_filter(sm_90, **spaces)


@pytest.mark.parametrize("text", ["filter1d:13,k5", "filter1d:5,k9", "filter1d:1,k1"])
def test_a_filter_with_a_constant_mask_is_right_on_opencl(opencl, text):
    problem = tc.Problem(tc.parse(text))
    loaded = opencl.load(lower_filter(opencl, problem.workload, K="constant").program)
    assert problem.check(loaded.run(problem.inputs)).ok
