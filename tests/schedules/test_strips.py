"""The schedules of strips: vector accesses, no conflicts, no spills, and every config computes the same."""

import functools
import math

import numpy as np
import pytest
from cubins import ARCHITECTURES, check_spills, needs_nvrtc
from nasty import CHANNELS_LAST
from points import covering, features

import tvmconv as tc
from tvmconv import library
from tvmconv.analysis.lowered.operations import GLOBAL_LOADS
from tvmconv.analysis.memory.banks import conflicts
from tvmconv.analysis.memory.traffic import traffic
from tvmconv.compiler.sass import instruction_counts

NAMES = ("depthwise_nhwc", "grouped_nhwc")
EFFICIENTNET = (  # EfficientNet-B0: channels, size of the image, of the filter, stride
    *((32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 5, 2), (240, 28, 5, 1), (240, 28, 3, 2)),
    *((480, 14, 3, 1), (480, 14, 5, 1), (672, 14, 5, 1), (672, 14, 5, 2), (1152, 7, 5, 1), (1152, 7, 3, 1)),
)
CONVNEXT = ((96, 56, 7, 1), (192, 28, 7, 1), (384, 14, 7, 1), (768, 7, 7, 1))  # ConvNeXt-T
RESNEXT = ((128, 56, 4), (256, 28, 8), (512, 14, 16), (1024, 7, 32))  # ResNeXt-50 32x4d: channels, size, of a group


def depthwise(channels, size, kernel, stride, batch=1, dtype="f16"):
    sizes = f"{batch}x{channels}x{size}x{size},{channels}x1x{kernel}x{kernel}"
    return tc.parse(f"conv2d:{sizes},s{stride},p{kernel // 2},g{channels},{dtype},nhwc")


def grouped(channels, size, group, batch=1, dtype="f16"):
    sizes = f"{batch}x{channels}x{size}x{size},{channels}x{group}x3x3"
    return tc.parse(f"conv2d:{sizes},p1,g{channels // group},{dtype},nhwc")


LAYERS = {
    **{depthwise(*layer, batch=batch): "depthwise_nhwc" for layer in (*EFFICIENTNET, *CONVNEXT) for batch in (1, 32)},
    **{grouped(*layer): "grouped_nhwc" for layer in RESNEXT},
}
IN_TURN = [(layer, name, ARCHITECTURES[i % 6]) for i, (layer, name) in enumerate(LAYERS.items()) if i % 5 == 0]


@functools.cache
def searched(n):
    """Legal configs of every workload, n each, that together try as much as possible."""
    seen, found = set(), []
    for text in CHANNELS_LAST:
        workload = tc.parse(text)
        name = NAMES[workload.groups < workload.C]
        space = library.find(workload, name).space(workload)
        found += [(workload, name, space, config) for config in covering(space, n, 1, seen)]
    return found


def check(device, n):
    for workload, name, space, config in searched(n):
        kernel = tc.build(workload, name, device=device, config=config)
        assert kernel.verify(problem(workload)).ok, config
        used = space.usage(np.stack([space.point(config)]))
        assert used.threads[0] == kernel.launch.threads, config
        assert used.blocks[0] == math.prod(kernel.launch.grid), config


@functools.cache
def problem(workload):
    return tc.Problem(workload, seed=0)


def test_searched_configs_compute_the_convolution_with_what_they_say():
    check("opencl:0", 5)


@pytest.mark.gpu
def test_searched_configs_compute_the_convolution_on_a_gpu(gpu):
    check(gpu, 30)


PRIMES = [
    "67x1x3x3,p1,g67,bf16",
    "536x1x3x3,p1,g536,bf16",
    "134x2x3x3,p1,g67,bf16",
    "268x1x3x3,p1,g268",
    "202x2x3x3,p1,g101",
]


@pytest.mark.parametrize("filters", PRIMES)
def test_channels_with_a_large_prime_factor_have_defaults(filters):
    """No number of threads divides them so that a block reads whole sectors."""
    channels = int(filters.split(",g")[1].split(",")[0]) * int(filters.split("x")[1])
    w = tc.parse(f"conv2d:2x{channels}x5x6,{filters},nhwc")
    kernel = tc.build(w, NAMES[w.groups < w.C], device="opencl:0")
    assert kernel.verify(problem(w)).ok


def test_the_searched_configs_above_try_what_they_are_meant_to():
    tried = {(name, feature) for _, name, space, config in searched(5) for feature in features(space, config)}
    for name, knobs in (
        ("depthwise_nhwc", {"weight": ("shared", "registers", "global"), "unrolled": ("filter", "row", "tap")}),
        ("grouped_nhwc", {"weight": ("shared", "global"), "unrolled": ("row", "tap"), "depth": (1, 2, 4, 8)}),
    ):
        for knob, values in {**knobs, "vector": (1, 2, 4, 8)}.items():
            assert {(name, f"{knob}={value}") for value in values} <= tried
        assert {(name, f"{tile} overhangs") for tile in ("tile_y", "tile_x")} <= tried


@pytest.mark.parametrize(
    "text", ["conv2d:1x16x9x9,16x1x3x3,p1,g16,tf32,nhwc", "conv2d:1x16x9x9,16x4x3x3,p1,g4,tf32,nhwc"]
)
def test_tf32_is_computed_in_float32(text):
    assert tc.build(tc.parse(text), device="opencl:0").verify().error <= 1e-5


@pytest.mark.parametrize("text", ["conv2d:1x64x28x28,64x1x3x3,p1,g64", "conv2d:1x64x28x28,64x8x3x3,p1,g8"])
def test_other_layouts_are_left_to_other_schedules(text):
    assert not {s.name for s in tc.schedules(tc.parse(text))} & set(NAMES)
    assert {s.name for s in tc.schedules(tc.parse(f"{text},nhwc"))} & set(NAMES)


@needs_nvrtc
@pytest.mark.parametrize(("workload", "name", "arch"), IN_TURN, ids=str)
def test_the_defaults_of_networks_compile_without_spills(workload, name, arch):
    check_spills(workload, name, arch)


@pytest.mark.gpu
@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_defaults_of_networks_compile_without_spills_for_every_architecture(dtype, arch):
    """Takes no GPU, but ten minutes of a processor: it is run where the GPU's long tests are."""
    for workload, name in LAYERS.items():
        text = workload.text.replace(",f16", "" if dtype == "f32" else f",{dtype}")
        check_spills(tc.parse(text), name, arch)


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_inputs_and_outputs_are_accessed_sixteen_bytes_at_a_time(dtype):
    """A strip of 2 rows and 4 columns: 4 lines of 6 vectors, a residual and a store for each pixel, and a bias."""
    workload = tc.parse(f"conv2d:1x64x56x56,64x1x3x3,p1,g64,{dtype},nhwc,bias,add,relu")
    strips = {"vector": 8, "threads_c": 8, "tile_y": (-1, 4, 2), "tile_x": (-1, 7, 4)}
    counts = instruction_counts(tc.build(workload, "depthwise_nhwc", arch="sm_90", config=strips).stage("sass"))
    assert counts["LDG.E.128"] == 4 * 6 + 8 + 2
    assert counts["STG.E.128"] == 8
    assert counts["FFMA"] == 9 * 8 * 8
    assert not [name for name in counts if name.startswith(("LDL", "STL"))]


@needs_nvrtc
def test_vectors_of_four_halves_are_not_taken_apart():
    workload, strips = (
        depthwise(64, 56, 3, 1),
        {"vector": 4, "threads_c": 16, "tile_y": (-1, 4, 1), "tile_x": (-1, 4, 4)},
    )
    counts = instruction_counts(tc.build(workload, "depthwise_nhwc", arch="sm_90", config=strips).stage("sass"))
    assert counts["LDG.E.64"] == 3 * 6
    assert counts["STG.E.64"] == 4
    assert counts.get("PRMT", 0) < 9


@pytest.mark.parametrize("vector", [1, 2, 4, 8])
@pytest.mark.parametrize(("workload", "name"), [(depthwise(64, 28, 5, 1), NAMES[0]), (grouped(64, 28, 8), NAMES[1])])
def test_the_filters_are_staged_and_read_without_conflicts(workload, name, vector):
    for threads in (4, 8):
        strips = {"vector": vector, "threads_c": threads, "tile_y": (-1, 4, 1), "tile_x": (-1, 7, 4)}
        kernel = tc.build(workload, name, arch="sm_90", config={**strips, "weight": "shared"})
        assert kernel.shared_bytes > 0
        assert conflicts(kernel, "load") == conflicts(kernel, "store") == 0


def test_an_input_is_loaded_once_a_strip_and_line():
    """In the middle of an image: 3 + 1 lines of 4 + 2 vectors for 2 rows of 4 pixels, and 9 taps of 8 channels."""
    workload = tc.parse("conv2d:1x64x56x56,64x1x3x3,g64,f16,nhwc")
    strips = {"vector": 8, "threads_c": 8, "tile_y": (-1, 4, 2), "tile_x": (-1, 4, 4), "weight": "shared"}
    kernel = tc.build(workload, "depthwise_nhwc", arch="sm_90", config=strips)
    threads = 8 * 4 * 4
    assert traffic(kernel).counts[GLOBAL_LOADS].elements == threads * 4 * 6 * 8 + 9 * 64


@pytest.mark.parametrize("workload", [depthwise(1152, 7, 5, 1), depthwise(32, 112, 3, 1), depthwise(96, 56, 7, 1)])
def test_a_small_image_occupies_a_large_gpu(workload):
    space = library.find(workload, "depthwise_nhwc").space(workload)
    used = space.usage(np.stack([space.point(space.default)])).columns()
    assert space.legal(np.stack([space.point(space.default)]))[0]
    assert used["blocks"][0] >= 108
    assert used["all_threads"][0] >= 12_000


def test_a_large_image_shares_its_loads():
    workload = depthwise(64, 112, 3, 1, batch=32)
    space = library.find(workload, "depthwise_nhwc").space(workload)
    used = space.usage(np.stack([space.point(space.default)])).columns()
    assert used["accumulators"][0] >= 32
    assert used["halo"][0] < 1.3
