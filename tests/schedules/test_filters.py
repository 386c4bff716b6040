"""Every variant of the filters computes every filter that it applies to, and the literature's worked examples."""

import numpy as np
import pytest
from worked_examples import WORKED

import tvmconv as tc

SIGNAL, IMAGE = tc.parse("filter1d:16777216,k5"), tc.parse("filter2d:4096x4096x3,5x5")
VARIANTS = {
    SIGNAL: (
        "basic", "constant", "halo_blocks", "halo_two_step", "halo_threads", "caching", "shuffle", "register",
    ),
    IMAGE: (
        "basic", "constant", "halo_threads", "halo_strided", "caching", "shuffle", "texture", "register",
    ),
}  # fmt: skip


def cases(workloads, kind):
    """Each workload with each schedule that computes it on a kind of device."""
    return [(w, s.name) for w in workloads for s in tc.schedules(w) if kind in s.device_kinds]


@pytest.mark.parametrize("usual", VARIANTS, ids=str)
def test_variants_are_listed_as_the_literature_builds_them_up(usual):
    assert tuple(s.name for s in tc.schedules(usual)) == VARIANTS[usual]


@pytest.mark.sample(8)
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


@pytest.mark.sample(6)
@pytest.mark.parametrize(("workload", "schedule"), LARGEST, ids=str)
def test_the_largest_masks_are_computed(workload, schedule):
    assert tc.build(workload, schedule, device="opencl:0").verify().error <= 1e-5


def test_a_clamp_limits_what_is_stored_alone():
    """The sum passes 1 on its way and comes back."""
    workload = tc.parse("filter1d:3,k3,clamp")
    x, mask = np.array([2, 0, -1.5], "float32"), np.ones(3, "float32")
    for schedule in (s.name for s in tc.schedules(workload) if "opencl" in s.device_kinds):
        assert tc.build(workload, schedule, device="opencl:0")(x, mask).tolist() == [1.0, 0.5, 0.0]
