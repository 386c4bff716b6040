"""Loops that are too long to be looked at as a whole: some of their iterations count for all."""

import pytest

import tvmconv as tc
from tvmconv.analysis import asked
from tvmconv.analysis.asked import asked_by
from tvmconv.analysis.counts import counts
from tvmconv.analysis.lowered import tir
from tvmconv.analysis.memory.footprint import dram_bytes, footprints
from tvmconv.arithmetic import ceil_div

LONG = tc.parse("conv2d:1x512x7x7,512x512x3x3,s1,p1")  # 2.4 million multiplications a thread, by the naive kernel


@pytest.mark.parametrize(
    ("text", "sampled"), [("conv2d:1x48x14x14,32x48x3x3,s1,p1", 48), ("conv2d:2x24x9x11,40x24x5x3,s2,p1", 24)]
)
@pytest.mark.parametrize("schedule", ["default", "tiling"])
def test_some_iterations_tell_what_all_do(text, sampled, schedule, monkeypatch):
    """One of each 9 or 15, as many as the filter has taps: it is not always the same tap."""
    w = tc.parse(text)

    def counted():
        kernel = tc.build(w, schedule, arch="sm_90")
        return counts(kernel, kernel.steps[0])

    exact = counted()
    monkeypatch.setattr(tir, "MAX_ITERATIONS", 100)
    monkeypatch.setattr(tir, "SAMPLED", sampled)
    some = counted()
    for ours, wanted in zip((*some.touched, *some.shared), (*exact.touched, *exact.shared), strict=True):
        assert ours.requests == pytest.approx(wanted.requests, rel=0.03)
        takes = ("wavefronts" if hasattr(wanted, "wavefronts") else "sectors", "least")
        for name in takes:
            assert getattr(ours, name) == pytest.approx(getattr(wanted, name), rel=0.1), name
    assert some.done.flops == pytest.approx(exact.done.flops, rel=0.03)


def test_a_kernel_too_long_to_execute_is_counted_by_its_text(monkeypatch):
    monkeypatch.setattr(asked, "MOST_STEPS", 10_000)
    kernel = tc.build(LONG, "default", arch="sm_90")
    (step,) = kernel.steps
    found = asked_by(kernel, step)
    assert found.executed is None
    loads = {access.array: access.requests for access in found.touched if access.kind == "load"}
    products = LONG.flops // 2 // (LONG.P * LONG.Q)  # of a thread, which has all channels of a pixel
    assert loads["K"] == pytest.approx(products * ceil_div(step.launch.threads, 32), rel=0.01)


def test_of_a_text_too_long_each_array_is_read_once():
    kernel = tc.build(LONG, "default", arch="sm_90")
    assert footprints(kernel, kernel.steps[0]) is None
    assert dram_bytes(kernel) == LONG.min_bytes
