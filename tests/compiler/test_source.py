"""Generated text: its kernels without TVM's preamble, and its shared arrays filled up to their alignment."""

import pytest
from placed import lower_filter

import tvmconv as tc
from tvmconv.compiler.source import (
    adapt_to_cpu,
    find_kernel,
    pad_shared_arrays,
    strip_preamble,
    vectorize_half4_copies,
)
from tvmconv.devices import find_device

W = tc.parse("conv2d:1x4x8x8,8x4x3x3,s1,p1")


@pytest.mark.parametrize(
    ("declared", "filled"),
    [
        ("float S[51]", 64),
        ("float S[64]", 64),
        ("half S[51]", 64),
        ("half S[33]", 64),
        ("nv_bfloat16 S[1]", 32),
        ("signed char S[65]", 128),
        ("double S[9]", 16),
        ("float4 S[5]", 8),
        ("int64_t S[3]", 8),
        ("uint2 S[9]", 16),
    ],
)
def test_a_shared_array_of_any_type_fills_its_alignment(declared, filled):
    text = f"  __shared__ alignas(64) {declared};"
    assert pad_shared_arrays(text) == text.replace(text[text.index("[") :], f"[{filled}];")


@pytest.mark.parametrize("text", ["float S[51];", "extern __shared__ alignas(64) float S[];"])
def test_other_arrays_are_left_as_they_are(text):
    assert pad_shared_arrays(text) == text


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_vectors_of_four_halves_are_copied_whole(dtype):
    workload = tc.parse(f"conv2d:1x16x8x8,16x1x3x3,p1,g16,{dtype},nhwc")
    source = tc.build(workload, "depthwise_nhwc", config={"vector": 4}, arch="sm_90").source
    assert source.count("*(uint2*)this = *(const uint2*)&from;") == 2
    assert vectorize_half4_copies(strip_preamble(source)) == strip_preamble(source)


@pytest.mark.parametrize(
    ("place", "first"), [("sm_90", 'extern "C" __global__'), ("opencl:0", "// Function: main_kernel")]
)
def test_the_source_stage_begins_with_the_kernel(place, first):
    kernel = tc.build(W, "tiling", device=find_device(place))
    assert kernel.format_ir_level("source").startswith(first)
    assert kernel.source.endswith(kernel.format_ir_level("source"))
    assert kernel.format_ir_level("source", full=True) == kernel.source


def test_declaration_of_a_constant_is_shown_with_its_kernel():
    assert strip_preamble(lower_filter(find_device("sm_90"), K="constant").source).startswith(
        "__constant__ float K_ptr"
    )


@pytest.mark.parametrize("text", ["", 'extern "C" __global__ void a(int y);', 'extern "C" __global__ void b(int y) {}'])
def test_a_kernel_that_the_text_does_not_define_is_told(text):
    with pytest.raises(tc.CompileError, match="does not define the kernel a exactly once"):
        find_kernel(text, "a", "cuda")


def test_cpu_source_has_64_bit_work_item_ids_and_no_guarded_loads():
    source = tc.build(W, "tiling", device="opencl:0").source
    assert source.count("condval = ") == 2
    adapted = adapt_to_cpu(source)
    assert "convert_int(get_local_id(" not in adapted
    assert adapted.count("convert_long(get_local_id(") == source.count("convert_int(get_local_id(")
    assert "else" not in adapted
    assert "condval = guard ? condval : 0.000000e+00f;" in adapted
    zeros = "  for (int i = 0; i < 4; ++i) sum_local_ptr[i] = 0;"
    assert f"  float sum_local_ptr[4];\n{zeros}\n  __local float padded_shared_ptr[40];\n  __local float" in adapted
    other_branch = source.replace("condval = 0.0", "Y_ptr[0] = 0.0")  # not the guard of a load
    assert "guard" not in adapt_to_cpu(other_branch)
