"""The schedules of strips: vector accesses, no conflicts, no spills, and every config computes the same."""

import functools

import numpy as np
import pytest
from cubins import needs_nvrtc

import tvmconv as tc
from tvmconv import registry
from tvmconv.analysis.memory.bank_conflicts import count_conflicts
from tvmconv.analysis.memory.traffic import count_traffic
from tvmconv.analysis.tir.operations import GLOBAL_LOADS
from tvmconv.compiler.sass import count_instructions

NAMES = ("depthwise_nhwc", "grouped_nhwc")


def depthwise(channels, size, kernel, stride, batch=1, dtype="f16"):
    sizes = f"{batch}x{channels}x{size}x{size},{channels}x1x{kernel}x{kernel}"
    return tc.parse(f"conv2d:{sizes},s{stride},p{kernel // 2},g{channels},{dtype},nhwc")


def grouped(channels, size, group, batch=1, dtype="f16"):
    sizes = f"{batch}x{channels}x{size}x{size},{channels}x{group}x3x3"
    return tc.parse(f"conv2d:{sizes},p1,g{channels // group},{dtype},nhwc")


@functools.cache
def problem(workload):
    return tc.Problem(workload, seed=0)


PRIMES = [
    "67x1x3x3,p1,g67,bf16",
    "536x1x3x3,p1,g536,bf16",
    "134x2x3x3,p1,g67,bf16",
    "268x1x3x3,p1,g268",
    "202x2x3x3,p1,g101",
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("filters", PRIMES)
def test_channels_with_a_large_prime_factor_have_defaults(filters):
    """No number of threads divides them so that a block reads whole sectors."""
    channels = int(filters.split(",g")[1].split(",")[0]) * int(filters.split("x")[1])
    w = tc.parse(f"conv2d:2x{channels}x5x6,{filters},nhwc")
    kernel = tc.build(w, NAMES[w.groups < w.C], device="opencl:0")
    assert kernel.verify(problem(w)).ok


@pytest.mark.sample(1)
@needs_nvrtc
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_inputs_and_outputs_are_accessed_sixteen_bytes_at_a_time(dtype):
    """A strip of 2 rows and 4 columns: 4 lines of 6 vectors, a residual and a store for each pixel, and a bias."""
    workload = tc.parse(f"conv2d:1x64x56x56,64x1x3x3,p1,g64,{dtype},nhwc,bias,add,relu")
    strips = {"vector": 8, "threads_c": 8, "tile_y": (-1, 4, 2), "tile_x": (-1, 7, 4)}
    counts = count_instructions(
        tc.build(workload, "depthwise_nhwc", arch="sm_90", config=strips).format_ir_level("sass")
    )
    assert counts["LDG.E.128"] == 4 * 6 + 8 + 2
    assert counts["STG.E.128"] == 8
    assert counts["FFMA"] == 9 * 8 * 8
    assert not [name for name in counts if name.startswith(("LDL", "STL"))]


@pytest.mark.sample(5)
@pytest.mark.parametrize("vector", [1, 2, 4, 8])
@pytest.mark.parametrize(("workload", "name"), [(depthwise(64, 28, 5, 1), NAMES[0]), (grouped(64, 28, 8), NAMES[1])])
def test_the_filters_are_staged_and_read_without_conflicts(workload, name, vector):
    for threads in (4, 8):
        strips = {"vector": vector, "threads_c": threads, "tile_y": (-1, 4, 1), "tile_x": (-1, 7, 4)}
        kernel = tc.build(workload, name, arch="sm_90", config={**strips, "weight_scope": "shared"})
        assert kernel.shared_bytes > 0
        assert count_conflicts(kernel, "load") == count_conflicts(kernel, "store") == 0


def test_an_input_is_loaded_once_a_strip_and_line():
    """In the middle of an image: 3 + 1 lines of 4 + 2 vectors for 2 rows of 4 pixels, and 9 taps of 8 channels."""
    workload = tc.parse("conv2d:1x64x56x56,64x1x3x3,g64,f16,nhwc")
    strips = {"vector": 8, "threads_c": 8, "tile_y": (-1, 4, 2), "tile_x": (-1, 4, 4), "weight_scope": "shared"}
    kernel = tc.build(workload, "depthwise_nhwc", arch="sm_90", config=strips)
    threads = 8 * 4 * 4
    assert count_traffic(kernel).counts[GLOBAL_LOADS].num_elements == threads * 4 * 6 * 8 + 9 * 64


@pytest.mark.parametrize("workload", [depthwise(1152, 7, 5, 1), depthwise(32, 112, 3, 1), depthwise(96, 56, 7, 1)])
def test_a_small_image_occupies_a_large_gpu(workload):
    space = registry.find_schedule(workload, "depthwise_nhwc").space(workload)
    used = space.compute_usage(np.stack([space.point_from_config(space.default)])).to_columns()
    assert space.is_legal(np.stack([space.point_from_config(space.default)]))[0]
    assert used["blocks"][0] >= 108
    assert used["all_threads"][0] >= 12_000
