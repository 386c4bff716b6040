"""Random gradients by every schedule: textbook schedules on OpenCL, and all promising schedules on a GPU."""

import dataclasses
import itertools
import os

import numpy as np
import pytest
from random_gradients import draw_text
from verified_schedules import verify_promising, verify_schedules

import tvmconv as tc
from tvmconv import registry
from tvmconv.devices import find_device

NUM_SMALL, NUM_LARGE = 150, 90
SMALL = [draw_text(seed, dtypes=("f32", "bf16", "tf32")) for seed in range(NUM_SMALL)]  # PoCL has no float16
# Tensor cores need vectors of channels; strides, taps and images are as odd as those of the small workloads.
LARGE = [draw_text(1000 + seed, 23, 8, ("f16", "bf16", "tf32", "f32"), ("nhwc",)) for seed in range(NUM_LARGE)]
# Workloads that are compared with PyTorch on a GPU, among them narrow 1×1 layers. The variable chooses others.
FIRST_SEED = 5000 + 1000 * int(os.environ.get("TVMCONV_GRADIENTS_SEED", "0"))
OTHERS = [draw_text(FIRST_SEED + seed, 23, 8, ("f16", "bf16", "tf32", "f32")) for seed in range(36)] + [
    "conv2d_wgrad:3x24x19x21,72x24x1x1,s1,p0,f16,nhwc",
    "conv2d_wgrad:5x72x17x13,72x72x1x1,s1,p0,bf16,nhwc",
    "conv2d_dgrad:5x72x17x13,72x72x1x1,s1,p0,f16,nhwc",
    "conv2d_dgrad:3x40x19x21,240x40x1x1,s1,p0,bf16,nhwc",
]


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


def list_far_from_pytorch(text, device, place):
    """Compare the schedules with the gradient of PyTorch in float64, and return a line for each that differs."""
    torch = pytest.importorskip("torch")
    from tvmconv.baselines.torch_gradient_calls import list_gradient_calls

    w = tc.parse(text)
    inputs = w.inputs(seed=7)
    tensors = [torch.from_numpy(np.asarray(array, np.float64)).to(place) for array in inputs]
    call = list_gradient_calls(w)[0]
    expected = call.finish(call.compute(*call.prepare(*tensors))).double().cpu().numpy()
    names = [schedule.name for schedule in registry.schedules_to_tune(w, device.kind, device.arch)]
    wrong = []
    for name in names:
        found = np.asarray(tc.build(w, name, device=device)(*inputs), np.float64).reshape(expected.shape)
        error = np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)
        if not error <= w.tolerance:
            wrong.append(f"{text} {name}: {error:.1e}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("text", OTHERS[::4])
def test_gradients_are_those_of_pytorch_on_opencl(text):
    w = tc.parse(text)
    assert list_far_from_pytorch(str(dataclasses.replace(w, dtype="float32")), find_device("opencl:0"), "cpu") == []


@pytest.mark.gpu
@pytest.mark.parametrize("text", OTHERS)
def test_gradients_are_those_of_pytorch(text, gpu):
    assert list_far_from_pytorch(text, gpu, "cuda") == []
