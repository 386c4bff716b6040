"""Every variant of the filters computes every filter that it applies to, and the literature's worked examples."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nasty_filters import NASTY_FILTERS
from points import covering
from strategies import filters
from worked_examples import WORKED

import tvmconv as tc
from tvmconv import library
from tvmconv.compiler import nvrtc

SIGNAL, IMAGE = tc.parse("filter1d:16777216,k5"), tc.parse("filter2d:4096x4096x3,5x5")
VARIANTS = {
    SIGNAL: (
        "basic", "constant", "halo_blocks", "halo_two_step", "halo_threads", "caching", "shuffle", "register",
    ),
    IMAGE: (
        "basic", "constant", "halo_threads", "halo_strided", "caching", "shuffle", "texture", "register",
    ),
}  # fmt: skip
SMALL = (tc.parse("filter1d:700,k9,clamp"), tc.parse("filter2d:45x50x2,5x3"))  # every knob has something to do

ARCHITECTURES = ("sm_75", "sm_90", "sm_120")

needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))


def cases(workloads, kind):
    """Each workload with each schedule that computes it on a kind of device."""
    return [(w, s.name) for w in workloads for s in tc.schedules(w) if kind in s.kinds]


NASTY = [tc.parse(text) for text in NASTY_FILTERS]


@functools.cache
def problem(workload):
    """Inputs and reference, shared by all schedules."""
    return tc.Problem(workload)


@pytest.mark.parametrize("usual", VARIANTS, ids=str)
def test_the_variants_are_listed_as_the_literature_builds_them_up(usual):
    assert tuple(s.name for s in tc.schedules(usual)) == VARIANTS[usual]


def in_turn(workloads):
    """Every third of the schedules of each workload for OpenCL: on a GPU, all compute all."""
    for number, w in enumerate(workloads):
        yield from cases([w], "opencl")[number % 3 :: 3]


@pytest.mark.parametrize(("workload", "schedule"), list(in_turn(NASTY)), ids=str)
def test_every_nasty_filter_is_computed(workload, schedule):
    kernel = tc.build(workload, schedule, device="opencl:0")
    assert kernel.verify(problem(workload)).error <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("workload", "schedule"), cases(NASTY, "cuda"), ids=str)
def test_every_variant_computes_every_nasty_filter_on_a_gpu(gpu, workload, schedule):
    assert tc.build(workload, schedule, device=gpu).verify(problem(workload)).error <= 1e-5


@settings(max_examples=12)
@given(workload=filters(), data=st.data())
def test_every_variant_computes_any_filter(workload, data):
    schedule = data.draw(st.sampled_from([s.name for s in tc.schedules(workload) if "opencl" in s.kinds]))
    assert tc.build(workload, schedule, device="opencl:0").verify().error <= 1e-5


@pytest.mark.parametrize(("workload", "schedule"), cases([w for w, *_ in WORKED], "opencl"), ids=str)
def test_every_variant_gives_the_worked_examples(workload, schedule):
    check_worked(workload, tc.build(workload, schedule, device="opencl:0"))


@pytest.mark.gpu
@pytest.mark.parametrize(("workload", "schedule"), cases([w for w, *_ in WORKED], "cuda"), ids=str)
def test_every_variant_gives_the_worked_examples_on_a_gpu(gpu, workload, schedule):
    check_worked(workload, tc.build(workload, schedule, device=gpu))


def check_worked(workload, kernel):
    inputs, outputs = next((inputs, outputs) for w, inputs, outputs in WORKED if w == workload)
    y = kernel(*inputs)
    assert {place: float(y[place]) for place in outputs} == pytest.approx(outputs, rel=1e-6)


@pytest.mark.parametrize(("workload", "schedule"), cases(SMALL, "opencl"), ids=str)
def test_a_variant_of_any_configuration_computes_its_filter(workload, schedule):
    for config in covering(library.find(workload, schedule).space(workload), 3):
        kernel = tc.build(workload, schedule, device="opencl:0", config=config)
        assert kernel.verify(problem(workload)).error <= 1e-5, config


@pytest.mark.gpu
@pytest.mark.parametrize(("workload", "schedule"), cases(SMALL, "cuda"), ids=str)
def test_a_variant_of_any_configuration_computes_its_filter_on_a_gpu(gpu, workload, schedule):
    for config in covering(library.find(workload, schedule).space(workload), 8):
        kernel = tc.build(workload, schedule, device=gpu, config=config)
        assert kernel.verify(problem(workload)).error <= 1e-5, config


def check_compiles(workload, schedule, arch):
    resources = tc.build(workload, schedule, arch=arch).resources
    assert resources.spills == 0
    assert 0 < resources.registers <= 255


@needs_nvrtc
@pytest.mark.parametrize(
    ("workload", "schedule", "arch"),
    [(*case, ARCHITECTURES[number % 3]) for number, case in enumerate(cases(VARIANTS, "cuda"))],
    ids=str,
)
def test_every_variant_compiles_without_spills_at_the_usual_sizes(workload, schedule, arch):
    check_compiles(workload, schedule, arch)


@pytest.mark.gpu
@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("workload", "schedule"), cases(VARIANTS, "cuda"), ids=str)
def test_every_variant_compiles_without_spills_for_every_architecture(workload, schedule, arch):
    """Takes no GPU: it is run where the GPU's long tests are."""
    check_compiles(workload, schedule, arch)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("filter1d:100,k16385", set(VARIANTS[SIGNAL]) - {"basic"}),  # 64 KiB and 4 bytes of constants
        ("filter2d:9x9x1,129x129", set(VARIANTS[IMAGE]) - {"basic"}),
        ("filter1d:100,k1025", {"halo_threads"}),  # a block of as many threads
        ("filter2d:9x9x1,33x17", {"halo_threads"}),
        ("filter1d:100,k12035", {"halo_blocks", "halo_two_step", "halo_threads"}),  # 48 KiB with the tile's 256
        ("filter2d:9x9x1,101x83", {"halo_threads", "halo_strided"}),
    ],
)
def test_a_mask_that_a_variant_has_no_room_for_is_not_its_own(text, refused):
    workload = tc.parse(text)
    applicable = {s.name for s in tc.schedules(workload)}
    assert "basic" in applicable
    assert not applicable & refused


LARGEST = [
    (tc.parse(text), schedule)
    for text, schedules in (
        ("filter1d:100,k16383", ("constant", "caching")),
        ("filter1d:100,k1023", ("halo_threads",)),
        ("filter1d:100,k12033", ("halo_blocks", "halo_two_step")),
        ("filter1d:20000,k12033", ("halo_blocks", "halo_two_step")),  # a whole tile
        ("filter2d:9x9x1,127x127", ("constant", "caching")),
        ("filter2d:9x9x1,31x31", ("halo_threads",)),
        ("filter2d:3x3x1,1x1023", ("halo_threads",)),
        ("filter2d:9x9x1,101x81", ("halo_strided",)),
        ("filter2d:9x40x1,101x81", ("halo_strided",)),
    )
    for schedule in schedules
]


@pytest.mark.parametrize(("workload", "schedule"), LARGEST, ids=str)
def test_the_largest_masks_are_computed(workload, schedule):
    assert tc.build(workload, schedule, device="opencl:0").verify().error <= 1e-5


@pytest.mark.parametrize(("workload", "schedule"), [*LARGEST, *cases(VARIANTS, "cuda")], ids=str)
def test_every_variant_fits_the_blocks_of_any_gpu(workload, schedule):
    kernel = tc.build(workload, schedule, arch="sm_75")
    assert kernel.shared_bytes <= 48 << 10
    assert kernel.launch.threads <= 1024


def test_an_image_with_too_many_rows_of_blocks_folds_into_the_grids_first_axis():
    tall = tc.parse("filter2d:70000x2x1,3x3")
    kernel = tc.build(tall, "halo_strided", device="opencl:0", config={"threads_y": 1, "threads_x": 2})
    assert kernel.launch.grid == (70000, 1, 1)
    assert kernel.verify().ok


def test_a_clamp_limits_what_is_stored_alone():
    """The sum passes 1 on its way and comes back."""
    workload = tc.parse("filter1d:3,k3,clamp")
    x, mask = np.array([2, 0, -1.5], "float32"), np.ones(3, "float32")
    for schedule in (s.name for s in tc.schedules(workload) if "opencl" in s.kinds):
        assert tc.build(workload, schedule, device="opencl:0")(x, mask).tolist() == [1.0, 0.5, 0.0]
