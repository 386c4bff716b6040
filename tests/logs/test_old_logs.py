"""The kernels of AutoTVM's logs are rebuilt from their lines alone, with the tiles that it measured, and are right."""

import functools
import json
import math
from pathlib import Path

import pytest

import tvmconv as tc
from tvmconv.arithmetic import ceil_div
from tvmconv.compiler import nvrtc
from tvmconv.logs.record import Record

SAMPLE = Path(__file__).parents[1] / "data/tophub-cuda.jsonl"
LINES = [line for line in SAMPLE.read_text().splitlines() if not line.startswith("#")]
WINOGRAD = [line for line in LINES if "winograd" in line]  # test_winograd.py tells of their kernels
REFUSED = [line for line in LINES if "transpose_nchw" in line or "batch_matmul" in line]
OPEN = next(line for line in LINES if "[1, 2, 1, 2]" in line)  # its outermost factors are -1
STRIDED = next(line for line in LINES if "224, 224" in line)

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))


def edited(line, *, weight=None, args=(), image=None, **knobs):
    """A line with another image, weight, options of its task (by their place) or values of knobs."""
    row = json.loads(line)
    task = row["input"][2]
    task[0][1] = image or task[0][1]
    task[1][1] = weight or task[1][1]
    for place, value in args:
        task[place] = value
    for entity in row["config"]["entity"]:
        entity[2] = knobs.get(entity[0], entity[2])
    return json.dumps(row)


# What the sample has no line of: batches, padding that differs between opposite sides, dilation, and rectangular
# filters. AutoTVM once took their rows for columns, so that tile_ry has the factors of tile_rx.
SMALL = {"image": [1, 32, 18, 18], "weight": [64, 32, 3, 3], "tile_f": [-1, 1, 16, 2], "tile_rc": [-1, 8]}
VARIANTS = {
    "a batch": edited(OPEN, **SMALL | {"image": [3, 32, 18, 18]}, args=[(3, [1, 1, 1, 1])]),
    "asymmetric padding": edited(OPEN, **SMALL, args=[(3, [0, 1, 2, 3])]),
    "a dilation": edited(OPEN, **SMALL, args=[(4, [2, 1])]),
    "strides that differ": edited(OPEN, **SMALL, args=[(2, [2, 1])]),
    "strides, factors in full": edited(STRIDED, args=[(3, [0, 1, 1, 0])]),
    "a 1x3 filter with swapped tiles": edited(
        OPEN, **SMALL | {"weight": [64, 32, 1, 3]}, args=[(3, [0, 1, 0, 1])], tile_ry=[1, 3], tile_rx=[1, 1]
    ),
    "a 3x1 filter with swapped tiles": edited(
        OPEN, **SMALL | {"weight": [64, 32, 3, 1]}, args=[(3, [1, 0, 1, 0])], tile_ry=[1, 1], tile_rx=[3, 1]
    ),
}
SUPPORTED = {f"line {i}": line for i, line in enumerate(LINES, start=2) if line not in WINOGRAD + REFUSED} | VARIANTS
supported = pytest.mark.parametrize("line", SUPPORTED.values(), ids=SUPPORTED)
RECORDED = [line for line in SUPPORTED.values() if line not in VARIANTS.values()]


@functools.cache
def rebuilt(line, **place):
    record = Record.parse(line)
    return tc.build(record.workload, record.schedule, config=record.config, **place)


@pytest.mark.sample(12)
@supported
def test_a_rebuilt_kernel_has_the_threads_and_tiles_of_its_line(line):
    w, config = Record.parse(line).workload, Record.parse(line).config
    blocks, threads = [], []
    for knob, extent in (("tile_x", w.Q), ("tile_y", w.P), ("tile_f", w.O)):
        recorded, *inner = config[knob]
        blocks.append(ceil_div(extent, math.prod(inner)))
        threads.append(inner[1])
        assert recorded in (-1, blocks[-1])
    kernel = rebuilt(line, arch="sm_75")
    assert kernel.launch.block == tuple(threads)
    assert kernel.launch.grid == (blocks[0], blocks[1], blocks[2] * w.N)


@pytest.mark.sample(1)
@pytest.mark.parametrize("line", VARIANTS.values(), ids=VARIANTS)
def test_rebuilt_kernel_of_any_option_is_right(line):
    assert rebuilt(line, device="opencl:0").verify().error <= 1e-5


LARGE = [*RECORDED, *WINOGRAD[:3]]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "line", [RECORDED[6], WINOGRAD[3], *(pytest.param(line, marks=pytest.mark.slow) for line in LARGE)]
)
@pytest.mark.usefixtures("optimised")
def test_rebuilt_kernel_is_right(line):
    assert rebuilt(line, device="opencl:0").verify().error <= 1e-5


@pytest.mark.gpu
@supported
def test_a_rebuilt_kernel_is_right_on_a_gpu(gpu, line):
    assert rebuilt(line, device=gpu).verify().error <= 1e-5


@pytest.mark.sample(5)
@needs_nvrtc
@pytest.mark.parametrize("line", [*RECORDED[::4], *VARIANTS.values()])
def test_rebuilt_kernel_compiles_for_sm_75_without_spills(line):
    resources = rebuilt(line, arch="sm_75").resources
    assert 0 < resources.registers <= 255
    assert resources.spills == 0


def test_the_sample_has_every_kind_of_line():
    schedules = [Record.parse(line).schedule for line in LINES if line not in REFUSED]
    counts = [schedules.count(name) for name in ("direct", "depthwise", "winograd")]
    assert (*counts, len(REFUSED)) == (17, 8, 4, 4)
