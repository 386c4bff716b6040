"""Random gradients by every schedule: textbook schedules on OpenCL, and all promising schedules on a GPU."""

import itertools

import pytest
from random_gradients import draw_text
from verified_schedules import verify_promising, verify_schedules

import tvmconv as tc
from tvmconv.devices import find_device

NUM_SMALL, NUM_LARGE = 150, 90
SMALL = [draw_text(seed, dtypes=("f32", "bf16", "tf32")) for seed in range(NUM_SMALL)]  # PoCL has no float16
# Tensor cores need vectors of channels; strides, taps and images are as odd as those of the small workloads.
LARGE = [draw_text(1000 + seed, 23, 8, ("f16", "bf16", "tf32", "f32"), ("nhwc",)) for seed in range(NUM_LARGE)]


def list_names(text, device):
    """Return the schedules that compute a workload on a device."""
    return [schedule.name for schedule in tc.schedules(text) if device.kind in schedule.device_kinds]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SMALL, 10))
def test_schedules_compute_random_gradients_on_opencl(first):
    device = find_device("opencl:0")
    wrong = [verify_schedules(text, device, list_names(text, device)) for text in SMALL[first : first + 10]]
    assert [*itertools.chain(*wrong)] == []


@pytest.mark.gpu
@pytest.mark.parametrize("text", [*SMALL, *LARGE])
def test_promising_schedules_compute_random_gradients(text, gpu):
    assert verify_promising(text, gpu) == []
