"""What cuDNN is asked to compute is the workload; here PyTorch computes it on the CPU."""

import pytest
from hypothesis import given
from strategies import convolutions, filters

from tvmconv.baselines.torch_calls import calls
from tvmconv.verify import Problem
from tvmconv.workloads import parse

torch = pytest.importorskip("torch")


@given(filters() | convolutions())
def test_every_call_of_a_workload_computes_it(w):
    problem = Problem(w, seed=0)
    inputs = [torch.from_numpy(array) for array in problem.inputs]
    for call in calls(w):
        y = call.compute(*call.prepare(*inputs)).numpy()
        assert y.shape == w.argument_shapes[-1]
        assert y.flags.c_contiguous
        assert problem.check(y).ok, call.notes


@pytest.mark.parametrize(
    ("text", "ways"), [("filter1d:99,k5", 1), ("filter2d:9x9x1,3x3", 1), ("filter2d:9x9x3,3x3", 3)]
)
def test_only_channels_leave_a_choice(text, ways):
    assert len({call.notes for call in calls(parse(text))}) == ways


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("filter1d:99,k5,clamp", "clamped by a kernel of its own"),
        ("conv2d:1x16x32x32,16x16x3x3,p0x1x1x0", "padded by a kernel of its own"),
        ("conv2d:1x16x32x32,16x1x3x3,g16", "depthwise"),
    ],
)
def test_what_cudnn_does_not_do_itself_is_told(text, said):
    (call,) = calls(parse(text))
    assert said in ", ".join(call.notes)
