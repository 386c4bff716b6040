"""The tunable schedules compile for every architecture with no GPU, their pipelines to cp.async where there is one."""

import pytest
from points import covering

import tvmconv as tc
from tvmconv import library
from tvmconv.compiler import nvrtc

CHAPTER = tc.parse("conv2d:1x64x64x64,64x64x3x3,s1,p1")
DEPTHWISE = tc.parse("conv2d:1x128x56x56,128x1x3x3,s1,p1,g128")  # of MobileNet
CHANNELS_LAST = tc.parse("conv2d:1x1152x7x7,1152x1x5x5,s1,p2,g1152,f16,nhwc")  # of EfficientNet-B0
GROUPED = tc.parse("conv2d:1x128x56x56,128x4x3x3,s1,p1,g32,f16,nhwc")  # of ResNeXt-50
WORKLOADS = {
    "direct": CHAPTER,
    "implicit_gemm": CHAPTER,
    "depthwise": DEPTHWISE,
    "depthwise_nhwc": CHANNELS_LAST,
    "grouped_nhwc": GROUPED,
}
BEFORE_ASYNC, SINCE_ASYNC = ("sm_75",), ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

pytestmark = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))


@pytest.mark.parametrize("arch", BEFORE_ASYNC + SINCE_ASYNC)
@pytest.mark.parametrize("schedule", WORKLOADS)
def test_the_defaults_compile_without_spills(schedule, arch):
    resources = tc.build(WORKLOADS[schedule], schedule, arch=arch).resources
    assert resources.spills == 0
    assert 0 < resources.registers <= 255


@pytest.mark.parametrize("arch", ["sm_75", "sm_120"])
@pytest.mark.parametrize("schedule", WORKLOADS)
def test_searched_configs_compile_with_the_shared_memory_that_tvm_allocates(schedule, arch):
    workload = WORKLOADS[schedule]
    for config in covering(library.find(workload, schedule).space(workload), 5, seed=3):
        kernel = tc.build(workload, schedule, arch=arch, config=config)
        assert kernel.resources.shared_bytes >= kernel.shared_bytes, config


@pytest.mark.parametrize("arch", SINCE_ASYNC)
@pytest.mark.parametrize("pipeline", ["async2", "async3", "async4"])
@pytest.mark.parametrize("schedule", ["direct", "implicit_gemm"])
def test_an_asynchronous_pipeline_copies_with_cp_async(schedule, pipeline, arch):
    kernel = tc.build(CHAPTER, schedule, arch=arch, config={"pipeline": pipeline})
    assert "cp.async" in kernel.source
    assert kernel.resources.registers > 0


@pytest.mark.parametrize("arch", BEFORE_ASYNC)
@pytest.mark.parametrize("pipeline", ["async2", "async3", "async4"])
@pytest.mark.parametrize("schedule", ["direct", "implicit_gemm"])
def test_an_asynchronous_pipeline_copies_as_any_other_before_sm_80(schedule, pipeline, arch):
    kernel = tc.build(CHAPTER, schedule, arch=arch, config={"pipeline": pipeline})
    assert "cp.async" not in kernel.source
    assert kernel.resources.registers > 0


@pytest.mark.parametrize("pipeline", ["none", "registers"])
@pytest.mark.parametrize("schedule", ["direct", "implicit_gemm"])
def test_other_pipelines_have_no_cp_async(schedule, pipeline):
    assert "cp.async" not in tc.build(CHAPTER, schedule, arch="sm_90", config={"pipeline": pipeline}).source
