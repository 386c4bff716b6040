"""Depthwise and grouped convolutions, channels first: vectors of columns, on random workloads and configs."""

from pathlib import Path

import emulate
import numpy as np
import pytest
from cubins import needs_nvrtc

import tvmconv as tc
from tvmconv import registry
from tvmconv.analysis.memory.bank_conflicts import count_conflicts, count_shared_accesses
from tvmconv.analysis.races import find_races
from tvmconv.compiler.sass import count_instructions
from tvmconv.errors import KnobError
from tvmconv.target import get_block_limits

DATA = Path(__file__).parents[1] / "data"

EPILOGUES = ((), ("bias", "relu"), ("add",), ("bias", "add", "silu"))
OPERATORS = (tc.Conv1d, tc.Conv2d, tc.Conv2d, tc.Conv3d)
WIDTHS = {1: (8, 16, 33, 40), 2: (7, 8, 12, 14, 16), 3: (4, 5, 8)}  # with vectors of 1 to 8 columns


def draw_workload(seed, *, is_depthwise):
    """A small workload of any rank, with a stride, dilation, one-sided padding and an epilogue."""
    rng = np.random.default_rng(seed)
    operator = OPERATORS[seed % len(OPERATORS)]
    rank, groups = len(operator.SPACE), int(rng.choice((2, 3, 6, 16)))
    inputs = 1 if is_depthwise else int(rng.choice((2, 3, 4, 8)))
    outputs = int(rng.choice((1, 1, 2, 3))) if is_depthwise else int(rng.choice((1, 2, 4, 8)))
    space = rng.choice(WIDTHS[rank], rank).tolist()
    return operator(
        int(rng.integers(1, 3)), groups * inputs, *space, groups * outputs, *rng.integers(1, 4, rank).tolist(),
        stride=rng.integers(1, 3, rank).tolist(), padding=rng.integers(0, 3, 2 * rank).tolist(),
        dilation=rng.integers(1, 3, rank).tolist() if min(space) > 6 else [1] * rank, groups=groups,
        dtype=str(rng.choice(("float16", "bfloat16", "tf32", "float32"))), layout="nchw",
        epilogue=EPILOGUES[seed // 2 % len(EPILOGUES)],
    )  # fmt: skip


@pytest.mark.sample(12)
@pytest.mark.parametrize("schedule", ["depthwise_nchw", "grouped_nchw"])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 12)) for seed in range(40)])
def test_random_workloads_and_configs(schedule, seed):
    w = draw_workload(seed, is_depthwise=schedule == "depthwise_nchw")
    space = registry.find_schedule(w, schedule).space(w)
    points = space.sample_legal(1, np.random.default_rng(seed))
    for config in ({}, *map(space.config_from_point, points)):
        kernel = emulate.build_checked(w.text, schedule, config)
        assert len(kernel.kernels) == 1
        assert count_conflicts(kernel, "store") == 0 or config


@pytest.mark.sample(1)
@needs_nvrtc
@pytest.mark.parametrize(
    ("schedule", "filters", "loads"),
    [
        ("depthwise_nchw", "64x1x3x3,p1,g64", 4),  # a vector for each row of the window
        ("grouped_nchw", "64x4x3x3,p1,g16", 2),  # in a loop over input channels and filter rows
    ],
)
def test_columns_are_accessed_sixteen_bytes_at_a_time(schedule, filters, loads):
    """A strip of 2 rows and 8 columns has a vector of a residual and of the output in each row."""
    strips = {"vector": 1, "threads_c": 2, "tile_y": (-1, 7, 2), "tile_x": (-1, 7, 8)}
    w = tc.parse(f"conv2d:1x64x56x56,{filters},f16,bias,add,relu")
    kernel = tc.build(w, schedule, arch="sm_90", config=strips)
    counts = count_instructions(kernel.format_ir_level("sass"))
    assert sum(count for name, count in counts.items() if name.startswith("LDG") and "128" in name) == loads + 2
    assert sum(count for name, count in counts.items() if name.startswith("STG") and "128" in name) == 2
    assert kernel.resources.spills == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        (
            "conv2d:2x8x14x14,8x1x3x3,s1,p1,g8,f16,bias,relu",
            {"threads_c": 4, "tile_y": (-1, 2, 7), "tile_x": (-1, 7, 2)},
        ),
        ("conv2d:2x16x7x7,16x1x5x5,s1,p2,g16,bf16,add", {"threads_c": 8, "tile_y": (-1, 7, 1), "tile_x": (-1, 1, 7)}),
        ("conv2d:1x8x12x11,8x1x3x3,s2,p1,g8,tf32", {"threads_c": 4, "tile_y": (-1, 3, 2), "tile_x": (-1, 2, 3)}),
        ("conv1d:2x8x40,8x1x7,s1,p3,g8,f16,bias", {"threads_c": 2, "tile_y": (-1, 1, 1), "tile_x": (-1, 20, 2)}),
    ],
)
def test_blocks_copy_whole_planes_to_shared_memory(text, config):
    config |= {"vector": 1, "unroll_scope": "filter", "weight_scope": "shared", "input_scope": "shared"}
    kernel = emulate.build_checked(text, "depthwise_nchw", config)
    assert find_races(kernel) == []
    space = registry.find_schedule(kernel.workload, "depthwise_nchw").space(kernel.workload)
    used = space.compute_usage(space.point_from_config(kernel.config)[None]).shared_bytes[0]
    assert used == kernel.executable.kernels[0].shared_bytes


def test_only_whole_planes_are_copied_to_shared_memory():
    config = {"vector": 1, "threads_c": 4, "tile_y": (-1, 1, 7), "tile_x": (-1, 7, 2), "input_scope": "shared"}
    with pytest.raises(KnobError, match="a block computes whole planes"):
        tc.build(tc.parse("conv2d:2x8x14x14,8x1x3x3,s1,p1,g8,f16"), "depthwise_nchw", arch="sm_90", config=config)


def test_planes_in_shared_memory_are_read_from_distinct_banks():
    config = {"vector": 1, "threads_c": 8, "tile_y": (-1, 1, 14), "tile_x": (-1, 7, 2), "input_scope": "shared"}
    config |= {"unroll_scope": "filter", "weight_scope": "registers"}
    kernel = emulate.build_checked("conv2d:1x8x14x14,8x1x3x3,s1,p1,g8,f16", "depthwise_nchw", config)
    loads = [access for access in count_shared_accesses(kernel) if access.kind == "load"]
    assert sum(access.wavefronts for access in loads) < 1.6 * sum(access.min_wavefronts for access in loads)


def read_recorded_configs():
    """The configs of each recorded layer, and their microseconds; no coefficient was fitted to them."""
    layers = {}
    for line in (DATA / "depthwise-nchw-h200.txt").read_text(encoding="utf-8").splitlines()[1:]:
        *numbers_and_scopes, micros = line.split()
        if not numbers_and_scopes:
            configs = layers[line] = []
            continue
        threads, *tiles, unroll, weight, input_scope = numbers_and_scopes
        rows, columns = (tuple(map(int, ("-1", *tiles[first : first + 2]))) for first in (0, 2))
        config = {"vector": 1, "threads_c": int(threads), "tile_y": rows, "tile_x": columns}
        config |= {"unroll_scope": unroll, "weight_scope": weight, "input_scope": input_scope}
        configs.append((config, float(micros)))
    return layers


def test_estimates_of_depthwise_kernels_rank_recorded_times():
    from scipy.stats import spearmanr

    correlations, slowdowns = [], []
    for text, configs in read_recorded_configs().items():
        w = tc.parse(text)
        space = registry.find_schedule(w, "depthwise_nchw").space(w, get_block_limits("sm_90"))
        micros = np.array([time for _, time in configs])
        estimates = space.compute_usage(np.stack([space.project(config) for config, _ in configs])).estimate
        correlations.append(spearmanr(estimates, micros).statistic)
        slowdowns.append(micros[np.argmin(estimates)] / micros.min())
    assert len(correlations) == 6
    assert np.mean(correlations) > 0.59  # 0.55 by the estimate of `depthwise_nhwc`
    assert max(slowdowns) < 1.2  # 4.97 by that one


def test_configs_of_too_many_threads_are_estimated():
    w = tc.parse("conv2d:1x64x16x16,64x1x3x3,s1,p1,g64,bf16")
    with np.errstate(all="raise"):
        space = registry.find_schedule(w, "depthwise_nchw").space(w, get_block_limits("sm_90"))
        assert np.all(space.compute_usage(space.slice_points(0, space.size)).estimate > 0)
