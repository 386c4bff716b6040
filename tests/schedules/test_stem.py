"""`stem` computes every first layer: any width, stride, padding and epilogue, executed without a GPU, and on one."""

import re

import emulate
import pytest
from emulate import error
from listed import listed
from tvmconv.builtin.conv.tensor_cores.stem import schedule as stem
from tvmconv.builtin.conv.tensor_cores.stem.volume_view import view_as_volume

import tvmconv as tc
from tvmconv.analysis.memory.bank_conflicts import count_shared_accesses

NASTY = listed("nasty")["stem"]
CUT_SHORT = (NASTY[0], NASTY[2], NASTY[12], NASTY[-1])  # their filters end within 16 bytes

# Enough tiles for several of each block, where a search may have 66 blocks at least.
MANY_TILES = ("conv2d:8x3x20x40,16x3x3x3,s1,p1,f16,nhwc,bias,add", "conv2d:9x3x21x35,16x3x3x3,s1x2,p1,bf16,relu")


@pytest.mark.sample(3)
@pytest.mark.parametrize("text", CUT_SHORT)
def test_asynchronous_copies_are_of_all_their_bytes_or_of_none(text):
    """To memcheck, one of a part of them reads all, beyond the array."""
    source = tc.build(tc.parse(text), "stem", arch="sm_90").source
    calls = re.findall(r"^ *\w+_cp_async_\w+_src_size_\w+_(\d+)\((.*)\);$", source, re.M)
    assert calls
    for nbytes, arguments in calls:
        assert re.search(rf"(\? \(uint\){nbytes} : \(uint\)0\)|, \(uint\)({nbytes}|0))$", arguments), arguments


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "stages", "hold"),
    [*((MANY_TILES[0], *other) for other in ((2, 0), (3, 1), (4, 0))), (MANY_TILES[1], 3, 1)],
)
def test_blocks_compute_several_tiles_with_inputs_on_the_way(text, stages, hold):
    config = {"block_p": 1, "warps": 2, "max_ctas": 66, "stages": stages, "weights_in_registers": hold}
    w = tc.parse(text)
    assert error(tc.build(w, "stem", arch="sm_90", config=config).lowered_module, w) <= w.tolerance


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "text",
    [
        "conv3d:2x3x4x9x13,17x3x3x5x3,s1x2x2,p1x2x1,f16,nhwc,bias,relu",
        "conv3d:1x2x6x9x11,9x2x3x3x4,s2x1x3,p1x0x2x0x1x1,d2x1x1,bf16,add",
        "conv3d:1x3x3x7x9,9x3x2x3x3,s1,p1,d1x1x2,tf32,nchw-nhwc",
        "conv1d:3x2x101,24x2x7,s3,p3,f16,nhwc,bias,relu",
        "conv1d:2x1x300,33x1x10,s5,p0,f16",
    ],
)
def test_first_layers_of_one_and_three_axes_are_computed(text):
    emulate.build_checked(text, "stem", arch="sm_80")


def conflicts(text):
    """Of the loads of a word, which are those of inputs, and those of 16 bytes: of the weight, and of outputs."""
    accesses = count_shared_accesses(tc.build(tc.parse(text), "stem", arch="sm_90"))
    loads = [access for access in accesses if access.kind == "load"]
    return tuple(sum(load.num_conflicts for load in loads if load.nbytes == nbytes) for nbytes in (4, 16))


@pytest.mark.sample(2)
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
def test_conflicts_of_others_are_those_that_the_choice_counted(text):
    """Without this, the test above could pass with a count that sees nothing."""
    tile = stem.select_default_config(view_as_volume(tc.parse(text)))
    assert conflicts(text)[0] == tile.smem_layout.num_conflicts * tile.block_p * 2 * tile.warps > 0
