"""Ping-pong, register reallocation, raster order and the split last wave of `hopper`, emulated on a small GPU."""

import re
from unittest import mock

import emulate
import pytest
from cubins import needs_nvrtc
from small_tiles import SMALL, built, few_multiprocessors
from tvmconv.builtin.conv.tensor_cores.gemm import pipelines
from tvmconv.builtin.conv.tensor_cores.hopper import knobs, wgrad_knobs, wgrad_product
from tvmconv.builtin.conv.tensor_cores.hopper.tile_config import HopperTileConfig
from tvmconv.builtin.conv.tensor_cores.implicit_gemm_shape import ImplicitGemmShape

import tvmconv as tc
from tvmconv.compiler import sass
from tvmconv.emulator.errors import ExecutionError
from tvmconv.registry import find_schedule

PINGPONG = {**SMALL, "warpgroups": 2, "kernel_schedule": "pingpong"}
COOPERATIVE = {**SMALL, "warpgroups": 2, "kernel_schedule": "cooperative_setmaxnreg"}


@pytest.fixture(autouse=True)
def _knobs_for_small_outputs(monkeypatch):
    monkeypatch.setattr(knobs, "MIN_OUTPUTS_PER_SM", 0)


def check(text, config, multiprocessors=2):
    w = tc.parse(text)
    with few_multiprocessors(multiprocessors):
        kernel = built(w, config)
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance, config
    return kernel


WORKLOADS = {
    "1x1": "conv2d:2x128x7x11,40x128x1x1,s1,p0,f16,nhwc",
    "3x3": "conv2d:2x32x19x17,16x32x3x3,s1,p1,f16,nhwc",
    "stride": "conv2d:2x40x23x17,24x40x3x3,s2,p1x0x1x2,f16,nhwc,bias,silu",
    "residual": "conv2d:2x64x13x15,24x64x1x1,s1,p0,f16,nhwc,bias,add,relu",
    "residual, bf16": "conv2d:2x32x17x15,80x32x3x3,s1,p1,bf16,nhwc,add",
    "residual, tf32": "conv2d:2x32x9x15,24x32x1x1,s1,p0,tf32,nhwc,bias,add",
    "one tile": "conv2d:1x64x7x7,16x64x3x3,s1,p1,f16,nhwc,bias",
    "one tile with a residual": "conv2d:1x64x7x7,16x64x1x1,s1,p0,f16,nhwc,add",
    "two tiles": "conv2d:2x64x8x8,16x64x1x1,s1,p0,f16,nhwc,add",
    "a signal": "conv1d:1x64x441,16x64x3,s1,p1,f16,nhwc,add,bias",
    "groups": "conv2d:2x64x9x9,64x32x3x3,s1,p1,g2,f16,nhwc,bias",
    "shared taps": "conv2d:2x32x5x64,16x32x3x3,s1,p1,f16,nhwc,bias",
    "wide": "conv2d:1x64x19x17,128x64x1x1,s1,p0,f16,nhwc",
    "wide, bias": "conv2d:1x32x16x23,256x32x3x3,s1,p1,bf16,nhwc,bias,relu",
    "channels first": "conv2d:2x64x8x16,24x64x1x1,s1,p0,f16,bias,add",
    "channels first, 3x3": "conv2d:2x32x9x11,24x32x3x3,s1,p1,f16,bias",
}


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:2x64x9x64,64x64x1x1,s1,p0,i8,nhwc,scale,bias,relu,quantize", {"filters": "resident"}),
        ("conv2d:2x64x9x64,64x64x1x3,s1,p0x1,i8,nhwc,scale,add,quantize", {"stages": 4}),
        ("conv2d:2x256x7x64,32x256x1x1,s1,p0,e4m3,nhwc,scale,quantize", {"block_k_bytes": 128, "promotion_buffers": 2}),
    ],
)
@pytest.mark.parametrize("multiprocessors", [2, 7])
def test_three_warpgroups_compute_tiles_in_turn(text, config, multiprocessors):
    config = {**PINGPONG, "warpgroups": 3, "block_n": 32, **config}
    check(text, config, multiprocessors)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", WORKLOADS)
def test_warpgroups_in_turn_compute_every_workload(name):
    config = {**PINGPONG, "raster_order": "m"}
    if name == "shared taps":
        config |= {"taps_per_copy": 3}
    kernel = check(WORKLOADS[name], config)
    assert (384, 1, 1) in [step.launch.block for step in kernel.kernels]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("tiles", "stages"),
    [
        pytest.param(tiles, stages, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, tiles in enumerate((1, 2, 3, 4, 5, 9))
        for j, stages in enumerate((2, 3, 5, 8))
    ],
)
def test_stages_of_the_other_warpgroup_are_skipped(tiles, stages):
    """Turns of three K tiles begin at any stage and in either phase, also where a warpgroup has one tile less."""
    config = {**PINGPONG, "wgmma_m_tiles": 3, "stages": stages}
    check(f"conv1d:1x32x{tiles * 192 - 7},16x32x3,s1,p1,f16,nhwc,add", config)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["3x3", "residual", "one tile", "channels first"])
def test_consumers_with_registers_of_the_producer_share_a_tile(name):
    check(WORKLOADS[name], {**COOPERATIVE, "cluster_m": 2})
    check(WORKLOADS[name], {**COOPERATIVE, "warpgroups": 3, "raster_order": "m"})


# A workload, a config and the number of multiprocessors; then whole waves, tiles of the last wave, and parts of each.
LAST_WAVES = {
    "one warpgroup, groups": ("groups", SMALL, 5, (2, 2, 2)),
    "odd whole waves": ("residual", {**PINGPONG, "raster_order": "m"}, 4, (3, 2, 2)),
    "even whole waves": ("3x3", PINGPONG, 5, (2, 1, 5)),
    "one whole wave": ("residual, tf32", {**COOPERATIVE, "wgmma_m_tiles": 2}, 3, (1, 1, 2)),
    "shared taps": ("shared taps", {**PINGPONG, "taps_per_copy": 3}, 3, (3, 1, 3)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LAST_WAVES)
def test_parts_of_the_last_wave_add_up(name):
    workload, config, multiprocessors, (waves, rest, parts) = LAST_WAVES[name]
    kernel = check(WORKLOADS[workload], {**config, "decomposition": "split_last_wave"}, multiprocessors)
    shape = ImplicitGemmShape.from_workload(kernel.workload)
    tiles = HopperTileConfig.of_workload(kernel.config, kernel.workload)
    with few_multiprocessors(multiprocessors):
        assert divmod(int(tiles.num_tiles(shape)), multiprocessors) == (waves, rest)
        assert tiles.last_wave_parts(shape) == parts
    assert [step.launch.grid[0] for step in kernel.kernels][:1] == [multiprocessors]
    (workspace,) = kernel.lowered_module.executable.workspace
    assert workspace.nbytes == 4 * rest * parts * tiles.block_m * tiles.block_n


# A workload, a config and the number of multiprocessors; then whole waves, tiles of the last wave, and parts of each.
NARROW_WAVES = {
    "odd whole waves": ("wide", {**PINGPONG, "block_n": 64}, 11, (1, 1, 2)),
    "even whole waves": ("wide", {**PINGPONG, "block_n": 64, "raster_order": "m"}, 5, (2, 2, 2)),
    "one whole wave": ("wide", {**COOPERATIVE, "block_n": 128, "stages": 3}, 2, (1, 1, 2)),
    "bias": ("wide, bias", {**PINGPONG, "block_n": 128, "wgmma_m_tiles": 2, "stages": 3}, 4, (1, 2, 2)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NARROW_WAVES)
def test_tiles_of_the_last_wave_are_narrower(name):
    workload, config, multiprocessors, (waves, rest, parts) = NARROW_WAVES[name]
    kernel = check(WORKLOADS[workload], {**config, "decomposition": "narrow_last_wave"}, multiprocessors)
    shape = ImplicitGemmShape.from_workload(kernel.workload)
    tiles = HopperTileConfig.of_workload(kernel.config, kernel.workload)
    with few_multiprocessors(multiprocessors):
        assert divmod(int(tiles.num_tiles(shape)), multiprocessors) == (waves, rest)
        assert tiles.narrow_parts(shape) == parts
    assert [step.launch.grid[0] for step in kernel.kernels] == [multiprocessors]


def test_a_last_wave_of_many_tiles_is_not_split():
    config = {**SMALL, "decomposition": "split_last_wave"}
    with few_multiprocessors(4), pytest.raises(tc.KnobError, match="the last wave is split if"):
        built(tc.parse(WORKLOADS["one tile"]), config)
    with few_multiprocessors(5), pytest.raises(tc.KnobError, match="only if outputs are channels last"):
        built(tc.parse("conv2d:2x32x19x17,16x32x3x3,s1,p1,f16,bias"), {**PINGPONG, "decomposition": "split_last_wave"})


FAULTS = {
    "no wait for the turn": (pipelines.OrderedSequenceBarrier, "wait", lambda self: None),
    "no end of the turn": (pipelines.OrderedSequenceBarrier, "arrive", lambda self: None),
    "no skip": (pipelines.PipelineState, "skip", lambda self, count: None),
    "early release": (pipelines.PipelineState, "previous_index", property(lambda self: self.index)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_emulator_finds_faults_of_turns(fault):
    w = tc.parse(WORKLOADS["3x3"])
    with mock.patch.object(*FAULTS[fault]), few_multiprocessors():
        kernel = built(w, PINGPONG)
    with pytest.raises(ExecutionError):
        emulate.error(kernel.lowered_module, w)


@needs_nvrtc
def test_all_warps_see_a_turn_without_taps_begin_before_it_ends():
    """Its barrier would have the same phase bit two turns later, and a warp that had not looked would wait for ever."""
    text = "conv2d_dgrad:4x32x14x14,64x32x1x1,s2,p0,f16,nhwc"  # three of four residue classes have no taps
    kernel = check(text, {**PINGPONG, "block_n": 32}, multiprocessors=3)
    ends = re.findall(r"turn_phase_ptr\[0\] = \(turn_phase_ptr\[0\] \^ 1\);\n(.*)\n(.*)", kernel.source)
    assert ["bar_sync" in line for line, _ in ends] == [False, True]
    assert "% 128) == 0" in ends[1][1]


LARGE = "conv2d:32x256x14x14,256x256x3x3,s1,p1,f16,nhwc"
WIDE = {"block_k_bytes": 128, "stages": 2, "raster_order": "m"}
SETMAXNREG = re.compile(r"USETMAXREG\S*(?: UP0,)? ")
REGISTER = re.compile(r"\bR(\d+)\b")


@pytest.mark.sample(1)
@needs_nvrtc
@pytest.mark.parametrize(
    ("config", "epilogue", "registers"),
    [
        ({**PINGPONG, "wgmma_m_tiles": 2, "block_n": 128}, "bias,add,silu", (40, 232)),
        ({**PINGPONG, "wgmma_m_tiles": 2, "block_n": 192}, "bias,silu", (40, 232)),
        ({**PINGPONG, "wgmma_m_tiles": 3, "block_n": 128}, "bias,silu", (40, 232)),
        ({**PINGPONG, "wgmma_m_tiles": 3, "block_n": 112}, "bias,add,relu", (40, 232)),
        ({**COOPERATIVE, "wgmma_m_tiles": 2, "block_n": 192}, "bias,silu", (40, 232)),
        ({**COOPERATIVE, "warpgroups": 3, "wgmma_m_tiles": 2, "block_n": 128}, "bias,silu", (32, 160)),
        ({**COOPERATIVE, "wgmma_m_tiles": 2, "block_n": 160}, "bias,add,silu", (40, 232)),
    ],
)
def test_registers_are_moved_between_producer_and_consumers(config, epilogue, registers):
    """ptxas obeys, and neither role uses more registers than it has."""
    kernel = built(tc.parse(f"{LARGE},{epilogue}"), {**config, **WIDE})
    assert "setmaxnreg' ignored" not in kernel.cubin.log
    assert "serialized" not in kernel.cubin.log
    assert kernel.resources.spills == 0
    assert kernel.resources.registers * (config["warpgroups"] + 1) >= registers[0] + config["warpgroups"] * registers[1]
    _, consumer, producer = SETMAXNREG.split(sass.disassemble(kernel.cubin.image))
    producer_registers, consumer_registers = registers
    producer = producer[: producer.rindex("UTMALDG")]  # loops of consumers that wait may follow
    assert f"{producer_registers:#x} ;" in producer[:20]
    assert f"{consumer_registers:#x} ;" in consumer[:20]
    assert max(int(number) for number in REGISTER.findall(producer)) < producer_registers
    assert max(int(number) for number in REGISTER.findall(consumer)) < consumer_registers


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d_wgrad:1x32x9x8,136x32x3x1,s1,p1x0,f16,nhwc", {**PINGPONG, "block_n": 32, "raster_order": "m"}),
        (
            "conv2d_wgrad:2x32x9x8,136x32x3x1,s2,p1x0,bf16,nhwc,add",
            {**COOPERATIVE, "block_n": 32, "decomposition": "split_last_wave"},
        ),
    ],
)
def test_ctas_compute_several_tiles_of_a_wgrad(text, config):
    caches = wgrad_product.make_family, wgrad_knobs.list_best_configs
    for cache in caches:
        cache.cache_clear()
    check(text, {"parts": 1, **config}, multiprocessors=5)
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("name", ["1x1", "residual, tf32"])
def test_stores_of_a_large_output_have_the_evict_first_policy(name, monkeypatch):
    monkeypatch.setattr(knobs, "MIN_EVICTED_BYTES", 0)
    kernel = check(WORKLOADS[name], {**PINGPONG, "output_eviction": "first"})
    assert "L2__cache_hint" in kernel.source
    assert "L2__cache_hint" not in check(WORKLOADS[name], PINGPONG).source


def test_only_large_channels_last_outputs_may_leave_the_cache_first():
    w = tc.parse("conv2d:32x64x56x56,256x64x1x1,s1,p0,f16,nhwc")
    assert [knobs.can_evict_output(tc.parse(t)) for t in (str(w), str(w).replace("32x64", "8x64"))] == [True, False]
    assert not knobs.can_evict_output(tc.parse(str(w).removesuffix(",nhwc")))
    first = [c.get("output_eviction") for c in find_schedule(w, "hopper").starting_configs(w)]
    assert first[-2:] == ["first", "first"]
    assert set(first[:-2]) == {None}


def test_more_parts_of_a_large_output_wait_for_stores(monkeypatch):
    monkeypatch.setattr(knobs, "MIN_EVICTED_BYTES", 0)
    config = {**PINGPONG, "wgmma_m_tiles": 2, "block_n": 128}
    for stages in (2, 4):
        kernel = check(WORKLOADS["wide"], {**config, "output_stages": stages})
        assert f"bulk_wait_group_read_{stages - 1}" in kernel.source
