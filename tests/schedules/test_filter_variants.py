"""Each variant of the filters is what its docstring says: seen in its text, its machine code and its launch."""

import functools
import math
import re

import pytest

import tvmconv as tc
from tvmconv.compiler import nvrtc
from tvmconv.registry import find_schedule

SIGNAL, IMAGE = tc.parse("filter1d:16777216,k5"), tc.parse("filter2d:4096x4096x3,5x5")
WORD = 4  # bytes

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))

WITHOUT_SHARED = [(w, name) for w in (SIGNAL, IMAGE) for name in ("basic", "constant")]
STAGED = [
    *((SIGNAL, name) for name in ("halo_blocks", "halo_two_step", "halo_threads", "caching")),
    *((IMAGE, name) for name in ("halo_threads", "halo_strided", "caching")),
]
CONSTANT = [(SIGNAL, "constant"), (IMAGE, "constant"), *STAGED]


@functools.cache
def build(workload, schedule, arch="sm_90", **config):
    return tc.build(workload, schedule, arch=arch, config=config)


def taps(workload):
    return math.prod(workload.mask_shape)


def body(kernel):
    """The text of the kernel, without its declaration."""
    return kernel.source.rpartition("__global__")[2]


@pytest.mark.sample(2)
@needs_nvrtc
@pytest.mark.parametrize(("workload", "schedule"), CONSTANT, ids=str)
def test_taps_are_operands_of_the_multiplication_before_hopper(workload, schedule):
    sass = build(workload, schedule, arch="sm_89").sass
    assert set(re.findall(r"FFMA.*c\[0x3\]\[(0x[0-9a-f]+)\]", sass)) == {hex(WORD * i) for i in range(taps(workload))}


@pytest.mark.sample(2)
@needs_nvrtc
@pytest.mark.parametrize(("workload", "schedule"), CONSTANT, ids=str)
def test_taps_are_uniform_operands_since_hopper(workload, schedule):
    """One instruction of the warp loads one, two or four of them."""
    sass = build(workload, schedule).sass
    assert len(re.findall(r" ULDC\S* .*c\[0x3\]", sass)) >= taps(workload) / 4
    assert len(re.findall(r"FFMA.*, UR\d+, ", sass)) >= taps(workload)


@needs_nvrtc
@pytest.mark.parametrize("workload", [SIGNAL, IMAGE], ids=str)
def test_basic_has_its_mask_in_global_memory(workload):
    kernel = build(workload, "basic")
    assert kernel.memory_scopes["K"] == "global"
    assert "c[0x3]" not in kernel.sass


@pytest.mark.parametrize(("workload", "schedule"), CONSTANT, ids=str)
def test_the_mask_is_in_constant_memory_of_opencl_too(workload, schedule):
    assert "__constant float* restrict K_ptr" in tc.build(workload, schedule, device="opencl:0").source


@pytest.mark.parametrize(("workload", "schedule"), WITHOUT_SHARED, ids=str)
def test_simplest_variants_need_no_shared_memory_and_no_barrier(workload, schedule):
    kernel = build(workload, schedule)
    assert kernel.shared_bytes == 0
    assert "__syncthreads" not in kernel.source


@pytest.mark.parametrize(
    ("workload", "schedule", "block", "elements"),
    [
        (SIGNAL, "halo_blocks", (256, 1, 1), 256 + 4),
        (SIGNAL, "halo_two_step", (256, 1, 1), 256 + 4),
        (SIGNAL, "halo_threads", (1024, 1, 1), 1024),
        (SIGNAL, "caching", (256, 1, 1), 256),
        (IMAGE, "halo_threads", (32, 32, 1), 32 * 32),
        (IMAGE, "halo_strided", (32, 8, 1), (32 + 4) * (8 + 4)),
        (IMAGE, "caching", (32, 8, 1), 32 * 8),
    ],
    ids=str,
)
def test_shared_memory_holds_what_the_variant_stages_and_no_more(workload, schedule, block, elements):
    kernel = build(workload, schedule)
    assert kernel.launch.block == block
    assert kernel.shared_bytes == WORD * elements


@pytest.mark.parametrize(("workload", "schedule"), STAGED, ids=str)
def test_threads_wait_once_for_a_copy_and_once_before_the_next(workload, schedule):
    assert body(build(workload, schedule)).count("__syncthreads") == (1 if workload is SIGNAL else 2)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("filter1d:100000,k5", (1024,)),
        ("filter2d:999x999x1,3x3", (32, 32)),
        ("filter2d:999x999x1,17x17", (32, 32)),
        ("filter2d:999x999x1,3x31", (128, 8)),
        ("filter2d:999x999x1,31x1", (1, 1024)),
    ],
)
def test_halo_threads_takes_the_block_of_which_fewest_idle(text, block):
    assert tc.build(tc.parse(text), "halo_threads", arch="sm_90").launch.block[: len(block)] == block


@pytest.mark.parametrize("workload", [SIGNAL, IMAGE], ids=str)
def test_caching_reads_what_is_beside_the_tile_globally(workload):
    """One read to copy the tile, and one at a tap."""
    assert body(build(workload, "caching")).count("= X_ptr[") == 2
    assert body(build(workload, STAGED[2][1])).count("= X_ptr[") == 1


@pytest.mark.parametrize("text", ["filter1d:99,k153", "filter2d:64x64x5,1x31", "filter2d:63x61x3,17x17"])
def test_default_strip_of_a_large_mask_is_legal_in_a_search(text):
    workload = tc.parse(text)
    space = find_schedule(workload, "register").space(workload)
    assert space.is_legal(space.point_from_config(space.default)[None]).all()
