"""`tensor_core` computes every convolution in every dtype that it has, executed without a GPU, and is what it says."""

import itertools
import re

import emulate
import pytest
from combinations import EPILOGUES, LAYOUTS
from cubins import ARCHITECTURES, DTYPES, check_spills, needs_nvrtc, space_of
from nasty import LARGE, NASTY, NASTY_1D, NASTY_2D, NASTY_3D, NASTY_DEPTHWISE, VARIED
from points import covering
from tvmconv.builtin.conv.tensor_cores.tensor_plan import LEAST_SHARED_BYTES

import tvmconv as tc
from tvmconv import gpu, library
from tvmconv.analysis.memory.banks import conflicts

LAYER = "conv2d:1x64x56x56,64x64x3x3,s1,p1"

# What tiles do not divide, groups, uneven padding, steps that are fewer than stages, single pixels, split reductions.
SMALL = (
    "conv2d:2x40x7x9,72x40x3x3,s2,p1",
    "conv2d:3x32x9x11,48x16x3x3,s2x1,p1x0x2x1,d1x2,g2",
    "conv2d:1x64x7x7,64x64x3x3,s1,p1",
    "conv2d:1x3x15x14,9x3x3x3,s1,p1",
    "conv2d:1x64x1x1,40x64x1x1,s1,p0",
    "conv2d:2x6x11x11,12x1x3x3,s2,p1,g6",
    "conv1d:2x24x97,9x8x5,s3,p0x3,d2,g3",
    "conv3d:2x8x4x6x6,16x8x3x3x3,s2,p1",
)


def workloads(texts, dtypes=DTYPES, turn=0):
    """Each text in every dtype and layout, the epilogues in turn."""
    cases = itertools.product(texts, dtypes, LAYOUTS)
    for number, (text, dtype, layout) in enumerate(cases, turn):
        w = tc.parse(",".join(filter(None, (text, dtype, layout, EPILOGUES[number % len(EPILOGUES)]))))
        if library_has(w):
            yield w


def library_has(w):
    return "tensor_core" in [schedule.name for schedule in tc.schedules(w)]


def built(w, config=None, arch="sm_80"):
    return tc.build(w, "tensor_core", arch=arch, config=config)


def error(w, config=None):
    return emulate.error(built(w, config).module, w)


# Each text in a type of 16 bits and in TF32: one with channels last, the other not.
IN_TURN = [
    w
    for number, text in enumerate(SMALL)
    for place, w in enumerate(workloads([text], (DTYPES[number % 2], "tf32"), number))
    if (place in (1, 2)) == number % 2
]


@pytest.mark.parametrize("workload", IN_TURN, ids=str)
def test_it_computes_every_choice_without_a_gpu(workload):
    assert error(workload) <= workload.tolerance


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:2x40x7x9,72x40x3x3,s2,p1,f16,nhwc,bias,relu",
        "conv2d:3x32x9x11,48x16x3x3,s2x1,p1x0x2x1,d1x2,g2,bf16,nhwc,add",
        "conv2d:1x64x7x7,64x64x3x3,s1,p1,tf32,nhwc,silu",
        "conv2d:1x64x7x7,64x64x3x3,s1,p1,f16,gelu",
        "conv2d:1x64x7x7,64x64x3x3,s1,p1,tf32",
    ],
)
def test_whatever_its_knobs_are_it_computes_the_same(text):
    w = tc.parse(text)
    for config in covering(space_of(w, "tensor_core", "sm_80"), 2, seed=1):
        assert error(w, config) <= w.tolerance, config


@pytest.mark.gpu
@pytest.mark.parametrize("texts", [NASTY, LARGE, VARIED, NASTY_1D, NASTY_2D, NASTY_3D, NASTY_DEPTHWISE])
def test_it_computes_every_nasty_workload_on_a_gpu(gpu, texts):
    for w in workloads(texts):
        for config in (None, *covering(library.find(w, "tensor_core").space(w, gpu.limits), 4, seed=3)):
            found = tc.build(w, "tensor_core", device=gpu, config=config).verify()
            assert found.ok, (w, config, found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["resnet50", "vgg16"])
def test_it_computes_every_layer_of_the_networks_on_a_gpu(gpu, name, dtype):
    for layer, layout in itertools.product(tc.suite(name), LAYOUTS):
        w = tc.parse(f"{layer.workload},{dtype},{layout}")
        found = tc.build(w, "tensor_core", device=gpu).verify()
        assert found.ok, (w, found)


def test_it_is_the_rung_behind_conflict_free_in_the_dtypes_of_tensor_cores():
    names = [schedule.name for schedule in tc.schedules(tc.parse(f"{LAYER},f16"))]
    assert names[names.index("conflict_free") + 1] == "tensor_core"
    assert not library_has(tc.parse(LAYER))
    assert all(library_has(w) for w in workloads([LAYER, "conv1d:1x8x9,8x8x3", "conv3d:1x8x5x5x5,8x8x1x1x1"]))


def test_a_product_of_two_numbers_is_not_for_tensor_cores():
    assert not library_has(tc.parse("conv2d:1x6x5x5,12x1x1x1,g6,f16,nhwc"))
    assert library_has(tc.parse("conv2d:1x6x5x5,12x1x1x2,g6,f16,nhwc"))


def test_where_it_cannot_run_it_is_refused_in_one_line():
    w = tc.parse(f"{LAYER},f16,nhwc")
    with pytest.raises(tc.ScheduleError, match=r"^schedule tensor_core needs sm_80 or later, and is not for sm_75$"):
        built(w, arch="sm_75")
    with pytest.raises(tc.ScheduleError, match=r"^schedule tensor_core is for cuda, not for opencl:0$"):
        tc.build(tc.parse(f"{LAYER},bf16,nhwc"), "tensor_core", device="opencl:0")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"block_m": 32, "warps_m": 4}, "warps have whole tiles of 16 pixels and 16 channels"),
        ({"block_n": 16, "warps_n": 2}, "warps have whole tiles of 16 pixels and 16 channels"),
        ({"fragments": "ahead", "block_k": 16}, "fragments are loaded ahead where a step has two slices"),
        ({"fragments": "ahead", "stages": 2}, "fragments are loaded ahead where a step has two slices"),
        ({"block_k": 24}, "knob block_k takes one of 16, 32, 64, 128"),
    ],
)
def test_knobs_that_do_not_fit_each_other_are_refused(config, reason):
    with pytest.raises(tc.KnobError, match=reason):
        built(tc.parse(f"{LAYER},f16,nhwc"), config)


def test_a_tile_beyond_the_devices_shared_memory_is_refused_and_not_searched():
    w = tc.parse(f"{LAYER},f16,nhwc")
    config = {"block_m": 128, "block_n": 128, "block_k": 64, "stages": 4}  # 147,456 bytes
    with pytest.raises(tc.DeviceError, match=r"sm_86 has 101376 bytes of shared memory a block, static and dynamic"):
        built(w, config, arch="sm_86")
    assert built(w, config).dynamic_shared_bytes == 147456
    full = {**built(w).config, **config, "fragments": "now"}
    spaces = [space_of(w, "tensor_core", arch) for arch in ("sm_80", "sm_86")]
    assert [bool(space.legal(space.point(full)[None])[0]) for space in spaces] == [True, False]


REPRESENTATIVE = (
    "conv2d:1x64x56x56,64x64x3x3,s1,p1",
    "conv2d:1x512x7x7,512x512x3x3,s1,p1",
    "conv2d:32x128x28x28,128x128x3x3,s1,p1",
    "conv2d:32x256x56x56,64x256x1x1,s1,p0",
    "conv2d:1x3x224x224,64x3x7x7,s2,p3",
    "conv2d:1x64x56x56,64x32x3x3,s1,p1,g2",
)


@pytest.mark.parametrize("text", REPRESENTATIVE)
def test_the_defaults_fit_the_shared_memory_of_every_architecture_and_are_searched(text):
    assert gpu.limits("sm_120").all_shared_bytes == LEAST_SHARED_BYTES
    for w in workloads([text]):
        space = space_of(w, "tensor_core", "sm_120")
        assert space.legal(space.point(space.default)[None])[0], space.default


def chosen(text, dtype, layout):
    return tc.parse(f"{text},{dtype},{layout},bias,relu")


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_defaults_compile_without_spills(arch):
    """Workloads and dtypes in turn."""
    number = ARCHITECTURES.index(arch)
    dtype, layout = (("f16", "nhwc"), ("bf16", "nchw"), ("tf32", "nhwc"))[number % 3]
    check_spills(chosen(REPRESENTATIVE[number], dtype, layout), "tensor_core", arch)


@pytest.mark.gpu
@needs_nvrtc
@pytest.mark.parametrize("text", REPRESENTATIVE)
def test_all_defaults_compile_without_spills(text):
    """Takes no GPU, but minutes of a processor: it is run where the GPU's long tests are."""
    for dtype, layout, arch in itertools.product(DTYPES, LAYOUTS, ARCHITECTURES):
        check_spills(chosen(text, dtype, layout), "tensor_core", arch)


@pytest.mark.gpu
@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_searched_configs_compile(arch):
    for w in workloads(REPRESENTATIVE[:2]):
        for config in covering(space_of(w, "tensor_core", arch), 8, seed=4):
            assert built(w, config, arch).resources.registers > 0


@pytest.mark.parametrize(
    ("dtype", "product"),
    [
        ("f16", "m16n8k16.row.col.f32.f16.f16.f32"),
        ("bf16", "m16n8k16.row.col.f32.bf16.bf16.f32"),
        ("tf32", "m16n8k8.row.col.f32.tf32.tf32.f32"),
    ],
)
def test_it_multiplies_by_mma_what_ldmatrix_and_cp_async_bring(dtype, product):
    source = built(tc.parse(f"{LAYER},{dtype},nhwc")).stage("source")
    assert f"mma.sync.aligned.{product}" in source
    assert "ldmatrix.sync.aligned.m8n8.x4" in source
    copies = re.findall(r"ptx_cp_async_legacy\w*\(", source)
    assert copies
    assert all("_cg_16_" in copy for copy in copies)


@pytest.mark.parametrize(
    ("choices", "asynchronous"),
    [("f16", False), ("bf16", False), ("tf32", True), ("f16,nhwc", True)],
)
def test_copies_of_two_bytes_are_not_asynchronous(choices, asynchronous):
    source = built(tc.parse(f"{LAYER},{choices}")).stage("source")
    assert ("ptx_cp_async" in source) == asynchronous


def test_fragments_ahead_have_registers_for_two_slices():
    held = {}
    for fragments in ("now", "ahead"):
        lowered = built(tc.parse(f"{LAYER},f16,nhwc"), {"fragments": fragments}).stage("lowered")
        held[fragments] = max(map(int, re.findall(r"padded\w*_warp\w* = T.alloc_local\(\((\d+),\)", lowered)))
    assert held["ahead"] == 2 * held["now"]


@pytest.mark.parametrize("block_k", [16, 32, 64])
@pytest.mark.parametrize("dtype", ["f16", "tf32"])
def test_what_is_read_has_no_bank_conflicts_where_channels_are_last(dtype, block_k):
    """Asynchronous copies take a wavefront for each line that they come from, wherever they go."""
    w = tc.parse(f"conv2d:1x128x6x8,64x128x1x1,{dtype},nhwc")
    kernel = built(w, {"block_k": block_k, "fragments": "now"})
    assert conflicts(kernel, "load") == 0


def test_single_elements_meet_in_banks_as_they_are_copied_but_not_as_they_are_read():
    kernel = built(tc.parse("conv2d:1x128x6x8,64x128x1x1,f16"))
    assert conflicts(kernel, "load") == 0
    assert conflicts(kernel, "store") > 0


@pytest.mark.parametrize(
    ("text", "tile"),
    [
        ("conv2d:32x128x28x28,128x128x3x3,s1,p1", (128, 128, 1)),
        ("conv2d:1x64x64x64,64x64x3x3,s1,p1", (64, 32, 1)),
        ("conv2d:1x512x7x7,512x512x3x3,s1,p1", (64, 64, 8)),
        ("conv2d:32x64x28x28,16x64x3x3,s1,p1", (128, 16, 1)),
        ("conv2d:1x16x3x3,8x16x3x3,s1,p1", (16, 16, 1)),
    ],
)
def test_the_defaults_follow_the_shape(text, tile):
    """Large tiles where they make enough blocks, then smaller ones, then a split reduction; no more than there is."""
    config = space_of(tc.parse(f"{text},f16,nhwc"), "tensor_core", "sm_80").default
    assert tuple(config[knob] for knob in ("block_m", "block_n", "split_k")) == tile
