"""`hopper` computes gradients and transposed convolutions, executed without a GPU."""

import numpy as np
import pytest
from cubins import check_spills, needs_nvrtc, space_of
from small_tiles import SMALL, build_checked, built, few_multiprocessors
from tvm import tirx
from tvmconv.builtin.conv.tensor_cores.hopper import strided_dgrad
from tvmconv.builtin.conv.tensor_cores.hopper.wgrad_product import choose_columns_per_tap

import tvmconv as tc
from tvmconv.compiler.tir_nodes import collect_nodes
from tvmconv.errors import ScheduleError
from tvmconv.registry import find_schedule
from tvmconv.target import H200

DGRADS = [
    ("conv2d_dgrad:2x32x9x8,48x32x3x3,s1,p1,f16,nhwc", {}),
    ("conv2d_dgrad:2x32x9x8,48x32x3x3,s1,p1,f16,nhwc", {"block_n": 32, "cluster_m": 2}),
    ("conv2d_dgrad:2x40x9x8,72x40x3x2,s1,p1x0,bf16,nhwc,add", {"block_n": 96, "cluster_m": 4}),
    ("conv2d_dgrad:2x64x9x8,64x32x3x3,s1,p1,g2,f16,nhwc,drelu", {"block_n": 32}),
    ("conv2d_dgrad:1x64x4x64,32x64x3x3,s1,p1,f16,nhwc", {"block_n": 64, "taps_per_copy": 3, "cluster_m": 2}),
    ("conv2d_dgrad:2x128x7x11,64x128x1x1,s1,p0,f16,nhwc", {"block_n": 128, "block_k_bytes": 128, "warpgroups": 2}),
    ("conv2d_dgrad:2x32x9x8,48x32x3x3,s1,p1,d2,f16,nhwc", {"block_n": 32, "block_k_bytes": 256, "stages": 2}),
    ("conv1d_dgrad:1x48x150,32x48x3,s1,p1,f16,nhwc", {"split_k": 2}),
    ("conv3d_dgrad:1x40x3x5x9,32x40x1x2x2,s1,p0x1x1x0x0x0,f16,nhwc", {"block_n": 48, "cluster_n": 2}),
    ("conv2d_transpose:2x32x9x8,32x24x3x3,s1,p1,f16,nhwc,bias,relu", {}),
    ("conv2d_transpose:2x32x9x8,32x24x3x3,s1,p1,f16,bias,add,relu", {"block_n": 48, "split_k": 1}),
    ("conv2d_dgrad:2x40x9x7,64x40x3x3,s1,p1,bf16,drelu", {"split_k": 2}),
    ("conv2d_dgrad:2x40x9x8,72x40x3x2,s1,p1x0,tf32,nhwc,add", {"block_n": 48, "cluster_m": 2, "block_k_bytes": 128}),
    ("conv2d_dgrad:2x64x9x8,64x32x3x3,s1,p1,g2,tf32,nhwc,drelu", {"block_n": 32}),
]

# CTAs keep the weight, or TMA stores wide boxes.
KEPT = {"filters": "resident", "split_k": 1, "kernel_schedule": "cooperative"}
RESIDENT = [
    ("conv2d_dgrad:4x64x19x18,48x64x1x1,s1,p0,f16,nhwc,add", {**KEPT, "block_n": 64}),
    ("conv2d_dgrad:2x72x19x18,136x72x1x1,s1,p0,bf16,nhwc", {**KEPT, "block_n": 96}),
    ("conv2d_dgrad:2x64x19x18,64x64x3x3,s1,p1,f16,nhwc", {**KEPT, "kernel_schedule": "pingpong", "warpgroups": 2}),
    ("conv2d_dgrad:2x96x19x18,64x96x1x1,s1,p0,tf32,nhwc", {**KEPT, "block_n": 96}),
    ("conv2d_transpose:2x64x19x18,64x80x1x1,s1,p0,f16,nhwc,bias,relu", {"output_boxes": "wide", "block_n": 80}),
]

# Rows of dX are padded to 64 pixels, which are not stored.
PADDED_LINES = [
    ("conv2d_dgrad:1x64x4x54,32x64x3x3,s1,p1,f16,nhwc", {"block_n": 64, "taps_per_copy": 3}),
    ("conv2d_dgrad:2x64x3x57,64x32x3x5,s1,p1x2,g2,bf16,nhwc,add", {"block_n": 32, "taps_per_copy": 5, "cluster_m": 2}),
    ("conv3d_dgrad:1x32x2x3x60,32x32x3x1x3,s1,p1x0x1,f16,nhwc,drelu", {"taps_per_copy": 3, "warpgroups": 2}),
    ("conv2d_transpose:1x64x3x108,64x32x3x3,s1,p1,f16,nhwc,bias,relu", {"taps_per_copy": 3, "wgmma_m_tiles": 2}),
    (
        "conv2d_dgrad:1x32x7x110,32x32x3x3,s1,p1,f16,nhwc",
        {"taps_per_copy": 3, "kernel_schedule": "pingpong", "warpgroups": 2},
    ),
    ("conv2d_dgrad:1x32x4x55,32x32x3x3,s1,p1,tf32,nhwc", {"block_n": 32, "taps_per_copy": 3}),
    ("conv2d:1x64x4x54,32x64x3x3,s1,p1,f16,nhwc,bias,add,relu", {"block_n": 32, "taps_per_copy": 3}),
]

STRIDED = [
    ("conv2d_dgrad:2x32x9x9,48x32x3x3,s2,p1,f16,nhwc", {"block_n": 32, "cluster_m": 2}),
    ("conv2d_dgrad:2x32x9x9,48x32x3x3,s2,p1,f16,nhwc", {"block_n": 32, "split_k": 3}),
    ("conv2d_dgrad:2x40x9x8,72x40x3x2,s2x3,p1x0,bf16,nhwc,add", {"block_n": 96, "cluster_m": 4}),
    ("conv2d_dgrad:2x64x9x8,64x32x3x3,s2,p1,g2,f16,nhwc", {"block_n": 32}),
    ("conv2d_dgrad:2x32x12x10,48x32x1x1,s2,p0,f16,nhwc,add,drelu", {"block_n": 32}),
    ("conv2d_dgrad:2x32x24x20,48x32x1x1,s2,p0,f16,nhwc", {"kernel_schedule": "pingpong", "warpgroups": 2}),
    ("conv2d_dgrad:2x32x31x18,48x32x3x3,s2,p1,f16,nhwc,drelu", {"kernel_schedule": "pingpong", "warpgroups": 2}),
    ("conv2d_dgrad:1x64x13x11,64x64x5x4,s4,p1x2x3x0,d2,f16,nhwc", {"block_n": 64, "cluster_n": 2}),
    ("conv2d_dgrad:1x32x8x8,32x32x1x1,s1,p1,f16,nhwc,add", {}),
    ("conv2d_transpose:2x32x9x8,32x24x4x4,s2,p1,f16,nhwc,bias,relu", {"block_n": 112, "wgmma_m_tiles": 2}),
    ("conv2d_transpose:2x32x9x8,32x24x4x4,s2,p1,f16,bias", {"block_n": 32}),
    ("conv1d_transpose:1x32x50,32x32x16,s8,p4,f16,nhwc,bias", {"block_n": 32}),
    ("conv1d_transpose:1x64x50,64x32x4,s2,p1,op1,f16,nhwc,bias,add,relu", {"split_k": 2}),
    ("conv3d_transpose:1x32x3x5x4,32x24x2x2x2,s2,p0,bf16,nhwc,bias", {}),
    ("conv3d_dgrad:2x24x5x4x5,32x24x3x3x3,s2,p1,bf16,nhwc", {"block_k_bytes": 32}),
    ("conv2d_dgrad:2x40x9x8,72x40x3x2,s2x3,p1x0,tf32,nhwc,add", {"block_n": 48, "cluster_m": 2, "block_k_bytes": 128}),
    ("conv2d_transpose:2x32x9x8,32x24x4x4,s2,p1,tf32,bias,add,relu", {"block_n": 32}),
]

SLICED = {"warpgroups": 2, "k_slices": 2, "stages": 4, "parts": 1, "block_k_bytes": 64}
WGRADS = [
    ("conv2d_wgrad:2x32x9x8,64x32x3x3,s1,p1,f16,nhwc", {"block_n": 32}),
    ("conv2d_wgrad:4x64x9x8,72x64x3x3,s1,p1,f16,nhwc", {"parts": 3}),
    ("conv2d_wgrad:4x64x9x8,72x64x3x3,s2,p1,f16,nhwc,add", {"block_n": 128, "block_k_bytes": 128}),
    ("conv2d_wgrad:4x40x9x8,136x40x3x2,s1,p1x0,bf16,nhwc", {"block_n": 80, "cluster_m": 2, "warpgroups": 2}),
    ("conv2d_wgrad:2x72x9x8,128x72x3x3,s1,p1,f16,nhwc", {"block_n": 96, "cluster_n": 2, "cluster_m": 2}),
    ("conv2d_wgrad:2x128x7x11,64x128x1x1,s1,p0,f16,nhwc", {"block_n": 128, "block_k_bytes": 128}),
    ("conv2d_wgrad:2x32x9x8,48x32x3x3,s1,p2,d2,f16,nhwc", {"block_n": 32, "block_k_bytes": 256, "stages": 2}),
    ("conv2d_wgrad:2x64x8x8,48x64x1x1,s2,p0,f16,nhwc", {}),
    ("conv1d_wgrad:1x48x400,32x48x3,s1,p1,out-f32,f16,nhwc,add", {"parts": 4}),
    ("conv3d_wgrad:1x40x3x5x9,32x40x1x2x2,s1,p0x1x1x0x0x0,f16,nhwc", {"block_n": 48}),
    ("conv2d_wgrad:2x32x9x8,64x32x3x3,s2,p1,f16,out-f32,add", {"block_n": 32}),
    ("conv2d_wgrad:4x64x9x8,80x32x3x3,s1,p1,g2,f16,nhwc", {"parts": 3, "block_n": 32}),
    ("conv2d_wgrad:4x144x9x8,144x48x3x2,s2,p1,g3,bf16,nhwc,out-f32,add", {"block_n": 32, "cluster_m": 2}),
    ("conv2d_wgrad:2x240x9x8,240x80x1x1,s1,p0,g3,f16", {"block_n": 80, "cluster_n": 2, "parts": 2}),
    # The kernel stores dK itself, and CTAs of a cluster may share the reduction.
    ("conv2d_wgrad:4x64x9x8,72x64x3x3,s2,p1,f16,nhwc,add", {"block_n": 128, "parts": 1, "warpgroups": 2}),
    ("conv2d_wgrad:4x64x9x8,72x64x3x3,s1,p1,bf16,nhwc,out-f32,add", {"parts": 1, "split_k": 3}),
    ("conv2d_wgrad:4x128x7x11,64x128x1x1,s1,p0,f16", {"block_n": 96, "cluster_n": 2, "parts": 1}),
    ("conv2d_wgrad:4x72x9x8,64x72x2x1,s1,p0,f16,nhwc", {"block_n": 32, "parts": 1, "split_k": 2}),
    # Warpgroups that take K tiles in turn, also in a cluster that shares operands, and in one that splits the rest.
    ("conv2d_wgrad:3x64x15x15,128x64x1x1,s1,p0,f16,nhwc", {**SLICED, "cluster_m": 2}),
    ("conv2d_wgrad:4x72x15x15,72x72x1x1,s1,p0,bf16,nhwc,add", {**SLICED, "split_k": 2, "stages": 5}),
    # Clusters that split the reduction of one of several parts.
    ("conv2d_wgrad:4x72x9x8,64x72x2x1,s1,p0,f16,nhwc", {"block_n": 32, "parts": 2, "split_k": 2}),
    ("conv2d_wgrad:4x64x9x8,72x64x3x3,s1,p1,bf16,nhwc,out-f32,add", {"parts": 2, "split_k": 3, "warpgroups": 2}),
    ("conv2d_wgrad:4x64x9x8,80x32x3x3,s1,p1,g2,f16,nhwc", {"parts": 3, "block_n": 32, "split_k": 2}),
    ("conv2d_wgrad:4x72x15x15,72x72x1x1,s1,p0,bf16,nhwc,add", {**SLICED, "split_k": 2, "parts": 2}),
    # Many CTAs along one axis share operands.
    ("conv2d_wgrad:2x64x9x8,256x64x1x1,s1,p0,f16,nhwc", {"block_n": 64, "cluster_m": 8, "block_k_bytes": 128}),
    ("conv2d_wgrad:2x256x9x8,64x256x1x1,s1,p0,f16,nhwc", {"cluster_n": 4, "block_k_bytes": 128}),
    ("conv2d_wgrad:2x256x9x8,72x256x1x1,s1,p0,f16,nhwc", {"cluster_m": 2, "cluster_n": 4, "block_k_bytes": 128}),
    # Clusters have more tiles than there are along each axis.
    ("conv2d_wgrad:3x192x15x15,192x192x1x1,s1,p0,f16,nhwc", {**SLICED, "cluster_m": 2, "cluster_n": 2}),
]
RANDOM_WGRAD = "conv2d_wgrad:3x40x9x8,72x40x2x2,s1,p1x0,f16,nhwc"  # narrow boxes, two parts, clusters along both modes
SMALL_WGRAD = {name: value for name, value in SMALL.items() if name != "split_k"} | {"block_n": 64}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("text", "config"), [*DGRADS, *RESIDENT, *PADDED_LINES, *STRIDED])
def test_gradients_of_inputs_are_computed(text, config):
    with few_multiprocessors():
        build_checked(text, {**SMALL, **config})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("text", "config"), WGRADS)
def test_gradients_of_weights_are_computed(text, config):
    build_checked(text, {**SMALL_WGRAD, **config})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "text", [DGRADS[0][0], DGRADS[3][0], DGRADS[8][0], STRIDED[0][0], WGRADS[0][0], WGRADS[8][0], RANDOM_WGRAD]
)
@pytest.mark.parametrize("num_configs", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_defaults_and_random_configs_are_right(text, num_configs):
    build_checked(text)
    space = space_of(tc.parse(text), "hopper")
    for point in space.sample_legal(num_configs, np.random.default_rng(1)):
        build_checked(text, space.config_from_point(point))


@pytest.mark.parametrize(
    ("text", "num_tiles"),
    [
        ("conv2d_dgrad:32x128x40x40,128x128x3x3,s1,p1,f16,nhwc", 5),
        ("conv2d_dgrad:32x128x56x56,128x128x3x3,s2,p1,f16,nhwc", 5),
        ("conv2d_dgrad:1x64x14x14,64x64x3x3,s1,p1,f16,nhwc", 4),
        ("conv2d_wgrad:32x128x28x28,128x128x3x3,s1,p1,f16,nhwc", 4),
    ],
)
def test_searches_start_with_the_best_estimates(text, num_tiles):
    w = tc.parse(text)
    space, configs = space_of(w, "hopper"), find_schedule(w, "hopper").list_starting_configs(w)
    estimates = space.compute_usage(np.stack([space.project(config) for config in [{}, *configs]])).estimate
    assert len(configs) >= num_tiles
    assert space.is_legal(space.project(configs[0])[None]).all()
    assert max(estimates[1:3]) <= 1.3 * estimates[0]


def test_defaults_of_many_tiles_do_not_split_the_reduction():
    """Their estimate is that of the K tiles of all residue classes."""
    default = space_of(tc.parse("conv2d_dgrad:32x128x56x56,128x128x3x3,s2,p1,f16,nhwc"), "hopper").default
    assert (default["split_k"], default["block_n"]) == (1, 128)


@needs_nvrtc
@pytest.mark.parametrize(
    "text",
    [
        "conv2d_wgrad:32x128x28x28,128x128x3x3,s1,p1,f16,nhwc",
        "conv2d_dgrad:32x64x56x56,64x64x3x3,s1,p1,f16,nhwc",
    ],
)
def test_defaults_compile_without_spills(text):
    check_spills(tc.parse(text), "hopper", "sm_90")


@pytest.mark.parametrize(
    "text",
    [
        "conv2d_dgrad:32x512x14x14,512x512x3x3,s2,p1,f16,nhwc",
        "conv2d_transpose:128x256x8x8,256x128x4x4,s2,p1,f16,nhwc",
    ],
)
def test_estimates_of_strided_gradients_are_above_the_roofline(text):
    w = tc.parse(text)
    product = strided_dgrad.make_product(w)
    best_us = strided_dgrad.estimate_us(strided_dgrad.select_default(product), product)
    assert best_us * 1e-6 > w.flops / H200.get_peak_flops(w.dtype)


def test_conditions_of_strided_gradients_are_short():
    """TVM takes seconds to simplify conditions in which taps are expressions of the index of a tile."""
    w = tc.parse("conv2d_dgrad:32x64x28x28,64x64x3x3,s2,p1,f16,nhwc")
    body = find_schedule(w, "hopper").apply(w, {"kernel_schedule": "pingpong", "warpgroups": 2})[0].mod["main"].body
    assert max(len(str(node.condition)) for node in collect_nodes(body, tirx.IfThenElse)) < 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("conv2d_wgrad:1x64x8x8,64x64x3x3,s1,p1,tf32,nhwc", "in float16, bfloat16; this workload has tf32"),
        ("conv2d_dgrad:1x60x8x8,64x60x3x3,s1,p1,f16,nhwc", "fill 16-byte chunks"),
        ("conv2d_dgrad:1x60x8x8,64x60x3x3,s2,p1,f16,nhwc", "fill 16-byte chunks"),
        ("conv3d_dgrad:1x16x8x8x70,16x16x1x1x40,s1x1x2,p0,f16,nhwc", "offsets are in its range"),
        ("conv2d_wgrad:1x64x8x8,64x4x3x3,s2,p1,g16,f16,nhwc", "16-byte chunks in each group"),
        ("conv2d_wgrad:1x60x8x8,64x60x3x3,s2,p1,f16,nhwc", "fill 16-byte chunks"),
    ],
)
def test_other_gradients_are_refused_in_one_line(text, message):
    with pytest.raises(ScheduleError, match=message):
        built(tc.parse(text))


@needs_nvrtc
def test_wgmmas_of_tiles_without_taps_are_not_serialized():
    """ptxas lets each wgmma wait for the one before if other instructions write its accumulators (warning C7510)."""
    config = {**SMALL, "block_k_bytes": 128}
    kernel = built(tc.parse("conv2d_dgrad:32x64x28x28,64x64x1x1,s2,p0,f16,nhwc"), config)
    assert kernel.resources.spills == 0
    assert 0 < kernel.sass.count("WARPGROUP.DEPBAR") < kernel.sass.count("HGMMA")


def test_descriptors_of_mn_major_operands_leave_out_the_rank():
    """In a cluster, upper bits of an address have the rank of its CTA; on an H100 they changed the leading offset."""
    text, config = DGRADS[2]
    mask = str((1 << 18) - 1)
    assert mask in built(tc.parse(text), {**SMALL, **config}).source
    assert mask not in built(tc.parse("conv2d:2x40x9x8,72x40x3x2,s1,p1x0,bf16,nhwc"), SMALL).source


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "launches", "prepack_launches"),
    [("s1,p1,f16", 2, 1), ("s2,p1,f16", 3, 1), ("s2,p1,tf32", 3, 2), ("s2,p1,tf32,nhwc", 1, 1)],
)
def test_weights_of_transposed_convolutions_are_converted_once(options, launches, prepack_launches):
    """Channels first, X is converted in each call, and Y where the stride divides pixels among residue classes."""
    kernel = tc.build(f"conv2d_transpose:1x32x9x8,32x32x4x4,{options}", "hopper", arch="sm_90", config={"split_k": 1})
    assert kernel.executable.num_prepack_kernels == prepack_launches
    assert len(kernel.kernels) == launches + prepack_launches


@needs_nvrtc
@pytest.mark.parametrize(("config", "num_fences"), [({"split_k": 2, "parts": 1}, 1), ({"cluster_m": 2, "parts": 2}, 0)])
def test_clusters_fence_only_the_sums_that_they_send(config, num_fences):
    kernel = built("conv2d_wgrad:4x64x9x8,192x64x3x3,s1,p1,f16,nhwc", {**SMALL_WGRAD, "split_k": 1, **config})
    assert kernel.sass.count("MEMBAR.ALL.GPU") == num_fences


@pytest.mark.parametrize(
    ("channels", "columns"),
    [(64, 64), (80, 80), (72, 96), (168, 192), (40, 48), (240, 256)],
)
def test_columns_of_wgrads_avoid_narrow_boxes_that_are_padded(channels, columns):
    w = tc.parse(f"conv2d_wgrad:32x{channels}x14x14,64x{channels}x1x1,s1,p0,f16,nhwc")
    assert choose_columns_per_tap(w.forward) == columns


def test_constraints_of_two_slices_divide_by_no_tile_without_rows():
    """One warpgroup has no rows for two slices of K; the space tells so before it counts tiles."""
    w = tc.parse("conv2d_wgrad:32x128x28x28,128x128x3x3,s1,p1,f16,nhwc")
    space = find_schedule(w, "hopper").space(w)
    with np.errstate(all="raise"):
        assert len(space.sample_legal(10, np.random.default_rng(0)))
