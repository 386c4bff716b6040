"""A built kernel runs, is verified, and can be looked at in every stage; what it cannot do is refused."""

import dataclasses

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.compiler import nvrtc
from tvmconv.kernel import IR_LEVELS

W = tc.parse("conv2d:2x3x9x8,6x3x3x3,s2x1,p1")
needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))


@pytest.fixture(scope="module")
def kernel():
    return tc.build(W, "tiling", device="opencl:0")


@pytest.fixture(scope="module")
def compiled():
    return tc.build(W, "tiling", arch="sm_90")


def test_a_kernel_maps_numpy_to_numpy(kernel):
    problem = tc.Problem(W, seed=1)
    y = kernel(*problem.inputs)
    assert (y.shape, y.dtype) == (W.output_shape, np.float32)
    assert problem.check(y).ok


def test_inputs_may_be_strided_and_of_another_precision(kernel):
    x, k = tc.Problem(W, seed=1).inputs
    y = kernel(np.asfortranarray(x), k.astype(np.float64))
    np.testing.assert_array_equal(y, kernel(x, k))


def test_inputs_of_another_shape_are_refused(kernel):
    x, k = W.inputs(0)
    with pytest.raises(tc.WorkloadError, match=r"takes inputs of shapes .* not "):
        kernel(x[:1], k)
    with pytest.raises(tc.WorkloadError, match="takes inputs of shapes"):
        kernel(x)


@pytest.mark.parametrize("break_it", [lambda y: y * 1.0001, lambda y: np.where(y == y.max(), np.nan, y), np.zeros_like])
def test_a_wrong_output_is_not_verified(kernel, break_it):
    problem = tc.Problem(W)
    assert not problem.check(break_it(kernel(*problem.inputs))).ok


def test_a_time_has_its_spread_and_says_how_it_was_taken(kernel):
    timing = kernel.time(seconds=0.01)
    assert 0 < timing.best <= timing.median
    assert timing.spread >= 0
    assert "profiling events" in timing.method


@needs_nvrtc
@pytest.mark.parametrize(
    ("stage", "mark"),
    [
        ("te", 'T.sblock("padded")'),
        ("tir", 'thread="threadIdx.z"'),
        ("lowered", "T.launch_thread"),
        ("source", "__global__"),
        ("ptx", ".target sm_90"),
        ("sass", "FFMA"),
        ("resources", "registers="),
    ],
)
def test_every_stage_can_be_looked_at_without_a_gpu(compiled, stage, mark):
    assert mark in compiled.format_ir_level(stage)
    assert stage in IR_LEVELS


@pytest.mark.parametrize("stage", ["ptx", "sass", "resources"])
def test_stages_of_cuda_are_refused_for_opencl(kernel, stage):
    with pytest.raises(tc.CompileError, match="exists for CUDA only, not for opencl:0"):
        kernel.format_ir_level(stage)


def test_a_kernel_to_compile_for_only_does_not_run(compiled):
    with pytest.raises(tc.DeviceError, match="sm_90 is to compile for only"):
        compiled(*W.inputs(0))


def test_a_block_with_too_many_threads_is_refused():
    w = tc.parse("conv2d:1x4x64x64,64x4x3x3,s1,p1")
    config = {"tile_c": (-1, 64, 1), "tile_h": (-1, 8, 1), "tile_w": (-1, 16, 1)}
    with pytest.raises(tc.DeviceError, match="at most 1024 threads a block and the kernel has 8192"):
        tc.build(w, "tiling", arch="sm_90", config=config)


def test_a_default_config_beyond_the_device_is_refused(opencl):
    small = dataclasses.replace(opencl, max_threads_per_block=8)
    with pytest.raises(tc.DeviceError, match="opencl:0 runs at most 8 threads a block and the kernel has"):
        tc.build(W, "conflict_free", device=small)
