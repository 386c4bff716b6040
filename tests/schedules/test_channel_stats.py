"""The epilogue operation `stats`: mean and variance of each output channel, executed without a GPU."""

import emulate
import numpy as np
import pytest
from cubins import space_of
from small_tiles import SMALL, few_multiprocessors
from tvmconv.builtin.conv.tensor_cores.hopper import knobs

import tvmconv as tc
from tvmconv.analysis.races import find_races
from tvmconv.errors import ScheduleError, WorkloadError
from tvmconv.registry import schedules
from tvmconv.verification import Problem

# Workloads with tile configs: partial tiles along pixels and channels, groups, strides, views, and kernel schedules.
HOPPER_CASES = {
    "partial-tiles": ("conv2d:2x32x9x8,24x32x2x3,s1,p1x1x0x1,f16,nhwc,bias,relu,stats", {}),
    "two-atoms-tf32": ("conv1d:2x48x150,48x48x3,s2,p1,tf32,nhwc,stats", {"block_n": 32, "wgmma_m_tiles": 2}),
    "wide-rows": ("conv2d:3x32x11x9,136x32x1x1,s1,p0,bf16,nhwc,stats", {"block_n": 128, "warpgroups": 2}),
    "groups": ("conv2d:1x64x9x9,48x32x3x3,s1,p1,g2,f16,nhwc,silu,stats", {"block_n": 32}),
    "cluster": ("conv3d:1x40x3x5x9,48x40x1x2x2,s1,p0,d1x2x1,f16,nhwc,stats", {"cluster_m": 2, "cluster_n": 2}),
    "patches": ("conv2d:2x6x32x32,16x6x4x4,s4,p0,f16,nhwc,stats", {}),
    "pingpong": (
        "conv2d:2x32x13x11,32x32x3x3,s1,p1,f16,nhwc,stats",
        {"warpgroups": 2, "kernel_schedule": "pingpong", "block_n": 32},
    ),
}


@pytest.fixture(autouse=True)
def _all_knobs_for_small_outputs(monkeypatch):
    monkeypatch.setattr(knobs, "MIN_OUTPUTS_PER_SM", 0)


MMA_SYNC = {"block_m": 32, "block_n": 32, "warps_m": 2, "warps_n": 1, "warps_k": 1, "block_k": 32, "stages": 2}
MMA_SYNC_CASES = {
    "partial tiles": ("conv2d:2x32x9x8,24x32x2x3,s1,p1x1x0x1,f16,nhwc,bias,relu,stats", {}),
    "few channels": ("conv2d:2x6x9x11,10x6x3x3,s1,p1,bf16,nhwc,stats", {"block_m": 64}),
    "several words per thread": ("conv2d:2x32x9x8,140x32x1x1,s1,p0,tf32,nhwc,stats", {"block_n": 256, "warps_n": 2}),
    "groups": ("conv2d:1x64x9x9,48x32x3x3,s2,p1,g2,f16,nhwc,silu,stats", {"warps_k": 2, "block_k": 64}),
    "tiles in turn": ("conv2d:2x32x15x9,24x32x3x3,s1,p1,f16,nhwc,stats", {"tiles_per_block": 2}),
}


def run(text, schedule, config, arch="sm_90", inputs=None):
    """The kernel, its output and statistics, and the workload's inputs."""
    w = tc.parse(text)
    with few_multiprocessors():
        kernel = tc.build(w, schedule, arch=arch, config=config)
        inputs = w.inputs(seed=0) if inputs is None else inputs
        return kernel, emulate.run(kernel.lowered_module, inputs), inputs


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "text", "config"),
    [
        *(pytest.param("hopper", text, {**SMALL, **config}, id=name) for name, (text, config) in HOPPER_CASES.items()),
        *(
            pytest.param("mma_sync", text, {**MMA_SYNC, **config}, id=f"mma_sync, {name}")
            for name, (text, config) in MMA_SYNC_CASES.items()
        ),
    ],
)
def test_statistics_are_those_of_the_stored_output(schedule, text, config):
    kernel, y, inputs = run(text, schedule, config, arch="sm_90" if schedule == "hopper" else "sm_80")
    w = kernel.workload
    problem = Problem(w, seed=0)
    assert problem.check(y, inputs[-1]).ok
    mean, variance = w.compute_stats(y)
    np.testing.assert_allclose(inputs[-1][0], mean, atol=1e-6 * float(np.sqrt(mean**2 + variance).max()))
    np.testing.assert_allclose(inputs[-1][1], variance, rtol=2e-6)


def test_a_mean_far_from_zero_costs_no_digits_of_the_variance():
    w = tc.parse("conv2d:2x32x10x10,16x32x1x1,s1,p0,tf32,nhwc,bias,stats")
    x, k, bias, stats = w.inputs(seed=0)
    _, y, inputs = run(w.text, "hopper", SMALL, inputs=(x, k, bias + 1000, stats))
    np.testing.assert_allclose(inputs[-1][1], w.compute_stats(y)[1], rtol=1e-4)


def test_wrong_statistics_are_found():
    problem = Problem(tc.parse("conv2d:1x8x6x6,8x8x1x1,s1,p0,f16,nhwc,stats"), seed=0)
    y = problem.reference.astype(np.float16)
    stats = problem.workload.compute_stats(y)
    assert problem.check(y, stats).ok
    for row, channel, value in ((0, 3, stats[0, 3] + 0.1), (1, 0, 1.1 * stats[1, 0]), (1, 7, np.nan)):
        changed = stats.copy()
        changed[row, channel] = value
        assert not problem.check(y, changed).ok


def test_kernels_with_statistics_have_no_races():
    text, config = HOPPER_CASES["wide-rows"]
    with few_multiprocessors():
        assert find_races(tc.build(text, "hopper", arch="sm_90", config={**SMALL, **config})) == []
    text, config = MMA_SYNC_CASES["tiles in turn"]
    assert find_races(tc.build(text, "mma_sync", arch="sm_80", config={**MMA_SYNC, **config})) == []


def test_only_schedules_that_return_statistics_are_listed():
    assert [s.name for s in schedules("conv2d:1x16x8x8,16x16x3x3,s1,p1,f16,nhwc,stats")] == ["hopper", "mma_sync"]
    with pytest.raises(ScheduleError, match="tiling does not compute the epilogue operation stats"):
        tc.build("conv2d:1x16x8x8,16x16x3x3,s1,p1,nhwc,stats", "tiling", arch="sm_90")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("conv2d:1x16x8x8,16x16x3x3,s1,p1,f16,nhwc,stats,relu", "expected stats as the last operation"),
        ("conv2d:1x16x8x8,16x16x3x3,s1,p1,f16,stats", "needs channels last"),
        ("conv2d_dgrad:1x16x8x8,16x16x3x3,s1,p1,f16,nhwc,stats", "does not support it"),
    ],
)
def test_workloads_without_such_statistics_are_refused(text, message):
    with pytest.raises(WorkloadError, match=message):
        tc.parse(text)


def test_long_reductions_with_whole_sums_are_searched():
    """The best estimate of all configs is that of a split reduction, many times less than those of whole sums."""
    w = tc.parse("conv3d:1x2048x1x1x1,2x2048x3x1x3,s1,p1x0x1,f16,nhwc,stats")
    assert len(space_of(w, "mma_sync").sample_legal(1, np.random.default_rng(0)))
