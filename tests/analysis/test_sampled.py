"""Loops that are too long to be looked at as a whole: some of their iterations count for all."""

import pytest

import tvmconv as tc
from tvmconv.analysis import block_accesses
from tvmconv.analysis.block_accesses import count_block, count_block_accesses
from tvmconv.analysis.memory.footprint import compute_footprints, count_dram_bytes
from tvmconv.analysis.tir import scopes
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
        return count_block(kernel, kernel.kernels[0])

    exact = counted()
    monkeypatch.setattr(scopes, "MAX_ITERATIONS", 100)
    monkeypatch.setattr(scopes, "NUM_SAMPLED_ITERATIONS", sampled)
    some = counted()
    for ours, wanted in zip(
        (*some.global_accesses, *some.shared_accesses), (*exact.global_accesses, *exact.shared_accesses), strict=True
    ):
        assert ours.num_requests == pytest.approx(wanted.num_requests, rel=0.03)
        unit = "wavefronts" if hasattr(wanted, "wavefronts") else "sectors"
        takes = (unit, f"min_{unit}")
        for name in takes:
            assert getattr(ours, name) == pytest.approx(getattr(wanted, name), rel=0.1), name
    assert some.traffic.flops == pytest.approx(exact.traffic.flops, rel=0.03)


def test_a_kernel_too_long_to_execute_is_counted_by_its_text(monkeypatch):
    monkeypatch.setattr(block_accesses, "MAX_BLOCK_INSTRUCTIONS", 10_000)
    kernel = tc.build(LONG, "default", arch="sm_90")
    (step,) = kernel.kernels
    found = count_block_accesses(kernel, step)
    assert found.instruction_counts is None
    loads = {access.array: access.num_requests for access in found.global_accesses if access.kind == "load"}
    products = LONG.flops // 2 // (LONG.P * LONG.Q)  # of a thread, which has all channels of a pixel
    assert loads["K"] == pytest.approx(products * ceil_div(step.launch.threads_per_block, 32), rel=0.01)


def test_of_a_text_too_long_each_array_is_read_once():
    kernel = tc.build(LONG, "default", arch="sm_90")
    assert compute_footprints(kernel, kernel.kernels[0]) is None
    assert count_dram_bytes(kernel) == LONG.min_bytes
