"""The tunable schedules compile for every architecture with no GPU, their pipelines to cp.async where there is one."""

import itertools

import pytest
from cubins import ARCHITECTURES, needs_nvrtc
from points import covering

import tvmconv as tc
from tvmconv import registry

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
    "depthwise_nchw": tc.parse("conv2d:1x1152x7x7,1152x1x5x5,s1,p2,g1152,f16"),
    "grouped_nchw": tc.parse("conv2d:1x128x56x56,128x4x3x3,s1,p1,g32,f16"),
}
BEFORE_ASYNC = "sm_75"
PIPELINES = [(schedule, f"async{stages}") for schedule in ("direct", "implicit_gemm") for stages in (2, 3, 4)]

pytestmark = needs_nvrtc


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", WORKLOADS)
def test_searched_configs_compile_with_the_shared_memory_of_tvm(schedule):
    workload = WORKLOADS[schedule]
    configs = covering(registry.find_schedule(workload, schedule).space(workload), 2, seed=3)
    for config, arch in zip(configs, itertools.cycle((BEFORE_ASYNC, "sm_120")), strict=False):
        kernel = tc.build(workload, schedule, arch=arch, config=config)
        assert kernel.resources.shared_bytes >= kernel.shared_bytes, config


@pytest.mark.sample(2)
@pytest.mark.parametrize(("schedule", "pipeline"), PIPELINES)
def test_an_asynchronous_pipeline_copies_with_cp_async(schedule, pipeline):
    """The architectures in turn."""
    arch = ARCHITECTURES[PIPELINES.index((schedule, pipeline))]
    kernel = tc.build(CHAPTER, schedule, arch=arch, config={"pipeline": pipeline})
    assert "cp.async" in kernel.source
    assert kernel.resources.registers > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize(("schedule", "pipeline"), PIPELINES)
def test_asynchronous_pipeline_copies_as_any_other_before_sm_80(schedule, pipeline):
    kernel = tc.build(CHAPTER, schedule, arch=BEFORE_ASYNC, config={"pipeline": pipeline})
    assert "cp.async" not in kernel.source
    assert kernel.resources.registers > 0
