"""`stem` computes every first layer: any width, stride, padding and epilogue, executed without a GPU, and on one."""

import re

import pytest
from cubins import ARCHITECTURES, check_spills, needs_nvrtc
from emulate import error
from points import covering
from tvmconv.builtin.conv.tensor_cores.stem import schedule as stem

import tvmconv as tc
from tvmconv import library
from tvmconv.analysis.memory.banks import shared_accesses
from tvmconv.compiler.lower import lower
from tvmconv.devices import find
from tvmconv.gpu import limits

NASTY = (
    "conv2d:1x1x1x1,1x1x1x1,s1,p0,f16,nhwc",
    "conv2d:1x3x5x5,4x3x5x5,s1,p0,bf16,nhwc",  # a single output pixel
    "conv2d:1x1x5x2,1x1x1x2,s1,p0,f16,nhwc,relu",
    "conv2d:1x3x20x1,5x3x7x1,s1,p3x0,f16,nhwc,bias",  # an image of width 1
    "conv2d:2x3x13x17,11x3x3x3,s1,p1,f16,nhwc,bias,add,relu",  # lines and channels that are odd
    "conv2d:2x3x13x17,11x3x3x3,s2,p1,bf16,nhwc,add,bias,silu",
    "conv2d:1x3x16x40,8x3x3x3,s1,p1,f16,nhwc,bias,relu",  # pixels of two phases
    "conv2d:2x3x16x72,24x3x3x3,s1,p1,bf16,nhwc,gelu,bias",
    "conv2d:2x1x16x72,24x1x5x5,s1,p2,f16,nhwc,clamp",
    "conv2d:1x4x12x33,40x4x3x3,s1,p1,f16,nhwc,bias,add",
    "conv2d:1x4x12x33,40x4x3x3,s2,p1x2x0x1,d2x1,f16,nhwc",
    "conv2d:1x2x14x14,6x2x3x3,s1,p1,d1x3,bf16,nhwc",  # zeros between taps
    "conv2d:1x3x32x32,96x3x4x4,s4,p0,f16,nhwc,bias",
    "conv2d:1x5x9x11,7x5x3x3,s3x1,p1,f16,nhwc,bias",
    "conv2d:1x7x9x14,33x7x3x2,s1x3,p0x1x2x3,f16,nhwc",  # lines copied four bytes at a time
    "conv2d:1x6x9x14,12x6x3x2,s1x3,p0x1x2x3,f16,nhwc,silu,add,bias",
    "conv2d:1x3x20x40,16x3x7x7,s2,p3,tf32,nhwc,bias,add,relu",
    "conv2d:1x3x11x13,7x3x3x3,s1,p1,tf32,nhwc",
    "conv2d:1x3x20x40,16x3x7x7,s2,p3,f16,bias,relu",  # a plane a channel
    "conv2d:2x3x13x17,11x3x3x3,s1,p1,f16,bias,add,relu",
    "conv2d:1x4x12x32,40x4x3x3,s2,p1,bf16,add,silu",
    "conv2d:1x3x11x13,7x3x3x3,s1,p1,tf32,bias,add",
    "conv2d:7x2x3x3,2x2x3x3,s1,p2,f16,nhwc",  # more padding than the filter needs
    "conv2d:1x1x8x3,8x1x11x11,s1,p5,f16,nhwc",  # more words of the reduction than threads
    "conv2d:1x2x40x40,3x2x11x11,s4,p2,f16,nhwc",
    "conv2d:1x2x6x300,17x2x2x2,s1,p0,f16,nhwc",
    "conv2d:3x3x9x34,130x3x3x3,s1,p1,f16,nhwc,bias",  # several tiles of channels, the last nearly empty
)

CUT_SHORT = (NASTY[0], NASTY[3], NASTY[17], NASTY[-1])  # their filters end within 16 bytes

LAYERS = {
    "resnet": "conv2d:1x3x224x224,64x3x7x7,s2,p3,f16,nhwc,bias,relu",
    "resnet-32": "conv2d:32x3x224x224,64x3x7x7,s2,p3,bf16,nhwc,bias,relu",
    "resnet-nchw": "conv2d:32x3x224x224,64x3x7x7,s2,p3,f16,bias,relu",
    "resnet-tf32": "conv2d:32x3x224x224,64x3x7x7,s2,p3,tf32,nhwc,bias,relu",
    "yolo": "conv2d:1x3x640x640,32x3x3x3,s2,p1,f16,nhwc,bias,silu",
    "efficientnet": "conv2d:32x3x224x224,32x3x3x3,s2,p1,f16,nhwc,bias,silu",
    "inception": "conv2d:1x3x299x299,32x3x3x3,s2,p0,f16,nhwc,bias,relu",  # lines of an odd number of elements
    "convnext": "conv2d:1x3x224x224,96x3x4x4,s4,p0,f16,nhwc,bias",
    "vgg": "conv2d:1x3x224x224,64x3x3x3,s1,p1,f16,nhwc,bias,relu",
    "vgg-32": "conv2d:32x3x224x224,64x3x3x3,s1,p1,bf16,nhwc,bias,add,relu",
    "vae": "conv2d:1x4x64x64,512x4x3x3,s1,p1,f16,nhwc,bias",
    "u-net": "conv2d:32x4x64x64,320x4x3x3,s1,p1,bf16,nhwc,bias",
}

# Enough tiles for several of each block, where a search may have 66 blocks at least.
MANY_TILES = ("conv2d:8x3x20x40,16x3x3x3,s1,p1,f16,nhwc,bias,add", "conv2d:9x3x21x35,16x3x3x3,s1x2,p1,bf16,relu")


def lowered(text, config=None):
    w = tc.parse(text)
    scheduled, _ = library.find(w, "stem").apply(w, config)
    return lower(scheduled.mod, find("sm_90").target())


def space_of(text):
    w = tc.parse(text)
    return library.find(w, "stem").space(w, limits("sm_86"))


@pytest.mark.parametrize("text", CUT_SHORT)
def test_asynchronous_copies_are_of_all_their_bytes_or_of_none(text):
    """To memcheck, one of a part of them reads all, beyond the array."""
    source = tc.build(tc.parse(text), "stem", arch="sm_90").source
    calls = re.findall(r"^ *\w+_cp_async_\w+_src_size_\w+_(\d+)\((.*)\);$", source, re.M)
    assert calls
    for nbytes, arguments in calls:
        assert re.search(rf"(\? \(uint\){nbytes} : \(uint\)0\)|, \(uint\)({nbytes}|0))$", arguments), arguments


@pytest.mark.parametrize("text", NASTY[::2])  # the others are in the next test, or compiled below
def test_the_defaults_compute_nasty_workloads(text):
    assert error(lowered(text), tc.parse(text)) <= tc.parse(text).tolerance


@pytest.mark.parametrize("text", NASTY[1::4])
def test_searched_configs_compute_the_convolution(text):
    (config,) = covering(space_of(text), 1, seed=1)
    assert error(lowered(text, config), tc.parse(text)) <= tc.parse(text).tolerance, config


@pytest.mark.parametrize(
    ("text", "stages", "hold"),
    [*((MANY_TILES[0], *other) for other in ((2, 0), (3, 1), (4, 0))), (MANY_TILES[1], 3, 1)],
)
def test_blocks_compute_several_tiles_with_their_inputs_on_the_way(text, stages, hold):
    config = {"rows": 1, "warps": 2, "blocks": 66, "stages": stages, "hold": hold}
    assert error(lowered(text, config), tc.parse(text)) <= tc.parse(text).tolerance


@pytest.mark.parametrize("text", LAYERS.values(), ids=LAYERS)
def test_the_defaults_fit_every_gpu_and_may_be_searched(text):
    space = space_of(text)
    assert space.legal(space.point(space.default)[None]).all()


def conflicts(text):
    """Of the loads of a word, which are those of inputs, and those of 16 bytes: of the weight, and of outputs."""
    accesses = shared_accesses(tc.build(tc.parse(text), "stem", arch="sm_90"))
    loads = [access for access in accesses if access.kind == "load"]
    return tuple(sum(load.conflicts for load in loads if load.nbytes == nbytes) for nbytes in (4, 16))


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:1x3x20x64,64x3x7x7,s2,p3,f16,nhwc",
        "conv2d:1x3x20x64,32x3x3x3,s2,p1,f16,nhwc",
        "conv2d:1x3x8x64,64x3x3x3,s1,p1,f16,nhwc",
        "conv2d:1x4x8x64,64x4x3x3,s1,p1,f16,nhwc",
        "conv2d:1x1x8x64,32x1x5x5,s1,p2,f16,nhwc",
    ],
)
def test_the_usual_stems_have_no_bank_conflicts(text):
    assert conflicts(text) == (0, 0)


@pytest.mark.parametrize(
    "text", ["conv2d:1x3x32x64,64x3x4x4,s4,p0,f16,nhwc", "conv2d:1x4x8x64,64x4x3x3,s2,p1,f16,nhwc"]
)
def test_the_conflicts_of_others_are_those_that_its_choice_has_counted(text):
    """Without this, the test above could pass with a count that sees nothing."""
    tile = stem.default(tc.parse(text))
    assert conflicts(text)[0] == tile.placed.conflicts * tile.rows * 2 * tile.warps > 0


@needs_nvrtc
@pytest.mark.parametrize(("layer", "arch"), list(zip(list(LAYERS)[::2], ARCHITECTURES, strict=True)))
def test_the_defaults_compile_without_spills(layer, arch):
    check_spills(tc.parse(LAYERS[layer]), "stem", arch)


@pytest.mark.gpu
@needs_nvrtc
@pytest.mark.parametrize("layer", LAYERS)
def test_the_defaults_compile_without_spills_for_every_architecture(layer):
    """Takes no GPU: it is run where the GPU's long tests are."""
    for arch in ARCHITECTURES:
        check_spills(tc.parse(LAYERS[layer]), "stem", arch)


def test_it_is_what_is_tuned_first_where_channels_are_few():
    for text in LAYERS.values():
        assert library.to_tune(tc.parse(text), "cuda", "sm_90")[0].name == "stem"


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:1x3x16x16,9x1x3x3,s1,p1,g3,f16,nhwc",  # groups
        "conv2d:1x16x16x16,16x16x3x3,s1,p1,f16,nhwc",  # channels enough
        "conv2d:1x8x64x64,16x8x63x63,s1,p31,f16,nhwc",  # a filter that shared memory has no room for
    ],
)
def test_it_is_not_for_other_layers(text):
    assert "stem" not in [schedule.name for schedule in tc.schedules(tc.parse(text))]


def test_it_needs_asynchronous_copies():
    with pytest.raises(tc.ScheduleError, match="sm_80"):
        tc.build(tc.parse(NASTY[0]), "stem", arch="sm_75")


@pytest.mark.gpu
@pytest.mark.parametrize("text", [*NASTY, *LAYERS.values()])
def test_the_defaults_compute_every_workload_on_a_gpu(gpu, text):
    assert tc.build(tc.parse(text), "stem", device=gpu).verify().ok


@pytest.mark.gpu
@pytest.mark.parametrize("text", [*NASTY, *MANY_TILES, *LAYERS.values()])
def test_searched_configs_compute_the_convolution_on_a_gpu(gpu, text):
    for config in covering(space_of(text), 6, seed=3):
        assert tc.build(tc.parse(text), "stem", device=gpu, config=config).verify().ok, config
