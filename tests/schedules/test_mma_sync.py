"""`mma_sync` computes every convolution in NHWC, executed without a GPU, and takes of a GPU what its formulas say."""

import emulate
import numpy as np
import pytest
from combinations import EPILOGUES
from nasty import NASTY_1D, NASTY_2D, NASTY_3D

import tvmconv as tc
from tvmconv import gpu, library
from tvmconv.compiler import nvrtc
from tvmconv.errors import DeviceError, KnobError

DTYPES = ("f16", "bf16", "tf32")
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
LAYER = "conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc"
needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))

# Beside the nasty ones: channels that fill chunks, and several steps, tiles and blocks that share a sum.
DEEP = (
    "conv2d:1x64x8x8,64x64x3x3,s1,p1",
    "conv2d:2x32x7x9,40x32x3x3,s2,p1",
    "conv2d:1x40x7x7,24x40x3x3,s1,p1",
    "conv2d:1x128x5x5,32x128x1x1,s1,p0",
    "conv2d:3x32x9x11,48x16x3x3,s2x1,p1x0x2x1,d1x2,g2",
    "conv2d:1x20x9x9,20x20x3x3,s1,p1,d2",
)
REST_READS = ("relu,add", "relu,bias,add")  # what a sum cannot begin with
CASES = [
    (number, ",".join(filter(None, (text, DTYPES[number % 3], "nhwc", (*EPILOGUES, *REST_READS)[number % 8]))))
    for number, text in enumerate((*DEEP, *NASTY_2D, *NASTY_1D, *NASTY_3D))
]


def built(w, config=None, arch="sm_90"):
    return tc.build(w, "mma_sync", arch=arch, config=config)


def space_of(w, arch="sm_90"):
    return library.find(w, "mma_sync").space(w, gpu.limits(arch))


@pytest.mark.parametrize(("number", "text"), CASES, ids=[text for _, text in CASES])
def test_it_computes_every_workload_with_the_default_and_with_searched_tiles(number, text):
    w = tc.parse(text)
    space = space_of(w)
    for config in [None, *(space.config(point) for point in space.sample(1, np.random.default_rng(number)))]:
        assert emulate.error(built(w, config).module, w) <= w.tolerance, config


@pytest.mark.parametrize("meet", ["scratch", "cluster"])
@pytest.mark.parametrize("epilogue", ["", ",bias,add,relu", ",relu,add"])
def test_sums_are_shared_among_blocks_and_warps(meet, epilogue):
    w = tc.parse(f"conv2d:1x128x5x5,40x128x3x3,s1,p1,f16,nhwc{epilogue}")
    config = {"block_m": 16, "block_n": 16, "block_k": 64, "warps_m": 1, "warps_n": 1, "warps_k": 2}
    kernel = built(w, {**config, "stages": 3, "split_k": 4, "meet": meet})
    assert len(kernel.steps) == (2 if meet == "scratch" else 1)
    assert kernel.launch.cluster == ((1, 1, 1) if meet == "scratch" else (1, 1, 4))
    assert emulate.error(kernel.module, w) <= w.tolerance


def test_what_configs_use_is_what_is_launched():
    for text in (LAYER, f"{LAYER},relu,add", "conv2d:1x512x7x7,512x512x3x3,s1,p1,tf32,nhwc"):
        w = tc.parse(text)
        space = space_of(w)
        points = space.sample(6, np.random.default_rng(1))
        usage = space.usage(points)
        for i, point in enumerate(points):
            step = built(w, space.config(point)).steps[0]
            assert usage.dynamic_shared_bytes[i] == step.dynamic_shared_bytes
            assert usage.threads[i] == step.launch.threads
            assert usage.blocks[i] == step.launch.blocks
            assert usage.cluster[i] == step.launch.cluster[2]


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_compiles_for_every_architecture_without_spills(arch, dtype):
    w = tc.parse(f"conv2d:32x128x28x28,256x128x3x3,s1,p1,{dtype},nhwc,bias,relu")
    assert built(w, arch=arch).resources.spills == 0


@needs_nvrtc
def test_the_layers_of_networks_do_not_spill_by_default():
    layers = [layer.workload for layer in tc.suite("resnet50", 32)][2::7]
    for w in (tc.parse(f"{layer.text},f16,nhwc") for layer in layers):
        assert built(w).resources.spills == 0, w


def test_clusters_are_for_architectures_that_have_them():
    w = tc.parse("conv2d:1x512x7x7,512x512x3x3,s1,p1,f16,nhwc")
    with pytest.raises(DeviceError, match="sm_80 has clusters of at most 1"):
        built(w, {"split_k": 4, "meet": "cluster"}, arch="sm_80")
    for arch, meetings in (("sm_80", {"scratch"}), ("sm_90", {"scratch", "cluster"})):
        space = space_of(w, arch)
        assert {space.config(point)["meet"] for point in space.listed} == meetings


def test_searched_tiles_fit_the_shared_memory_of_the_device():
    w = tc.parse("conv2d:32x256x56x56,256x256x3x3,s1,p1,f16,nhwc")
    for arch in ("sm_86", "sm_80", "sm_90"):
        space = space_of(w, arch)
        assert space.usage(space.listed).dynamic_shared_bytes.max() <= gpu.limits(arch).all_shared_bytes


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"warps_m": 4, "block_m": 32}, "a warp has whole mmas"),
        ({"block_k": 32, "warps_k": 2}, "even number of mmas"),
        ({"split_k": 8, "block_k": 128}, "has a step"),
        ({"block_m": 40}, "block_m takes one of 16, 32"),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(config, complaint):
    with pytest.raises(KnobError, match=complaint):
        built(tc.parse(LAYER), config)


def test_it_is_for_channels_last_on_nvidia_gpus_since_sm_80():
    assert "mma_sync" in [s.name for s in tc.schedules(tc.parse(LAYER))]
    assert "mma_sync" not in [s.name for s in tc.schedules(tc.parse(LAYER.replace(",nhwc", "")))]
    assert "mma_sync" not in [s.name for s in tc.schedules(tc.parse(LAYER.replace(",f16", "")))]
    with pytest.raises(tc.Error, match="sm_80"):
        built(tc.parse(LAYER), arch="sm_75")


@pytest.mark.gpu
@pytest.mark.parametrize(("number", "text"), CASES, ids=[text for _, text in CASES])
def test_it_computes_every_workload_on_a_gpu(gpu, number, text):
    w = tc.parse(text)
    space = library.find(w, "mma_sync").space(w, gpu.limits)
    problem = tc.Problem(w)
    for config in [None, *(space.config(point) for point in space.sample(3, np.random.default_rng(number)))]:
        assert tc.build(w, "mma_sync", device=gpu, config=config).verify(problem).ok, config
