"""What schedules are not for, and what configs they refuse: each in one line that tells what would be right."""

import pytest

import tvmconv as tc
from tvmconv import registry

LAYER = "conv2d:1x64x56x56,64x64x3x3,s1,p1"
FILTERS = ("constant", "halo_threads", "caching", "shuffle", "register")
NOT_FOR = {
    "hopper": [
        f"{LAYER},nhwc",  # float32
        "conv2d:1x12x8x8,16x12x3x3,s1,p1,f16,nhwc",  # channels of 24 bytes
        "conv2d:1x6x8x8,16x6x3x3,s1,p1,tf32,nhwc",
        "conv2d:1x16x8x8,16x8x3x3,s1,p1,g2,bf16,nhwc",  # groups of 16 bytes, half a wgmma
        "conv2d:1x8x99x99,16x8x1x1,s9,p0,f16,nhwc",  # a step beyond 8
        "conv2d:1x8x300x3,16x8x2x1,s1,p128x0,d256x1,f16,nhwc",  # an offset beyond 8 bits
        "conv3d:1x8x9x70x9,16x8x1x3x1,s1,p0x16x0,d1x16x1,f16,nhwc",  # an offset beyond 5 bits
        "conv2d:1x8x9x9,16x8x3x3,s1,p129,f16,nhwc",  # a corner beyond 8 bits
        "conv3d:1x8x9x9x9,16x8x3x3x3,s1,p17,f16,nhwc",  # a corner beyond 5 bits
    ],
    "mma_sync": [f"{LAYER},nhwc"],
    "tensor_core": [LAYER, "conv2d:1x6x5x5,12x1x1x1,g6,f16,nhwc"],  # a product of two numbers
    "stem": [
        "conv2d:1x3x16x16,9x1x3x3,s1,p1,g3,f16,nhwc",
        "conv2d:1x16x16x16,16x16x3x3,s1,p1,f16,nhwc",  # channels enough
        "conv2d:1x8x64x64,16x8x63x63,s1,p31,f16,nhwc",  # a filter that shared memory has no room for
    ],
    "depthwise": [LAYER, "conv2d:1x8x9x13,16x2x3x3,p1,g4"],
    "depthwise_nhwc": ["conv2d:1x64x28x28,64x1x3x3,p1,g64"],
    "grouped_nhwc": ["conv2d:1x64x28x28,64x8x3x3,p1,g8"],
    "depthwise_nchw": ["conv2d:1x64x28x28,64x1x3x3,p1,g64,f16,nhwc"],
    "grouped_nchw": ["conv2d:1x64x28x28,64x8x3x3,p1,g8,f16,nhwc"],
    "winograd": [
        "conv2d:1x8x9x9,8x8x3x3,s2,p1",
        "conv2d:1x8x9x9,8x4x3x3,s1,p1,g2",
        "conv2d:1x8x9x9,8x8x3x3,s1,p1,d2",
        "conv2d:1x8x9x9,8x8x3x5,s1,p1",
        "conv2d:1x8x9x9,8x8x1x1,s1,p0",
        "conv2d:1x8x9x9,8x8x8x8,s1,p0",
        "conv2d:32x128x512x512,128x128x3x3,s1,p1",  # transformed inputs past indices of 32 bits
    ],
    "winograd_hopper": [
        "conv2d:1x64x9x9,64x64x3x3,s2,p1,f16,nhwc",
        "conv2d:1x64x9x9,64x32x3x3,s1,p1,g2,f16,nhwc",
        "conv2d:1x64x9x9,64x64x3x3,s1,p1,d2,f16,nhwc",
        "conv2d:1x64x9x9,64x64x3x1,s1,p1,f16,nhwc",
        "conv2d:1x64x9x9,64x64x1x1,s1,p0,f16,nhwc",
        "conv2d:1x64x9x9,64x64x5x5,s1,p2,f16,nhwc",  # its error is too large
        "conv2d:1x40x9x9,64x40x3x3,s1,p1,f16,nhwc",  # channels that are no whole wgmmas
        "conv2d:1x64x9x9,64x64x3x3,s1,p1",
    ],
    # 64 KiB and 4 bytes of constants; a block of as many threads as the mask has taps; 48 KiB with the tile's 256.
    **{name: ["filter1d:100,k16385", "filter2d:9x9x1,129x129"] for name in FILTERS},
    "halo_threads": ["filter1d:100,k1025", "filter2d:9x9x1,33x17", "filter1d:100,k12035", "filter2d:9x9x1,101x83"],
    "halo_blocks": ["filter1d:100,k12035"],
    "halo_two_step": ["filter1d:100,k12035"],
    "halo_strided": ["filter2d:9x9x1,101x83"],
}
JUST_FOR = {  # what is at the limits
    "hopper": [
        "conv2d:1x4x8x8,16x4x3x3,s1,p1,tf32,nhwc",
        "conv2d:1x32x8x8,32x16x3x3,s1,p1,g2,bf16,nhwc",
        "conv2d:1x8x99x99,16x8x1x1,s8,p0,f16,nhwc",
        "conv2d:1x8x300x3,16x8x2x1,s1,p128x0,d255x1,f16,nhwc",
        "conv2d:1x8x9x9,16x8x3x3,s1,p128,f16,nhwc",
    ],
    "tensor_core": ["conv2d:1x6x5x5,12x1x1x2,g6,f16,nhwc"],
    "constant": ["filter1d:100,k16383", "filter2d:9x9x1,127x127"],
    "halo_threads": ["filter1d:100,k1023", "filter2d:9x9x1,31x31", "filter2d:3x3x1,1x1023"],
    "halo_blocks": ["filter1d:100,k12033"],
    "halo_strided": ["filter2d:9x9x1,101x81"],
    "register": ["filter1d:99,k153"],
}


def cases(table):
    return pytest.mark.parametrize(("schedule", "text"), [(name, text) for name in table for text in table[name]])


@cases(NOT_FOR)
def test_workload_of_another_schedule_is_refused_in_one_line(schedule, text):
    w = tc.parse(text)
    assert schedule not in [s.name for s in tc.schedules(w)]
    with pytest.raises(tc.ScheduleError, match=f"{schedule} computes|no schedule|{schedule}") as refused:
        tc.build(w, schedule, arch="sm_90")
    assert "\n" not in str(refused.value)


@cases(JUST_FOR)
def test_workload_at_the_limits_of_a_schedule_is_its_own(schedule, text):
    assert schedule in [s.name for s in tc.schedules(tc.parse(text))]


SMALL = {"warpgroups": 1, "wgmma_m_tiles": 1, "block_n": 16, "block_k_bytes": 64, "stages": 3, "split_k": 1}
SMALL |= {"cluster_m": 1, "cluster_n": 1}
CONFIGS = [
    *(
        ("hopper", f"{LAYER},f16,nhwc", {**SMALL, **config}, message)
        for config, message in (
            ({"wgmma_m_tiles": 2, "block_n": 256}, "accumulators per thread"),
            ({"warpgroups": 3, "wgmma_m_tiles": 2, "block_n": 128}, "the registers of all threads fit"),
            ({"stages": 8, "block_k_bytes": 256, "block_n": 256}, "bytes of shared memory"),
            ({"split_k": 2, "cluster_m": 2}, "a split reduction shares no operands"),
            ({"split_k": 8, "block_k_bytes": 256}, "each block of a split reduction has a k-tile"),
            ({"cluster_m": 4, "block_n": 48}, "whole swizzle atoms"),
            ({"block_n": 40}, "block_n takes one of 16, 32"),
        )
    ),
    (
        "hopper",
        "conv2d:1x64x8x8,41x64x3x3,p1,f16,nhwc",
        {**SMALL, "cluster_m": 2},
        "clusters share operands only if TMA stores",
    ),
    ("hopper", "conv2d:1x96x8x8,32x48x3x3,p1,g2,f16,nhwc", SMALL, "fill whole k-tiles"),
    ("mma_sync", f"{LAYER},f16,nhwc", {"warps_m": 4, "block_m": 32}, "whole mma tiles"),
    ("mma_sync", f"{LAYER},f16,nhwc", {"block_k": 32, "warps_k": 2}, "even number of mma steps"),
    ("mma_sync", f"{LAYER},f16,nhwc", {"split_k": 8, "block_k": 128}, "has a k-tile"),
    ("tensor_core", f"{LAYER},f16,nhwc", {"block_m": 32, "warps_m": 4}, "whole tiles of 16 pixels and 16 channels"),
    ("tensor_core", f"{LAYER},f16,nhwc", {"block_n": 16, "warps_n": 2}, "whole tiles of 16 pixels and 16 channels"),
    ("tensor_core", f"{LAYER},f16,nhwc", {"fragment_prefetch": 1, "block_k": 16}, "only with two slices per k-tile"),
    ("tensor_core", f"{LAYER},f16,nhwc", {"fragment_prefetch": 1, "stages": 2}, "only with two slices per k-tile"),
    (
        "winograd",
        "conv2d:1x2560x24x24,8x2560x3x3,s1,p1",
        {"output_tile": 6},
        "knob output_tile takes one of 2, 4, not 6",
    ),
    ("winograd_hopper", f"{LAYER},f16,nhwc", {"output_tile": 4}, "knob output_tile takes one of 2, not 4"),
    ("basic", "filter1d:16777216,k5", {"threads_x": 96}, "knob threads_x takes one of"),
    ("basic", "filter2d:4096x4096x3,5x5", {"threads_y": 64, "threads_x": 32}, "a block has at most 1024 threads"),
    ("halo_threads", "filter2d:4096x4096x3,5x5", {"threads_y": 4}, "a block has at least the mask's 5x5 threads"),
    ("halo_strided", "filter2d:999x999x1,101x81", {"threads_y": 32}, "a tile with its halo has at most 49152 bytes"),
]


@pytest.mark.parametrize(("schedule", "text", "config", "message"), CONFIGS)
def test_config_that_contradicts_itself_is_refused_in_words(schedule, text, config, message):
    w = tc.parse(text)
    with pytest.raises(tc.KnobError, match=message) as refused:
        registry.find_schedule(w, schedule).apply(w, config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("schedule", "place", "needs"),
    [
        *(("hopper", {"arch": arch}, "needs sm_90, and is not for") for arch in ("sm_80", "sm_89", "sm_100", "sm_120")),
        *((name, {"arch": "sm_75"}, "needs sm_80 or later") for name in ("mma_sync", "tensor_core")),
        ("tensor_core", {"device": "opencl:0"}, "is for cuda, not for opencl:0"),
    ],
)
def test_device_that_a_schedule_is_not_for_is_refused(schedule, place, needs):
    with pytest.raises(tc.ScheduleError, match=rf"^schedule {schedule} {needs}"):
        tc.build(tc.parse(f"{LAYER},bf16,nhwc"), schedule, **place)


@pytest.mark.parametrize(
    ("text", "schedules"),
    [
        (f"{LAYER},f16,nhwc", ["mma_sync", "hopper"]),
        ("conv2d:1x3x224x224,64x3x7x7,s2,p3,f16,nhwc", ["stem"]),
        ("filter1d:99,k155", ["basic"]),
        ("filter2d:64x64x5,1x31", ["register"]),
    ],
)
def test_search_tries_what_a_workload_is_made_for(text, schedules):
    found = [s.name for s in registry.schedules_to_tune(tc.parse(text), "cuda", "sm_90")]
    assert set(schedules) <= set(found)
    assert not {"default", "tiling", "tensor_core", "direct"} & set(found)
