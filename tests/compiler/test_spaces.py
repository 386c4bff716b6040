"""Arguments in constant memory and behind textures: what the generated text says of them, and what is refused."""

import re

import pytest
from placed import lower_filter, lower_product, lower_product_in_steps, lower_shift

import tvmconv as tc
from tvmconv.compiler import memory_scopes, nvrtc
from tvmconv.devices import find_device
from tvmconv.workloads import Filter1d

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))


@pytest.fixture(scope="module")
def sm_90():
    return find_device("sm_90")


def signature(lowered):
    """The parameters of the kernel, in its text."""
    return re.findall(rf"\b{lowered.kernels[0].name}\((.*?)\)", lowered.source)[-1]


def test_constant_argument_is_a_symbol_and_no_parameter_in_cuda(sm_90):
    lowered = lower_filter(sm_90, K="constant")
    assert "__constant__ float K_ptr[5];" in lowered.source
    assert signature(lowered) == "float* __restrict__ X_ptr, float* __restrict__ Y_ptr"


def test_a_constant_larger_than_constant_memory_is_refused(sm_90):
    full, over = Filter1d(10, 16383), Filter1d(10, 16385)
    assert "__constant__ float K_ptr[16383];" in lower_filter(sm_90, full, K="constant").source
    with pytest.raises(tc.CompileError, match="K has 65540 bytes: expected at most 65536"):
        _ = lower_filter(sm_90, over, K="constant").source


TYPES = {"float32": "float", "float16": "half", "bfloat16": "nv_bfloat16", "float64": "double", "int32": "int"}
TYPES |= {"int8": "signed char", "int64": "int64_t", "uint16": "ushort"}


@needs_nvrtc
@pytest.mark.parametrize("dtype", TYPES)
def test_a_constant_has_the_type_of_its_argument_in_cuda(sm_90, dtype):
    lowered = lower_product(sm_90, dtype)
    assert f"__constant__ {TYPES[dtype]} K_ptr[4];" in lowered.source
    assert "K_ptr" not in signature(lowered)
    assert lowered.executable.kernels[0].constants == ((1, "K_ptr"),)


@needs_nvrtc
def test_a_constant_has_the_type_that_the_device_stores_it_in():
    """sm_75 has no bfloat16: TVM stores its bits as integers there."""
    lowered = lower_product(find_device("sm_75"), "bfloat16")
    assert "__constant__ ushort K_ptr[4];" in lowered.source
    assert lowered.cubin.image


@pytest.mark.parametrize(("dtype", "name"), [("float32", "float"), ("float16", "half"), ("bfloat16", "ushort")])
def test_a_constant_has_the_type_of_its_argument_in_opencl(opencl, dtype, name):
    assert f"__constant {name}* restrict K_ptr" in signature(lower_product(opencl, dtype))


@needs_nvrtc
def test_every_step_that_reads_a_constant_has_its_symbol_to_fill(sm_90):
    lowered = lower_product_in_steps(sm_90)
    assert lowered.source.count("__constant__ float K_ptr[4];") == 1
    assert [step.constants for step in lowered.executable.kernels] == [((1, "K_ptr"),)] * 2
    assert [sorted(step.arguments) for step in lowered.executable.kernels] == [[0, 3], [2, 3]]


def test_argument_that_the_text_declares_otherwise_is_refused(sm_90):
    lowered = lower_product(sm_90, "float32")
    (parameter,) = [each for each in lowered.kernels[0].parameters if each.index == 1]
    kernels = {"main_kernel": [parameter]}
    for text in ("const float* K_ptr", "float* __restrict__ K_ptr, float* __restrict__ K_ptr"):
        source = f'extern "C" __global__ void main_kernel({text}) {{}}'
        with pytest.raises(tc.CompileError, match="declares no single 'float\\* __restrict__ K_ptr'"):
            memory_scopes.apply_memory_scopes(source, "cuda", lowered.memory_scopes, lowered.arrays, kernels)


def test_a_texture_of_another_type_than_float32_is_refused(sm_90):
    with pytest.raises(tc.CompileError, match="K is read through a texture: expected the dtype float32, not float16"):
        _ = lower_product(sm_90, "float16", space="texture").source


@needs_nvrtc
def test_a_program_tells_which_arrays_are_textures(sm_90):
    (step,) = lower_shift(sm_90, (4, 5, 3), 1, 2).executable.kernels
    assert step.textures == (0,)
    assert step.arguments == (0, 1)


def test_a_texture_is_refused_for_opencl(opencl):
    with pytest.raises(tc.CompileError, match="X is read through a texture: expected the target cuda, not opencl"):
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
