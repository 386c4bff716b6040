"""Random gradients by every schedule: textbook schedules on OpenCL, and all promising schedules on a GPU."""

import itertools

import numpy as np
import pytest
from random_gradients import draw_text

import tvmconv as tc
from tvmconv import registry
from tvmconv.devices import find_device
from tvmconv.errors import Error, ScheduleError
from tvmconv.verification import Problem

NUM_SMALL, NUM_LARGE = 150, 90
SMALL = [draw_text(seed, dtypes=("f32", "bf16", "tf32")) for seed in range(NUM_SMALL)]  # PoCL has no float16
# Tensor cores need vectors of channels; strides, taps and images are as odd as those of the small workloads.
LARGE = [draw_text(1000 + seed, 23, 8, ("f16", "bf16", "tf32", "f32"), ("nhwc",)) for seed in range(NUM_LARGE)]
NUM_RANDOM_CONFIGS = 2


def verify_schedules(text, device, names):
    """Build schedules with their default and with random configs, and return a line for each wrong kernel."""
    w, problem, wrong = tc.parse(text), Problem(tc.parse(text), seed=0), []
    for name in names:
        schedule = registry.find_schedule(w, name)
        space = schedule.space(w, device.limits)
        points = space.sample_legal(NUM_RANDOM_CONFIGS, np.random.default_rng(0)) if len(space.knobs) else []
        configs = [None, *(space.config_from_point(point) for point in points)]
        for config in configs:
            try:
                verification = tc.build(w, name, device=device, config=config).verify(problem)
            except ScheduleError as error:  # the device or the workload lacks what the config needs
                if config is None:
                    wrong.append(f"{text} {name}: {error}")
                continue
            except Error as error:
                wrong.append(f"{text} {name} {config}: {error}")
                continue
            if not verification.ok:
                wrong.append(f"{text} {name} {config}: {verification.fault}")
    return wrong


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
    w = tc.parse(text)
    names = [schedule.name for schedule in registry.schedules_to_tune(w, gpu.kind, gpu.arch)]
    assert verify_schedules(text, gpu, dict.fromkeys(["default", *names])) == []
