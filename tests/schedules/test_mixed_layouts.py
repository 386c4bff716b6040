"""Convolutions that read one layout and write the other, by every schedule that serves them, on random workloads."""

import emulate
import numpy as np
import pytest

import tvmconv as tc
from tvmconv.errors import ScheduleError, WorkloadError
from tvmconv.workloads.layout import MIXED_LAYOUTS

EPILOGUES = ((), ("bias", "relu"), ("add",), ("bias", "add", "silu"))
SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 10)) for seed in range(24)]
OPERATORS = (tc.Conv1d, tc.Conv2d, tc.Conv2d, tc.Conv3d)


def draw_workload(seed, dtypes, channels, *, is_depthwise=False):
    """A small workload of any rank, with odd sizes, strides, dilation, one-sided padding, groups and an epilogue."""
    rng = np.random.default_rng(seed)
    operator = OPERATORS[seed % len(OPERATORS)]
    rank = len(operator.SPACE)
    groups = int(rng.choice((1, 1, 2)))
    c, o = (groups * int(rng.choice(channels)) for _ in range(2))
    if is_depthwise:
        groups = o = c
    kernel = rng.integers(1, 4, rank).tolist()
    space = rng.integers(*{1: (9, 40), 2: (5, 12), 3: (3, 7)}[rank], rank).tolist()
    dilation = rng.integers(1, 3, rank).tolist() if min(space) > 5 else [1] * rank
    return operator(
        int(rng.integers(1, 3)), c, *space, o, *kernel,
        stride=rng.integers(1, 3, rank).tolist(), padding=rng.integers(0, 3, 2 * rank).tolist(), dilation=dilation,
        groups=groups, dtype=str(rng.choice(dtypes)), layout=MIXED_LAYOUTS[seed % 2],
        epilogue=EPILOGUES[seed // 2 % len(EPILOGUES)],
    )  # fmt: skip


@pytest.mark.sample(7)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_workloads_on_tensor_cores(seed):
    w = draw_workload(seed, ("float16", "bfloat16", "tf32"), (16, 32))
    schedule = "mma_sync" if seed % 3 else "hopper"
    kernel = tc.build(w, schedule, arch="sm_90")
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance
    assert tc.parse(w.text) == w


@pytest.mark.parametrize("seed", SEEDS)
def test_random_workloads_on_opencl(seed, opencl):
    w = draw_workload(100 + seed, ("float32", "float32", "bfloat16"), (1, 3, 4, 6), is_depthwise=seed % 4 == 3)
    schedules = [each.name for each in tc.schedules(w) if "opencl" in each.device_kinds]
    schedule = "depthwise_nhwc" if w.is_depthwise and w.C > 1 else schedules[seed % len(schedules)]
    assert tc.build(w, schedule, device="opencl:0").verify().ok


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", MIXED_LAYOUTS)
@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        ("stem", "conv2d:1x3x19x21,24x3x3x3,s2,p1,f16"),
        ("stem", "conv2d:2x3x9x10,13x3x5x4,s1x2,p2,d1x2,tf32"),
        ("tensor_core", "conv2d:1x16x9x7,24x16x3x3,s1,p1,f16"),
        ("depthwise_nhwc", "conv2d:2x24x9x7,24x1x3x3,s1,p1,g24,f16"),
        ("grouped_nhwc", "conv2d:2x16x9x7,32x4x3x3,s1,p1,g4,f16"),
        ("winograd_hopper", "conv2d:1x32x9x8,40x32x3x3,s1,p1,f16"),
        ("hopper", "conv2d:2x64x8x8,72x64x1x1,s1,p0,f16"),  # pixels are an MN-major operand
        ("hopper", "conv2d:2x32x13x8,16x32x1x3,s3x2,p0x1,f16"),  # a stride along an axis of one tap
        ("mma_sync", "conv2d:2x32x13x8,16x32x1x3,s3x2,p0x1,f16"),
    ],
)
def test_schedules_with_layouts_of_their_own(schedule, sizes, layout):
    emulate.build_checked(f"{sizes},{layout},bias,add,relu", schedule)


@pytest.mark.parametrize(("layout", "launches"), [("nchw", 1 + 1), ("nchw-nhwc", 1 + 1), ("nhwc-nchw", 1), ("nhwc", 1)])
def test_only_channels_first_arrays_of_wide_filters_are_converted(layout, launches):
    """The weight's conversion runs once; a kernel reads X of filters of one tap, and stores Y, as they lie."""
    text = f"conv2d:2x64x8x8,72x64x1x1,s1,p0,f16{'' if layout == 'nchw' else f',{layout}'}"
    kernel = tc.build(tc.parse(text), "hopper", arch="sm_90", config={"split_k": 1})
    assert len(kernel.kernels) - kernel.executable.num_prepack_kernels == 1
    assert len(kernel.kernels) <= launches


def test_other_schedules_and_operators_refuse_mixed_layouts():
    with pytest.raises(WorkloadError, match="expected one of nchw, nhwc"):
        tc.parse("conv2d_dgrad:1x4x8x8,4x4x3x3,s1,p1,nchw-nhwc")
    with pytest.raises(ScheduleError, match="layout nhwc or a mixed layout; this workload has nchw"):
        tc.build(tc.parse("conv2d:1x4x8x8,4x1x3x3,s1,p1,g4"), "depthwise_nhwc", arch="sm_90")
