"""Depthwise and grouped convolutions, channels first: vectors of columns, on random workloads and configs."""

import emulate
import numpy as np
import pytest
from cubins import needs_nvrtc

import tvmconv as tc
from tvmconv import registry
from tvmconv.analysis.memory.bank_conflicts import count_conflicts
from tvmconv.compiler.sass import count_instructions

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
