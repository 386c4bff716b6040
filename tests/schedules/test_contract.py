"""What every schedule owes: right results at its defaults and wherever a search leads, registers enough, refusals.

Schedules for OpenCL run on PoCL, those for tensor cores in the emulator, and all of them on a GPU where there is one.
Workloads take the schedules in turn here; a GPU runs all of them, and `pytest -m slow` the rest of the emulator's.
"""

import functools
import itertools

import emulate
import numpy as np
import pytest
from combinations import EPILOGUES, LAYOUTS, every, in_pairs, in_turn, layouts, schedules
from covering_cases import list_features, mark_others_slow
from cubins import ARCHITECTURES, DTYPES, check_spills, needs_nvrtc, space_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from listed import listed, with_choices
from nasty import (
    CHANNELS_LAST,
    LARGE,
    NASTY,
    NASTY_1D,
    NASTY_2D,
    NASTY_3D,
    NASTY_DEPTHWISE,
    NASTY_GROUPED,
    NASTY_WINOGRAD,
    PATCHES,
    VARIED,
)
from nasty_filters import NASTY_FILTERS
from points import all_divide, covering, features
from small_tiles import all_legal, few_multiprocessors
from strategies import convolutions, filters

import tvmconv as tc
from tvmconv import registry
from tvmconv.devices import find_device
from tvmconv.errors import DeviceError
from tvmconv.target import get_block_limits

ON_OPENCL = ("f32", "bf16")  # PoCL has no 16-bit floats of OpenCL's; bfloat16 is stored as integers
PAIRS = in_pairs(ON_OPENCL)
OWN_TURNS = ("winograd", "winograd_fused")  # in test_winograd.py, for tiles of all sizes
FEW = [case for case in in_turn(PAIRS) if case.schedule not in OWN_TURNS]
LADDER = ("default", "tiling", "columns", "vthread", "conflict_free")
SIGNAL, IMAGE = "filter1d:16777216,k5", "filter2d:4096x4096x3,5x5"
SMALL_FILTERS = ("filter1d:700,k9,clamp", "filter2d:45x50x2,5x3")  # every knob has something to do
CHAPTER = "conv2d:1x64x64x64,64x64x3x3,s1,p1"


DEEP, EMULATED = listed("deep"), listed("nasty")  # those for tensor cores; of the deep ones many configs are tried
EMULATED["mma_sync"] = [*PATCHES, *DEEP["mma_sync"], *with_choices((*NASTY_2D, *NASTY_1D, *NASTY_3D))]
EMULATED["hopper"] = [*PATCHES, *with_choices(EMULATED["hopper"])]
TRANSFORMED = EMULATED["winograd_hopper"]
WITHOUT_CLAMP = ("", "bias", "bias,relu", "add", "bias,add,silu", "gelu,bias", "add,bias,relu")  # it hides large sums
TRANSFORMED[:-2] = with_choices(TRANSFORMED[:-2], WITHOUT_CLAMP)  # the last two are in TF32, of larger filters


@functools.cache
def problem(workload):
    """Inputs and reference, shared by the schedules; always the same: a single output may cancel out, at times."""
    return tc.Problem(workload, seed=0)


def check(place, schedule, text, config=None):
    """That a kernel is right, in the emulator for an architecture or on a device."""
    workload = tc.parse(text)
    kernel = tc.build(workload, schedule, config=config, **({"arch": place} if place == "sm_90" else {"device": place}))
    if place == "sm_90":
        assert emulate.error(kernel.lowered_module, workload) <= workload.tolerance, config
    else:
        found = kernel.verify(problem(workload))
        assert found.ok, (config, found)
    return kernel


def runs(schedule, text, kind="opencl"):
    return schedule in [s.name for s in tc.schedules(tc.parse(text)) if kind in s.device_kinds]


def turns(texts, step):
    """Every so many of the schedules for OpenCL of each workload, beginning with another one for each."""
    for number, text in enumerate(texts):
        own = [s.name for s in tc.schedules(tc.parse(text)) if "opencl" in s.device_kinds]
        yield from (("opencl:0", name, text) for name in own[number % step :: step])


DEFAULTS = [
    *(("opencl:0", case.schedule, case.workload.text) for case in FEW),
    *turns([text for text in NASTY if text not in NASTY_2D], 6),
    *(("opencl:0", "conflict_free", text) for text in LARGE),
    *turns(NASTY_FILTERS, 3),
    *(("sm_90", name, text) for name, texts in EMULATED.items() for text in texts[::2]),
]
OTHERS = [("sm_90", name, text) for name, texts in EMULATED.items() for text in texts[1::2]]


def case_features(case):
    """What a schedule may depend on, and the large workloads themselves, in each of which an index overflows."""
    place, schedule, text = case
    return {(place, schedule, feature) for feature in ({text} if text in LARGE else list_features(text))}


@pytest.mark.sample(32)
@pytest.mark.parametrize(
    ("place", "schedule", "text"),
    [*mark_others_slow(DEFAULTS, case_features), *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_defaults_compute_the_workload(place, schedule, text):
    kernel = check(place, schedule, text)
    if place != "sm_90":
        assert kernel.shared_bytes <= 48 << 10


TUNED = {name: VARIED for name in ("conflict_free", "direct", "implicit_gemm", "depthwise")}
SMALL_WINOGRAD = (
    "conv2d:1x16x16x16,32x16x3x3,s1,p1",
    "conv2d:2x24x13x17,20x24x3x3,s1,p1x0x2x1,bias,relu",
    "conv2d:1x16x12x12,24x16x5x5,s1,p2,nhwc,add",
)
TUNED |= {name: SMALL_WINOGRAD for name in OWN_TURNS}
TUNED |= {name: CHANNELS_LAST for name in ("depthwise_nhwc", "grouped_nhwc")}
TUNED |= {s.name: SMALL_FILTERS for text in SMALL_FILTERS for s in tc.schedules(tc.parse(text))}
TUNED = {name: [text for text in texts if runs(name, text)] for name, texts in TUNED.items()}
NUM_CONFIGS = {"depthwise_nhwc": 5, "grouped_nhwc": 5, "hopper": 3, "mma_sync": 3, "stem": 1, "winograd_hopper": 4}
NUM_CONFIGS |= dict.fromkeys(OWN_TURNS, 3)


@functools.cache
def searched(schedule):
    """Legal configs of the tuned workloads that together try as much as possible: (space, configs) by text."""
    seen, found = set(), {}
    seed = 1 if schedule in ("depthwise_nhwc", "grouped_nhwc", "tensor_core", "stem", "hopper") else 0
    for text in DEEP.get(schedule) or TUNED[schedule]:
        w = tc.parse(text)
        if schedule == "hopper":
            space = all_legal(w)
        elif schedule in DEEP:
            space = space_of(w, schedule, "sm_86" if schedule == "stem" else "sm_90")
        else:
            space = registry.find_schedule(w, schedule).space(
                w, *[find_device("opencl:0").limits] * (schedule in OWN_TURNS)
            )
        found[text] = space, covering(space, NUM_CONFIGS.get(schedule, 2), seed, seen)
    return found


SEARCHES = [
    pytest.param(place, name, text, marks=[pytest.mark.slow] if number % 3 else [])
    for place, workloads in (("sm_90", DEEP), ("opencl:0", TUNED))
    for name, texts in workloads.items()
    for number, text in enumerate(texts)
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("place", "schedule", "text"), SEARCHES)
def test_searched_configs_compute_the_workload(place, schedule, text):
    """What `usage` says of the threads and blocks of a config is so."""
    space, configs = searched(schedule)[text]
    for config in configs:
        with few_multiprocessors():
            kernel = check(place, schedule, text, config)
        if schedule in TUNED and registry.find_schedule(tc.parse(text), schedule).usage and len(kernel.kernels) == 1:
            used = space.compute_usage(np.stack([space.point_from_config(config)]))
            assert (used.threads[0], used.blocks[0]) == (kernel.launch.threads_per_block, kernel.launch.num_blocks), (
                config
            )


TRIED = {
    "direct": {
        "pipeline": ("none", "registers", "async2", "async3", "async4"),
        "copy_order": ("contiguous", "coalesced"),
    },
    "implicit_gemm": {"split_k": (1, 2, 4), "sliced_k": (1, 2, 4), "weight_layout": ("oihw", "ihwo")},
    "depthwise_nhwc": {"weight_scope": ("shared", "registers", "global"), "unroll_scope": ("filter", "row", "tap")},
    "grouped_nhwc": {"weight_scope": ("shared", "global"), "unroll_scope": ("row", "tap"), "block_k": (1, 2, 4, 8)},
    "mma_sync": {
        "block_m": (16, 32, 48, 64, 96, 128),
        "block_n": (16, 32, 64),
        "block_k": (16, 32, 64, 128),
        **dict.fromkeys(("warps_m", "warps_n", "warps_k"), (1, 2, 4)),
        **{"stages": (2, 3, 4, 6), "split_k": (1, 2, 4, 8), "split_k_reduction": ("workspace", "cluster")},
    },
    "winograd": {
        "output_tile": (2, 4, 6),
        "copy_order": ("vectorized", "contiguous", "coalesced"),
        "pipeline": ("async2", "async4"),
    },
    "winograd_hopper": {"output_tile": (2, 4), "vector": (1, 2, 4)},
}
TILES = {"direct": ("tile_f", "tile_x"), "implicit_gemm": ("tile_f", "tile_p"), "depthwise_nhwc": ("tile_y", "tile_x")}


@pytest.mark.sample(4)
@pytest.mark.parametrize("schedule", [*TRIED, "hopper"])
def test_searched_configs_above_try_every_kind_of_kernel(schedule):
    """Without this, they could pass with nothing but the simplest kernels."""
    found = searched(schedule)
    tried = {what for space, configs in found.values() for config in configs for what in features(space, config)}
    if schedule == "hopper":
        space = next(iter(found.values()))[0]
        wanted = {name: knob.options for name, knob in space.knobs.items()}
    else:
        wanted = TRIED[schedule]
    assert tried >= {f"{knob}={value}" for knob, values in wanted.items() for value in values}
    assert tried >= {f"{tile} overhangs" for tile in TILES.get(schedule, ())}


def test_pairs_of_choices_meet_every_dtype_layout_and_epilogue():
    """Without this, the defaults could be tried on a few workloads alone."""
    assert len(PAIRS) < len(every(ON_OPENCL)) / 10
    for operator, schedule, texts in schedules():
        own = [case for case in FEW if (case.operator, case.schedule) == (operator, schedule)]
        if schedule not in OWN_TURNS:
            assert len({case.text for case in own}) >= len(texts) / 3
            assert {(case.dtype, case.layout) for case in own} == set(itertools.product(ON_OPENCL, layouts(schedule)))
            assert {case.epilogue for case in own} == set(EPILOGUES)


@pytest.mark.parametrize("texts", [NASTY_1D, NASTY_2D, NASTY_3D, NASTY_DEPTHWISE, NASTY_GROUPED])
def test_lists_of_nasty_workloads_have_every_option(texts):
    workloads = [tc.parse(text) for text in texts]
    assert len(set(workloads)) >= 12
    for option, usual in (("stride", 1), ("dilation", 1), ("padding", 0)):
        assert any(set(getattr(w, option)) != {usual} for w in workloads), option
    assert any(w.pad_low != w.pad_high for w in workloads)
    assert any(w.N > 1 for w in workloads)
    assert any(w.groups > 1 for w in workloads)


def suited(workload, schedule):
    """A workload of the same sizes that a schedule applies to."""
    if not schedule.startswith(("depthwise", "grouped")):
        return workload
    groups = max(2, workload.groups)
    layout = "nhwc" if schedule.endswith("_nhwc") else workload.layout
    each = (2, 3) if schedule == "grouped_nhwc" else (1, 1)
    fields = {**vars(workload), "C": each[0] * groups, "O": each[1] * groups, "groups": groups, "layout": layout}
    return type(workload)(**fields)


ON_ANY = (*LADDER, "direct", "implicit_gemm", "depthwise", "depthwise_nhwc", "grouped_nhwc")


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ON_ANY)
@settings(max_examples=2)
@given(workload=convolutions(max_flops=1_000_000), seed=st.integers(0, 2**32 - 1))
def test_any_config_computes_any_convolution(schedule, workload, seed):
    workload = suited(workload, schedule)
    space = registry.find_schedule(workload, schedule).space(workload)
    sample = map(space.config_from_point, space.sample_legal(64, np.random.default_rng(seed)))
    # PoCL 3.0 at times forgets what an accumulator holds that is written under a guard, as those of overhanging tiles
    # are: the covering configs above have such tiles, on workloads where it does not.
    config = next((config for config in sample if all_divide(space, config)), None)
    assume(config is not None)
    assert tc.build(workload, schedule, device="opencl:0", config=config).verify().error <= 1e-5


@pytest.mark.sample(4)
@pytest.mark.parametrize("rung", LADDER)
@settings(max_examples=4)
@given(workload=convolutions(max_flops=10**9))
def test_defaults_of_any_workload_fit_any_gpus_shared_memory(rung, workload):
    assert tc.build(workload, rung, arch="sm_75").shared_bytes <= 48 << 10


@settings(max_examples=5)
@given(workload=filters(), data=st.data())
def test_any_filter_is_computed(workload, data):
    schedule = data.draw(st.sampled_from([s.name for s in tc.schedules(workload) if "opencl" in s.device_kinds]))
    assert tc.build(workload, schedule, device="opencl:0").verify().error <= 1e-5


@pytest.mark.sample(3)
@pytest.mark.parametrize("texts", [NASTY, NASTY_1D, NASTY_3D, NASTY_DEPTHWISE, NASTY_GROUPED])
@pytest.mark.parametrize(("first", "kind"), [(0, ""), (2, ",f16,nhwc")])
def test_there_is_a_config_to_search_for_any_small_workload(texts, first, kind):
    """Limits that serve a GPU, of threads, say, must not shut out all of a space."""
    rng = np.random.default_rng(0)
    for w in (tc.parse(text + kind) for text in texts[first::4]):
        for schedule in registry.schedules_to_tune(w, "cuda", "sm_90"):
            space = schedule.space(w, get_block_limits("sm_90"))
            drawn = (rng.random((4096, len(space.knobs))) * space.sizes).astype(np.int32)  # faster than to list all
            assert space.is_legal(drawn).any() or len(space.sample_legal(1, rng)), (w.text, schedule.name)


TF32 = [(name, texts[8 % len(texts)], layouts(name)[-(i % 2)]) for i, (_, name, texts) in enumerate(schedules())]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("schedule", "text", "layout"), TF32)
def test_tf32_is_multiplied_in_float32_without_tensor_cores(schedule, text, layout):
    workload, exact = (tc.parse(f"{text}{dtype},{layout},bias,relu") for dtype in (",tf32", ""))
    if not runs(schedule, workload.text):
        pytest.skip("on tensor cores")
    kernel = tc.build(workload, schedule, device="opencl:0")
    assert kernel.verify(problem(workload)).error < exact.tolerance
    assert kernel.source == tc.build(exact, schedule, device="opencl:0").source


@pytest.mark.parametrize("schedule", tc.schedules(), ids=lambda s: f"{s.operator}-{s.name}")
def test_every_schedule_explains_itself(schedule):
    assert 20 < len(schedule.summary) <= 120
    assert schedule.summary.endswith(".")
    assert len(schedule.doc.splitlines()) >= 4


def test_dtype_that_a_schedule_does_not_compute_is_refused(schedule_registry):
    def single(s, w, k):
        """Compute in float32 alone."""

    tc.schedule("conv2d", dtypes=("float32",))(single)
    with pytest.raises(tc.ScheduleError, match="single computes conv2d in float32; this workload has tf32"):
        tc.build(tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1,tf32"), "single", arch="sm_90")


# --- what it is compiled to ---

ALL_ARCHITECTURES = ("sm_75", *ARCHITECTURES)
LAYERS = {
    **dict.fromkeys((*LADDER, "direct", "implicit_gemm"), (CHAPTER, CHAPTER)),
    **{s.name: (SIGNAL,) for s in tc.schedules(tc.parse(SIGNAL))},
    **{s.name: (IMAGE, SIGNAL)[: 1 + runs(s.name, SIGNAL, "cuda")] for s in tc.schedules(tc.parse(IMAGE))},
    "depthwise": ("conv2d:1x128x56x56,128x1x3x3,s1,p1,g128",) * 2,
    "mma_sync": (
        *(f"conv2d:32x128x28x28,256x128x3x3,s1,p1,{dtype},nhwc,bias,relu" for dtype in DTYPES),
        # ptxas left to itself takes 96 registers of the 116 that this one needs, for a fifth block beside two.
        "conv2d:1x256x14x14,256x256x3x3,s1,p1,f16,nhwc",
        *(f"{layer.workload},f16,nhwc" for layer in tc.suite("resnet50", 32)[2::7]),
    ),
    **listed("layer"),
}


def architectures(schedule, text):
    found = registry.find_schedule(tc.parse(text), schedule)
    return [arch for arch in ALL_ARCHITECTURES if found.can_run_on("cuda", arch)]


COMPILED = [
    (name, text, own[(number + 2 * place) % len(own)])
    for number, (name, texts) in enumerate(LAYERS.items())
    for place, text in list(enumerate(texts))[::4]  # all of them below
    for own in [architectures(name, text)]
]


@pytest.mark.sample(6)
@needs_nvrtc
@pytest.mark.parametrize(("schedule", "text", "arch"), COMPILED)
def test_defaults_of_networks_compile_without_spills(schedule, text, arch):
    check_spills(tc.parse(text), schedule, arch)


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["stem", "tensor_core", "depthwise_nhwc"])
def test_defaults_fit_every_architecture_and_may_be_searched(schedule):
    for text in LAYERS[schedule]:
        space = space_of(tc.parse(text), schedule, "sm_120")
        assert space.is_legal(space.point_from_config(space.default)[None]).all(), text


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize(
    ("schedule", "text"), [(name, text) for name, texts in LAYERS.items() for text in dict.fromkeys(texts)]
)
def test_defaults_compile_without_spills_for_every_architecture(schedule, text):
    for arch in architectures(schedule, text):
        check_spills(tc.parse(text), schedule, arch)


FITTING = [layer.workload.text for name in ("resnet50", "vgg16", "mobilenet") for layer in tc.suite(name)]
FITTING += [
    f"conv2d:{n}x{c}x{size}x{size},{o}x{c}x{filter_}x{filter_},s1,p{filter_ // 2}"
    for n, c, o, size in ((1, 3, 64, 512), (16, 64, 64, 224), (4, 16, 16, 400), (2, 7, 9, 999))
    for filter_ in (1, 3, 5, 7, 9)
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("rung", LADDER[1:])
def test_layers_and_large_images_fit_any_gpus_shared_memory(rung):
    """Each rung with every eighth of them; on a GPU, all compute all layers."""
    for text in FITTING[2 * LADDER.index(rung) - 1 :: 8]:
        assert tc.build(tc.parse(text), rung, arch="sm_75").shared_bytes <= 48 << 10, text


def in_16_bits():
    """Each schedule in f16 or in bf16, with the architectures, layouts and epilogues in turn; the rest is slow."""
    channels = {"depthwise": 1, "depthwise_nhwc": 1, "depthwise_nchw": 1, "grouped_nhwc": 8, "grouped_nchw": 8}
    shapes = {
        "conv1d": "conv1d:1x64x3000,64x{}x9,p4,g{}",
        "conv2d": "conv2d:1x64x28x28,64x{}x3x3,p1,g{}",
        "conv3d": "conv3d:1x64x8x14x14,64x{}x3x3x3,p1,g{}",
    }
    for i, (operator, name, _) in enumerate(schedules()):
        for j, dtype in enumerate(("f16", "bf16")):
            each, own = channels.get(name, 64), layouts(name)
            choices = (dtype, own[(i + j) % len(own)], EPILOGUES[(i + 3 * j) % 6])
            text = ",".join(filter(None, (shapes[operator].format(each, 64 // each), *choices)))
            arch = ("sm_80", "sm_90", "sm_120")[(i + 2 * j) % 3]
            yield pytest.param(name, text, arch, marks=[pytest.mark.slow] if (i + j) % 2 else [])


@pytest.mark.sample(3)
@needs_nvrtc
@pytest.mark.parametrize(("schedule", "text", "arch"), list(in_16_bits()))
def test_16_bit_floats_compile_without_a_gpu(schedule, text, arch):
    assert 0 < tc.build(tc.parse(text), schedule, arch=arch).resources.registers <= 255


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("operator", "schedule", "texts"), schedules(), ids=lambda value: str(value)[:20])
def test_every_combination_is_computed_on_a_gpu(gpu, operator, schedule, texts, dtype, epilogue):
    for text, layout in itertools.product(texts, layouts(schedule)):
        check(gpu, schedule, ",".join(filter(None, (text, dtype, layout, epilogue))))


IN_EVERY_DTYPE = [
    f"{text},{dtype},{layout}"
    for text, dtype, layout in itertools.product((*NASTY, *NASTY_1D, *NASTY_3D, *NASTY_DEPTHWISE), DTYPES, LAYOUTS)
]
NETWORKS = [layer.workload.text for name in ("resnet50", "vgg16", "mobilenet") for layer in tc.suite(name)]
ON_A_GPU = {
    **{s.name: (*NASTY, *NASTY_1D, *NASTY_3D, *LARGE, *VARIED, *CHANNELS_LAST, *NETWORKS) for s in tc.schedules()},
    **{s.name: (*NASTY_FILTERS, *SMALL_FILTERS) for s in tc.schedules() if s.operator.startswith("filter")},
    **{name: NASTY_WINOGRAD for name in OWN_TURNS},
    **{name: (*EMULATED[name], *DEEP[name], *LAYERS.get(name, ())) for name in EMULATED},
}
ON_A_GPU["tensor_core"] += tuple(IN_EVERY_DTYPE)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ON_A_GPU)
def test_defaults_and_searched_configs_are_right_on_a_gpu(gpu, schedule):
    for text in ON_A_GPU[schedule]:
        w = tc.parse(text)
        found = next((s for s in tc.schedules(w) if s.name == schedule), None)
        if found is None or not found.can_run_on("cuda", gpu.arch):
            continue
        space = all_legal(w) if schedule == "hopper" else found.space(w, gpu.limits)
        check(gpu, schedule, text)
        for config in covering(space, 4, seed=1):
            try:
                check(gpu, schedule, text, config)
            except DeviceError as refusal:  # of a kernel whose resources are only known when it is lowered
                if "choose a smaller tile" not in str(refusal):
                    raise
