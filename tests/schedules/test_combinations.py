"""Every schedule computes every nasty convolution in every dtype and layout with every epilogue."""

import functools
import itertools

import pytest
from combinations import DTYPES, EPILOGUES, every, in_pairs, in_turn, layouts, schedules
from nasty import NASTY_1D, NASTY_2D, NASTY_3D, NASTY_DEPTHWISE, NASTY_GROUPED

import tvmconv as tc
from tvmconv.compiler import nvrtc

ON_OPENCL = ("f32", "bf16")  # PoCL has no 16-bit floats of OpenCL's; bfloat16 is stored as integers
PAIRS = in_pairs(ON_OPENCL)
OWN_TURNS = ("winograd", "winograd_fused")  # in test_winograd.py, for tiles of all sizes
FEW = [case for case in in_turn(PAIRS) if case.schedule not in OWN_TURNS]  # on a GPU it is all combinations
ARCHITECTURES = ("sm_80", "sm_90", "sm_120")
SHAPES = {
    "conv1d": "conv1d:1x64x3000,64x{}x9,p4,g{}",
    "conv2d": "conv2d:1x64x28x28,64x{}x3x3,p1,g{}",
    "conv3d": "conv3d:1x64x8x14x14,64x{}x3x3x3,p1,g{}",
}
CHANNELS_OF_A_GROUP = {"depthwise": 1, "depthwise_nhwc": 1, "grouped_nhwc": 8}

needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))


@functools.lru_cache(maxsize=1)
def problem(workload):
    """Inputs and reference, shared by the schedules that compute them one after another."""
    return tc.Problem(workload, seed=0)  # always the same: a single output may cancel out, at times


@pytest.mark.parametrize("case", FEW, ids=str)
def test_every_schedule_meets_every_choice(case):
    found = tc.build(case.workload, case.schedule, device="opencl:0").verify(problem(case.workload))
    assert found.ok, found


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("operator", "schedule", "texts", "layout"),
    [(*schedule, layout) for schedule in schedules() for layout in layouts(schedule[1])],
    ids=lambda value: str(value)[:20],
)
def test_every_schedule_computes_every_combination_on_a_gpu(gpu, operator, schedule, texts, layout, dtype, epilogue):
    wrong = {}
    for text in texts:
        workload = tc.parse(",".join(filter(None, (text, dtype, layout, epilogue))))
        found = tc.build(workload, schedule, device=gpu).verify(problem(workload))
        if not found.ok:
            wrong[workload.text] = found
    assert wrong == {}


@pytest.mark.gpu
@needs_nvrtc
@pytest.mark.parametrize(("operator", "schedule", "texts"), schedules(), ids=lambda value: str(value)[:20])
def test_every_combination_compiles_for_every_architecture(operator, schedule, texts):
    """Takes no GPU, but four minutes of a processor: it is run where the GPU's long tests are."""
    choices = itertools.product(DTYPES, layouts(schedule), EPILOGUES, ARCHITECTURES)
    for text, (dtype, layout, epilogue, arch) in zip(itertools.cycle(texts), choices, strict=False):
        workload = tc.parse(",".join(filter(None, (text, dtype, layout, epilogue))))
        assert tc.build(workload, schedule, arch=arch).resources.registers > 0


def test_the_pairs_meet_what_they_are_meant_to():
    """Without this, the tests above could pass with a few workloads."""
    for operator, schedule, texts in schedules():
        if schedule in OWN_TURNS:
            continue
        own = [case for case in FEW if (case.operator, case.schedule) == (operator, schedule)]
        assert len({case.text for case in own}) >= len(texts) / 2
        assert {(case.dtype, case.layout) for case in own} == set(itertools.product(ON_OPENCL, layouts(schedule)))
        assert {case.epilogue for case in own} == set(EPILOGUES)
    for operator in {case.operator for case in FEW}:
        others = (own for own in schedules() if own[1] not in OWN_TURNS)
        texts = {text for own, _, several in others if own == operator for text in several}
        assert {case.text for case in FEW if case.operator == operator} == texts


def test_the_pairs_are_a_small_part_of_all_and_the_same_each_time():
    assert len(PAIRS) < len(every(ON_OPENCL)) / 10
    assert in_pairs(ON_OPENCL) == PAIRS


@pytest.mark.parametrize("texts", [NASTY_1D, NASTY_2D, NASTY_3D, NASTY_DEPTHWISE, NASTY_GROUPED])
def test_the_lists_have_every_option(texts):
    workloads = [tc.parse(text) for text in texts]
    assert len(set(workloads)) >= 12
    for option, usual in (("stride", 1), ("dilation", 1), ("padding", 0)):
        assert any(set(getattr(w, option)) != {usual} for w in workloads), option
    assert any(w.before != w.behind for w in workloads)
    assert any(w.N > 1 for w in workloads)
    assert any(w.groups > 1 for w in workloads)
    assert any(w.depthwise for w in workloads) or texts is NASTY_GROUPED
    assert any(set(w.out) == {1} for w in workloads)


def sample():
    """Each schedule in f16 and in bf16, with the architectures, layouts and epilogues in turn."""
    for i, (operator, name, _) in enumerate(schedules()):
        for j, dtype in enumerate(("f16", "bf16")):
            turn = i + j * 2
            places = layouts(name)
            yield (
                operator,
                name,
                dtype,
                places[(turn % 2 ^ j) % len(places)],
                EPILOGUES[(i + 3 * j) % 6],
                ARCHITECTURES[turn % 3],
            )


@needs_nvrtc
@pytest.mark.parametrize(("operator", "schedule", "dtype", "layout", "epilogue", "arch"), list(sample()))
def test_every_schedule_compiles_16_bit_floats_without_a_gpu(operator, schedule, dtype, layout, epilogue, arch):
    channels = CHANNELS_OF_A_GROUP.get(schedule, 64)
    text = SHAPES[operator].format(channels, 64 // channels)
    workload = tc.parse(",".join(filter(None, (text, dtype, layout, epilogue))))
    assert 0 < tc.build(workload, schedule, arch=arch).resources.registers <= 255


TF32 = [
    (operator, name, texts[8 % len(texts)], layouts(name)[-(i % 2)])
    for i, (operator, name, texts) in enumerate(schedules())
]


@pytest.mark.parametrize(("operator", "schedule", "text", "layout"), TF32, ids=lambda value: str(value)[:20])
def test_where_tf32_will_do_every_schedule_multiplies_in_float32(operator, schedule, text, layout):
    workload, exact = (tc.parse(f"{text}{dtype},{layout},bias,relu") for dtype in (",tf32", ""))
    if not any(s.name == schedule for s in tc.schedules(workload) if "opencl" in s.kinds):
        pytest.skip("on tensor cores")
    kernel = tc.build(workload, schedule, device="opencl:0")
    assert kernel.verify(problem(workload)).error < exact.tolerance
    assert kernel.source == tc.build(exact, schedule, device="opencl:0").source
