"""What `hopper` moves: bytes that TMA copies, what is read from shared memory and how, what is stored."""

import emulate
import numpy as np
import pytest
from pairs import in_pairs
from small_tiles import SMALL, all_legal, built, few_multiprocessors
from tvmconv.builtin.conv.tensor_cores.hopper import tile_config as hopper_tiles
from tvmconv.builtin.conv.tensor_cores.implicit_gemm_shape import ImplicitGemmShape

import tvmconv as tc
from tvmconv.analysis.memory.bank_conflicts import count_shared_accesses
from tvmconv.emulator.observers import AccessObserver

DTYPES = ("f16", "bf16", "tf32")


class Stored(AccessObserver):
    """How often each element of the output is stored."""

    def __init__(self, size):
        self.times = np.zeros(size, np.int64)

    def on_access(self, event):
        if (event.space, event.kind) == ("global", "store"):
            np.add.at(self.times, event.split_into_elements()[1], 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("split_k", "warpgroups"), [(2, 1), (3, 1), (5, 1), (5, 2), (8, 1), (8, 3)])
def test_each_sum_of_a_cluster_is_stored_once(split_k, warpgroups):
    """Shares are of four pixels at least: of five blocks that share 64 pixels one has none, and stores none."""
    w = tc.parse(f"conv2d:1x{16 * split_k}x9x15,16x{16 * split_k}x1x1,s1,p0,f16,nhwc")  # a step each
    config = {**SMALL, "block_k_bytes": 32, "stages": 2, "split_k": split_k, "warpgroups": warpgroups}
    stored = Stored(9 * 15 * 16)
    emulate.run(built(w, config).lowered_module, w.inputs(seed=0), watch=stored)
    assert (stored.times == 1).all()


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("dtype", "block_n", "split_k", "epilogue"), in_pairs(DTYPES, (16, 32, 48, 64, 80), (1, 2), ("", ",bias,add"))
)
def test_the_epilogue_has_no_bank_conflicts(dtype, block_n, split_k, epilogue):
    """But in TF32, where four pixels of a thread's pairs share the banks of two: twice as many wavefronts."""
    w = tc.parse(f"conv2d:1x32x8x8,80x32x1x1,s1,p0,{dtype},nhwc{epilogue}")
    found = count_shared_accesses(built(w, {**SMALL, "block_k_bytes": 32, "block_n": block_n, "split_k": split_k}))
    assert found
    times = 2 if dtype == "tf32" and split_k == 1 else 1
    assert [access for access in found if access.wavefronts > times * access.min_wavefronts] == []


class Copied(AccessObserver):
    """Bytes that TMA reads from global memory, and writes to shared memory."""

    def __init__(self):
        self.read = self.written = 0

    wants_async_proxy = True

    def on_async_proxy_access(self, event):
        if (event.space, event.kind) == ("global", "load"):
            self.read += event.nbytes * len(event.lanes)
        if (event.space, event.kind) == ("shared", "store"):
            self.written += event.nbytes * len(event.lanes)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"warpgroups": 2, "block_k_bytes": 128},
        {"split_k": 2},
        {"cluster_m": 2, "block_n": 32},
        {"cluster_n": 2},
        {"cluster_m": 2, "cluster_n": 2},
    ],
)
def test_tma_copies_the_bytes_of_all_tiles_steps_and_stages(config):
    """Without padding, and with tiles that divide: `usage` says how many bytes come from global memory."""
    w = tc.parse("conv2d:2x64x17x9,64x64x2x2,s1,p0,f16,nhwc")
    with few_multiprocessors():
        kernel = built(w, {**SMALL, **config})
        space = all_legal(w)
        copied = Copied()
        emulate.run(kernel.lowered_module, w.inputs(seed=0), watch=copied)
        tiles = hopper_tiles.HopperTileConfig.of_workload(kernel.config, w)
        p = ImplicitGemmShape.from_workload(w)
        assert copied.written == tiles.num_tiles(p) * tiles.total_k_tiles(p) * tiles.stage_bytes()
        assert copied.read == space.compute_usage(space.point_from_config(kernel.config)[None]).features["traffic"][0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:1x64x3x64,64x64x3x3,s1,p1,f16,nhwc", {"block_k_bytes": 128, "block_n": 64}),
        (
            "conv2d:2x72x4x64,48x72x3x3,s1,p1,bf16,nhwc,bias,add,relu",
            {"block_k_bytes": 64, "block_n": 48, "wgmma_m_tiles": 2},
        ),
        ("conv1d:3x32x128,24x32x5,s1,p4,d2,tf32,nhwc", {"block_k_bytes": 32, "block_n": 32}),
        ("conv2d:1x64x5x128,128x64x3x3,s1,p1,f16,nhwc,bias", {"block_k_bytes": 128, "block_n": 64, "cluster_m": 2}),
        ("conv2d:1x128x4x64,64x128x3x3,s1,p1,f16,nhwc", {"block_k_bytes": 128, "block_n": 32, "split_k": 2}),
        ("conv3d:1x32x3x3x64,32x32x2x3x3,s1,p1,f16,nhwc", {"block_k_bytes": 64, "block_n": 32}),
    ],
)
def test_taps_of_a_line_share_a_copy(text, config):
    w = tc.parse(text)
    kernel = built(w, {**SMALL, "stages": 2, "taps_per_copy": w.kernel[-1], **config})
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance
