"""The schedules made to be tuned compute every valid convolution, at their defaults and wherever a search leads."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from cubins import needs_nvrtc
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from nasty import LARGE, NASTY, NASTY_1D, NASTY_2D, NASTY_3D, NASTY_DEPTHWISE, NASTY_GROUPED, VARIED
from points import all_divide, covering, features
from strategies import convolutions

import tvmconv as tc
from tvmconv import library
from tvmconv.analysis.machine_code.executed.asked import asked_of_grid
from tvmconv.devices import find


def tunable(text):
    """The names of the tunable schedules that apply to a workload."""
    return [s.name for s in tc.schedules(tc.parse(text)) if s.usage]


def cases(texts, but=()):
    """Every workload with each of its tunable schedules, but for some."""
    pairs = [(text, name) for text in texts for name in tunable(text) if name not in but]
    return pytest.mark.parametrize(("text", "schedule"), pairs)


@functools.cache
def problem_of(text):
    return tc.Problem(tc.parse(text))


def error(text, schedule, device, config=None):
    problem = problem_of(text)
    return tc.build(problem.workload, schedule, device=device, config=config).verify(problem).error


def space_of(text, schedule):
    workload = tc.parse(text)
    return library.find(workload, schedule).space(workload)


@functools.cache
def searched(schedule, n, seed=0):
    """Legal configs of every varied workload, n each, that together try as much as possible."""
    seen = set()
    texts = [text for text in VARIED if schedule in tunable(text)]
    return {text: covering(space_of(text, schedule), n, seed, seen) for text in texts}


@cases([text for text in NASTY if text not in NASTY_2D])  # those are in test_combinations.py
def test_the_defaults_compute_every_nasty_workload(text, schedule):
    assert error(text, schedule, "opencl:0") <= 1e-5


@pytest.mark.gpu
@cases([*NASTY, *LARGE])
def test_the_defaults_compute_every_nasty_workload_on_a_gpu(gpu, text, schedule):
    assert error(text, schedule, gpu) <= 1e-5


@pytest.mark.parametrize("texts", [NASTY, NASTY_1D, NASTY_3D, NASTY_DEPTHWISE, NASTY_GROUPED])
@pytest.mark.parametrize("kind", ["", ",f16,nhwc"])
def test_there_is_something_to_search_however_small_the_workload(texts, kind):
    """Limits that serve a GPU, of threads, say, must not shut out all of a space."""
    gpu = find("sm_90")
    for w in (tc.parse(text + kind) for text in texts):
        for schedule in library.to_tune(w, gpu.kind, gpu.arch):
            space = schedule.space(w, gpu.limits)
            assert len(space.sample(1, np.random.default_rng(0))), (w.text, schedule.name)


@cases(VARIED, but=("winograd", "winograd_fused"))  # more of theirs are in test_winograd.py
def test_searched_configs_compute_the_convolution(text, schedule):
    for config in searched(schedule, 2)[text]:
        assert error(text, schedule, "opencl:0", config) <= 1e-5, config


@pytest.mark.gpu
@cases(VARIED)
def test_searched_configs_compute_the_convolution_on_a_gpu(gpu, text, schedule):
    for config in searched(schedule, 10, seed=1)[text]:
        assert error(text, schedule, gpu, config) <= 1e-5, config


@pytest.mark.parametrize("schedule", ["direct", "implicit_gemm"])
def test_the_searched_configs_above_try_what_they_are_meant_to(schedule):
    """Without this, they could pass with nothing but the simplest kernels."""
    tried = {
        feature
        for text, configs in searched(schedule, 2).items()
        for config in configs
        for feature in features(space_of(text, schedule), config)
    }
    assert tried >= {f"pipeline={name}" for name in ("none", "registers", "async2", "async3", "async4")}
    assert tried >= {"fetch=blocked", "fetch=interleaved", "weight_layout=oihw", "weight_layout=ihwo"}
    assert tried >= {"slices=1", "slices=2", "slices=4", "weight_pad=1", "weight_pad=4"}
    if schedule == "implicit_gemm":
        assert tried >= {"split_k=1", "split_k=2", "split_k=4"}
    last = "tile_x" if schedule == "direct" else "tile_p"
    assert tried >= {f"{tile} {what}" for tile in ("tile_f", last) for what in ("overhangs", "has virtual threads")}


OVERHANGING = {"tile_f": (-1, 1, 8, 8), "tile_p": (-1, 1, 16, 4), "tile_rc": (-1, 16), "pipeline": "registers"}
OVERHANGING |= {"fetch": "interleaved", "auto_unroll_max_step": 1500, "weight_layout": "ihwo"}


@needs_nvrtc
def test_products_of_tiles_that_overhang_read_no_more_than_others():
    """Tests of whether pixels are there, around products, keep the compiler from using again what it has read."""

    def requests(image):
        w = tc.parse(f"conv2d:1x32x{image},64x32x1x1,s1,p0")
        kernel = tc.build(w, "implicit_gemm", arch="sm_90", config=OVERHANGING)
        (step,) = kernel.program.steps
        code = kernel.listings[step.name]
        counts = asked_of_grid(step, code, "sm_90").counts
        return sum(each.requests for each, line in zip(counts, code, strict=True) if line.opcode == "LDS")

    assert requests("13x13") == requests("12x16")  # three tiles of 64 pixels each


def suited(workload, schedule):
    """A workload of the same sizes that a schedule applies to."""
    if schedule in ("direct", "implicit_gemm"):
        return workload
    groups = max(2, workload.groups)
    layout = "nhwc" if schedule.endswith("_nhwc") else workload.layout
    if schedule == "grouped_nhwc":
        return replace(workload, C=2 * groups, O=3 * groups, groups=groups, layout=layout)
    return replace(workload, C=groups, O=groups, groups=groups, layout=layout)


def test_blocks_of_depthwise_have_no_more_threads_along_z_than_a_gpu_launches():
    space = library.find(w := tc.parse("conv2d:1x512x14x14,512x1x3x3,s1,p1,g512"), "depthwise").space(w)
    points = space.sample(400, np.random.default_rng(0))
    assert max(space.config(point)["tile_f"][2] for point in points) == 64


@pytest.mark.parametrize("schedule", ["direct", "implicit_gemm", "depthwise", "depthwise_nhwc", "grouped_nhwc"])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workload=convolutions(max_flops=2_000_000), seed=st.integers(0, 2**32 - 1))
def test_any_searched_config_computes_any_workload(schedule, workload, seed):
    workload = suited(workload, schedule)
    space = library.find(workload, schedule).space(workload)
    sample = map(space.config, space.sample(64, np.random.default_rng(seed)))
    # PoCL 3.0 at times forgets what an accumulator holds that is written under a guard, as those of overhanging tiles
    # are: the covering configs above have such tiles, on workloads where it does not.
    config = next((config for config in sample if all_divide(space, config)), None)
    assume(config is not None)
    kernel = tc.build(workload, schedule, device="opencl:0", config=config)
    assert kernel.verify().error <= 1e-5
