"""Winograd convolutions: AutoTVM's kernels from its records, right within their tolerance, the weight's part once."""

import functools
import gzip
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from combinations import EPILOGUES, LAYOUTS
from covering_cases import list_features, mark_others_slow
from cubins import needs_nvrtc
from nasty import NASTY_WINOGRAD
from pairs import in_pairs
from tvmconv.builtin.conv.winograd.knobs import estimate_relative_error, list_output_tile_sizes

import tvmconv as tc
from tvmconv import registry
from tvmconv.analysis.predicted_time import estimate_config_seconds
from tvmconv.devices import find_device
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.ranking import list_log_files
from tvmconv.logs.record import Record
from tvmconv.predicted_kernel import MAX_ESTIMATE_RATIO
from tvmconv.registry import find_schedule

RECORDS = Path(__file__).parents[1] / "data/tophub-winograd.jsonl.gz"
LAYER = tc.parse("conv2d:1x64x56x56,64x64x3x3,s1,p1")
SCHEDULES = ("winograd", FUSED := "winograd_fused")
TYPES = list(itertools.product(("f32", "bf16"), LAYOUTS))  # PoCL has no 16-bit floats of OpenCL's


@functools.cache
def records():
    lines = gzip.decompress(RECORDS.read_bytes()).decode().splitlines()
    return [Record.parse(line) for line in lines if not line.startswith("#")]


def build(workload, device=None, **config):
    place = {"device": device} if device else {"arch": "sm_90"}
    return tc.build(workload, "winograd", config=config, **place)


def places(workload, m):
    """A number of a thread's places that few enough threads share out."""
    count = (m + workload.R - 1) ** 2
    return next(n for n in (1, 2, 3, 4, 6, 7, 8, 9) if count % n == 0 and count // n <= 32)


@functools.cache
def problem(text):
    return tc.Problem(tc.parse(text), seed=1)


def check_rebuilt(record):
    """Three kernels after that of the weight, as AutoTVM's template launched them."""
    w, config = record.workload, record.config
    m = 4 if w.H % 8 == 0 else 2
    alpha = m + w.R - 1
    tiles = w.N * math.ceil(w.P / m) * math.ceil(w.Q / m)
    (y, x), taps = (math.prod(config[f"tile_{axis}"][1:]) for axis in "yx"), config["tile_rc"][1]
    kernel = tc.build(w, "winograd", config=config, arch="sm_75")
    inputs, products, outputs = kernel.kernels[1:]
    assert inputs.launch.grid == (math.ceil(w.C * tiles / 128), 1, 1)
    assert products.launch.grid == (math.ceil(tiles / x), math.ceil(w.O / y), alpha**2)
    assert outputs.launch.grid == (math.ceil(w.O * tiles / 128), 1, 1)
    assert products.launch.block == (config["tile_x"][2], config["tile_y"][2], 1)
    assert inputs.launch.block == outputs.launch.block == (128, 1, 1)
    assert products.shared_bytes == 4 * taps * (y + x)
    assert config.items() <= kernel.config.items()


@pytest.mark.parametrize("number", range(0, 95, 19))
def test_a_rebuilt_kernel_has_the_launches_of_its_record(number):
    check_rebuilt(records()[number])


@pytest.mark.slow
def test_every_rebuilt_kernel_has_the_launches_of_its_record():
    for record in records():
        check_rebuilt(record)


@pytest.mark.gpu
def test_every_rebuilt_kernel_is_right_on_a_gpu(gpu):
    for record in records():
        found = tc.build(record.workload, "winograd", config=record.config, device=gpu).verify()
        assert found.ok, (record, found)


def test_a_transformed_weight_is_one_of_its_filter():
    """AutoTVM had a task for weights that were transformed before: (α, α, C, O)."""
    line = gzip.decompress(RECORDS.read_bytes()).decode().splitlines()[1]
    w = Record.parse(line).workload
    alpha = (4 if w.H % 8 == 0 else 2) + 2
    shapes = f"[{w.O}, {w.C}, 3, 3]", f"[{alpha}, {alpha}, {w.C}, {w.O}]"
    edited = line.replace("winograd.cuda", "winograd_without_weight_transform.cuda").replace(*shapes)
    assert edited != line
    assert Record.parse(edited).workload == w


TURNS = [(SCHEDULES[number % 2], number) for number in range(len(NASTY_WINOGRAD))]  # on a GPU both compute all


def turn(number):
    """A nasty workload with a dtype, a layout and an epilogue, and a size of tiles, each in turn."""
    own = number // 2  # of the schedule whose turn it is
    dtype, layout = TYPES[own % len(TYPES)]
    epilogue = EPILOGUES[(own + own // len(TYPES)) % len(EPILOGUES)]
    workload = tc.parse(",".join(filter(None, (NASTY_WINOGRAD[number], dtype, layout, epilogue))))
    sizes = list_output_tile_sizes(workload)
    return workload, sizes[own % len(sizes)]


def turn_features(case):
    name, number = case
    workload, m = turn(number)
    features = {*list_features(workload.text), ("tile", m, workload.kernel), ("tile", m, workload.dtype)}
    return {(name, feature) for feature in features}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "number"), mark_others_slow(TURNS, turn_features))
def test_tiles_of_some_size_compute_any_workload(name, number):
    workload, m = turn(number)
    if name == FUSED:
        config = {
            "output_tile": m,
            "points_per_thread": places(workload, m),
            "local_y": 2,
            "local_x": 2,
            "block_k": 1,
            "channels_per_exchange": 2,
        }
    else:
        config = {"output_tile": m}
    kernel = tc.build(workload, name, config=config, device="opencl:0")
    assert kernel.verify(problem(workload.text)).ok


@pytest.mark.gpu
def test_tiles_of_every_size_compute_any_workload_on_a_gpu(gpu):
    for text in NASTY_WINOGRAD:
        workload = tc.parse(text)
        for m in list_output_tile_sizes(workload):
            for name, config in (
                ("winograd", {}),
                (FUSED, {"points_per_thread": places(workload, m), "block_k": 1, "local_x": 2}),
            ):
                config["output_tile"] = m
                found = tc.build(workload, name, config=config, device=gpu).verify(problem(text))
                assert found.ok, (text, name, m, found)


def test_a_tile_of_the_product_that_overhangs_costs_no_test():
    """The axis is made longer in memory: 14 × 14 pixels are 49 tiles, 64 with those beyond."""
    kernel = build(
        tc.parse("conv2d:1x32x14x14,30x32x3x3,s1,p1"), output_tile=2, tile_y=(-1, 1, 8, 4), tile_x=(-1, 1, 16, 4)
    )
    product = kernel.kernels[2]
    assert product.launch.grid == (1, 1, 16)
    assert "if (" not in kernel.source[kernel.source.index("main_kernel_2(float") :].partition("main_kernel_3")[0]
    assert sorted(array.nbytes for array in kernel.executable.workspace) == [4 * 16 * 32 * n for n in (32, 64, 64)]


def test_the_error_that_is_expected_is_the_one_there_is():
    """Within a third: one random problem each, of other sizes than those of the fit."""
    for text, m in (("conv2d:1x48x24x24,8x48x3x3,s1,p1", 2), ("conv2d:1x96x24x24,8x96x3x3,s1,p1", 4)):
        w = tc.parse(text)
        found = build(w, "opencl:0", output_tile=m).verify()
        assert found.error == pytest.approx(estimate_relative_error(m, 3, w.C), rel=1 / 3)


def test_tiles_whose_error_is_too_large_are_none_to_choose():
    few, many = (tc.parse(f"conv2d:1x{c}x24x24,8x{c}x3x3,s1,p1") for c in (64, 2560))
    assert list_output_tile_sizes(few) == (2, 4, 6)
    assert list_output_tile_sizes(many) == (2, 4)
    assert list_output_tile_sizes(tc.parse("conv2d:1x64x24x24,8x64x7x7,s1,p3")) == (2,)


def test_it_is_searched_where_channels_are_many():
    """The first is of ResNet-50 at batch 1, the others have too few channels or too little to compute."""
    texts = (
        "conv2d:1x64x56x56,64x64x3x3,s1,p1",
        "conv2d:64x128x28x28,128x128x3x3,s1,p1",
        "conv2d:8x3x224x224,64x3x3x3,s1,p1",
        "conv2d:1x64x10x10,64x64x3x3,s1,p1",
    )
    searched = [[s.name for s in registry.schedules_to_tune(tc.parse(text), "cuda", "sm_90")] for text in texts]
    assert ["winograd" in names for names in searched] == [True, True, False, False]
    assert not any(FUSED in names for names in searched)
    assert FUSED in [s.name for s in registry.low_priority_schedules(tc.parse(texts[0]), "cuda", "sm_90")]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_weight_is_transformed_by_a_step_of_its_own(name):
    kernel = tc.build(LAYER, name, arch="sm_90")
    assert kernel.lowered_module.num_prepack_kernels == 1
    x, k = (kernel.workload.argument_names.index(argument) for argument in "XK")
    assert [x in step.arguments for step in kernel.kernels[:2]] == [False, True]
    assert [k in step.arguments for step in kernel.kernels] == [True, *[False] * (len(kernel.kernels) - 1)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_call_with_another_weight_transforms_it_anew(name):
    text = "conv2d:1x16x16x16,32x16x3x3,s1,p1"
    kernel = tc.build(tc.parse(text), name, device="opencl:0")
    for seed in (3, 4):
        assert kernel.verify(tc.Problem(tc.parse(text), seed=seed)).ok


def test_what_is_prepared_is_in_no_time():
    """A weight of which there is a thousand times as much as of all else: without its transform, little is left."""
    w = tc.parse("conv2d:1x256x1x1,256x256x3x3,s1,p1")
    loaded = build(w, "opencl:0", output_tile=2, tile_y=(-1, 1, 16, 1), tile_rc=(-1, 256)).loaded_kernel
    whole = replace(loaded.executable, num_prepack_kernels=0)
    inputs = tc.Problem(w).inputs
    both = [loaded.device.load(program) for program in (loaded.executable, whole)]
    turns = [[each.time(inputs, seconds=0.03).best for each in both] for _ in range(5)]  # what else runs meets both
    once, each = map(min, zip(*turns, strict=True))
    assert once < each


SIZES, ENDS = (2, 4, 6), ("sm_75", "sm_90")  # of tiles; the oldest and the newest architecture that was measured


def check_registers(m, arch, name):
    few = {"points_per_thread": places(LAYER, m), "local_y": 4, "local_x": 2, "block_k": 2} if name == FUSED else {}
    kernel = tc.build(LAYER, name, config={"output_tile": m, **few}, arch=arch)
    assert {resources.spills for resources in kernel.cubin.kernels.values()} == {0}
    assert {resources.stack_bytes for resources in kernel.cubin.kernels.values()} == {0}


@pytest.mark.sample(1)
@needs_nvrtc
@pytest.mark.parametrize(("m", "arch", "name"), in_pairs(SIZES, ENDS, SCHEDULES))
def test_transforms_stay_in_registers(m, arch, name):
    check_registers(m, arch, name)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize(("m", "arch", "name"), [*itertools.product(SIZES, ENDS, SCHEDULES)])
def test_transforms_of_every_size_stay_in_registers(m, arch, name):
    check_registers(m, arch, name)


@needs_nvrtc
def test_vectors_are_copied_sixteen_bytes_at_a_time():
    tiles = {"tile_y": (-1, 2, 8, 4), "tile_x": (-1, 2, 16, 4), "tile_rc": (-1, 8)}
    sass = build(LAYER, copy_order="vectorized", pipeline="async3", auto_unroll_max_step=1500, **tiles).sass
    assert "LDGSTS.E.BYPASS.128" in sass
    assert "LDGSTS.E " not in sass
    assert "LDS.128" in sass


def test_estimate_agrees_with_the_fastest_measured_configs():
    log = Path(__file__).parents[2] / "tuning_logs/nvidia-h200/resnet50"
    fastest = {}
    for file in list_log_files([log]):
        for record in read_records(file, InvalidLines()):
            if record.schedule == "winograd" and record.ok:
                fastest[record.workload] = min(record.cost, fastest.get(record.workload, math.inf))
    ratios = [find_schedule(w, "winograd").estimate_good_config_seconds(w) / cost for w, cost in fastest.items()]
    assert len(ratios) >= 3
    assert all(0.8 < ratio < 1.5 for ratio in ratios)


def test_estimate_of_the_fused_kernel_agrees_with_its_logged_layer():
    """The only layer of `winograd_fused` in tuning_logs, in torchvision-layers, took 5.69 µs."""
    w = tc.parse("conv2d:1x16x55x55,64x16x3x3,s1,p1")
    assert 0.8 < find_schedule(w, FUSED).estimate_good_config_seconds(w) / 5.69e-6 < 1.5


def test_builds_omit_winograd_where_tensor_cores_are_much_faster():
    w, limits = tc.parse("conv2d:32x64x56x56,64x64x3x3,s1,p1,f16"), find_device("sm_90").limits
    seconds = [estimate_config_seconds(w, find_schedule(w, name), None, limits) for name in ("hopper", *SCHEDULES)]
    assert min(seconds[1:]) > MAX_ESTIMATE_RATIO * seconds[0]


@pytest.mark.parametrize(
    "text",
    [
        "conv2d_dgrad:2x8x9x7,12x8x3x3,s1,p1",
        "conv2d_dgrad:2x12x13x11,20x12x3x3,s1,p0,nhwc,add,drelu",
        "conv2d_dgrad:1x8x12x14,16x8x5x5,s1,p2x1x3x0,bf16",
    ],
)
def test_winograd_computes_gradients_of_inputs(text):
    assert tc.build(text, "winograd", device="opencl:0").verify(problem(text)).ok


def test_gradients_transform_weights_in_each_launch():
    kernel = tc.build("conv2d_dgrad:2x64x28x28,64x64x3x3,s1,p1", "winograd", arch="sm_90")
    assert kernel.timed_kernels == kernel.kernels


def test_winograd_needs_gradients_without_strides_and_dilation():
    def has_winograd(options):
        return "winograd" in [
            schedule.name for schedule in tc.schedules(f"conv2d_dgrad:2x64x28x28,64x64x3x3,{options}")
        ]

    assert [has_winograd(options) for options in ("s1,p1", "s2,p1", "s1,p2,d2", "s1,p3")] == [True, False, False, False]


WGRADS = [
    ("conv2d_wgrad:2x8x9x7,12x8x3x3,s1,p1", {"gradient_tile": 4, "parts": 1}),
    ("conv2d_wgrad:3x12x13x11,20x12x3x3,s1,p2x1x0x3,nhwc,add", {"gradient_tile": 2, "parts": 3, "block_k": 16}),
    ("conv2d_wgrad:5x17x4x3,33x17x3x3,s1,p0,bf16,out-f32", {"gradient_tile": 2, "parts": 16, "block_k": 4}),
    (
        "conv2d_wgrad:2x32x10x9,16x32x3x3,s1,p1,nhwc",
        {"tile_y": (-1, 1, 4, 4), "tile_x": (-1, 2, 4, 4), "pipeline": "registers", "copy_order": "vectorized"},
    ),
]


@pytest.mark.parametrize(("text", "config"), WGRADS)
def test_winograd_computes_gradients_of_weights(text, config):
    assert tc.build(text, "winograd", config=config, device="opencl:0").verify(problem(text)).ok


def test_wgrads_use_winograd_for_filters_of_three_taps_without_strides():
    def has_winograd(options, taps=3):
        text = f"conv2d_wgrad:32x64x28x28,64x64x{taps}x{taps},{options}"
        return "winograd" in [schedule.name for schedule in tc.schedules(text)]

    assert [has_winograd(options) for options in ("s1,p1", "s1,p5", "s2,p1", "s1,p2,d2")] == [True, True, False, False]
    assert not has_winograd("s1,p2", taps=5)


def test_wgrad_searches_start_with_configs_that_are_legal():
    w = tc.parse("conv2d_wgrad:32x128x28x28,128x128x3x3,s1,p1,nhwc")
    schedule = find_schedule(w, "winograd")
    assert len(schedule.list_starting_configs(w)) >= 8
    assert schedule in registry.schedules_to_tune(w, "cuda", "sm_90")


@pytest.mark.parametrize(("images", "size"), [(1, 4), (2, 28), (32, 56), (256, 112)])
def test_winograd_wgrads_have_a_quarter_of_the_accepted_error(images, size):
    w = tc.parse(f"conv2d_wgrad:{images}x16x{size}x{size},16x16x3x3,s1,p1")
    assert estimate_relative_error(3, 4, images * size * size // 16) < 0.25 * w.tolerance
