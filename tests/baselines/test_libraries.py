"""What every library is asked for and refuses; that they are right, and their times, need an NVIDIA GPU."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from scipy import ndimage
from strategies import filters

from tvmconv import baselines
from tvmconv.baselines import cudnn, cupy
from tvmconv.baselines.base import WrongDeviceError
from tvmconv.devices import Timing
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.errors import DeviceError
from tvmconv.verify import Problem
from tvmconv.workloads import parse

CONVOLUTION = parse("conv2d:1x4x6x6,4x4x3x3,p1")
FILTERS = (
    "filter1d:100003,k7",
    "filter1d:5,k31",  # a mask wider than the signal
    "filter2d:513x257x1,5x5",
    "filter2d:129x255x3,3x5",
    "filter2d:129x255x3,17x17,clamp",
    "filter1d:4099,k5,clamp",
)


LIBRARIES = baselines.known()


@pytest.mark.parametrize("name", LIBRARIES)
def test_other_devices_than_gpus_are_refused(opencl, name):
    w = parse("filter1d:99,k3")
    with pytest.raises(WrongDeviceError, match="needs an NVIDIA GPU: expected cuda:N instead of opencl:0"):
        LIBRARIES[name](w, w.inputs(0), device=opencl)


@pytest.fixture
def described():
    """An NVIDIA GPU as data, for what is refused before it is used."""
    return CudaDevice("cuda:0", "a GPU", "sm_90", 1 << 30, 1, 1024, 49152, None, None, None, 0)


@pytest.mark.parametrize("name", ["cupy"])
def test_convolutions_are_refused_where_only_filters_compare(described, name):
    with pytest.raises(DeviceError, match="is for filter1d and filter2d, not for conv2d"):
        LIBRARIES[name](CONVOLUTION, CONVOLUTION.inputs(0), device=described)


def test_without_cupy_the_error_says_what_to_install(described, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    w = parse("filter1d:99,k3")
    with pytest.raises(DeviceError, match="pip install cupy-cuda13x"):
        LIBRARIES["cupy"](w, w.inputs(0), device=described)


@given(filters())
def test_what_cupy_is_asked_for_is_the_filter(w):
    problem = Problem(w, seed=0)
    y = np.full(w.signal_shape, np.nan, "float32")
    cupy.run(ndimage, w, *problem.inputs, y)
    assert problem.check(y).ok


@pytest.mark.gpu
@pytest.mark.parametrize("text", FILTERS)
@pytest.mark.parametrize(("name", "module"), [("cudnn", "torch"), ("cupy", "cupy")])
def test_libraries_filter_right_and_are_timed_from_a_cuda_graph(gpu, name, module, text):
    pytest.importorskip(module)
    problem = Problem(parse(text))
    baseline = LIBRARIES[name](problem.workload, problem.inputs, device=gpu, seconds=0.01)
    assert problem.check(baseline.output).ok
    assert baseline.timing.method.startswith("CUDA graph of")
    assert problem.workload.clamp == ("a kernel of its own" in baseline.text)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn", "cupy", "copy"])
def test_cold_launches_go_through_sets_of_buffers(gpu, name):
    if name != "copy":
        pytest.importorskip({"cudnn": "torch", "cupy": "cupy"}[name])
    w = parse("filter2d:1024x1024x1,3x3")
    timing = LIBRARIES[name](w, w.inputs(0), device=gpu, cold=True, seconds=0.01).timing
    assert timing.cold
    assert "sets of buffers in turn" in timing.method


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", ["", ",bias,relu", ",bias,add,relu"])
@pytest.mark.parametrize("dtype", ["f32", "tf32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_cudnn_convolves_right_in_every_dtype_and_layout_with_epilogues(gpu, dtype, layout, epilogue):
    pytest.importorskip("torch")
    problem = Problem(parse(f"conv2d:4x64x14x14,128x64x3x3,s1,p1,{dtype},{layout}{epilogue}"))
    baseline = LIBRARIES["cudnn"](problem.workload, problem.inputs, device=gpu, seconds=0.01)
    assert problem.check(baseline.output).ok, baseline.text
    assert ("no TF32" in baseline.text) == (dtype != "tf32")


@pytest.mark.gpu
def test_a_copy_has_a_time_and_no_output(gpu):
    w = parse("filter1d:67108864,k5")
    copy = LIBRARIES["copy"](w, w.inputs(0), device=gpu, seconds=0.02)
    assert copy.output is None
    assert copy.timing.median > 0
    assert gpu.peak_bandwidth is None or w.min_bytes / copy.timing.median < gpu.peak_bandwidth


class FakePicks:
    """Stands in for cuDNN's picks of a convolution's calls, by the seconds of each kind, one a pick."""

    def __init__(self, **seconds):
        self.seconds, self.asked, self.closed = {kind: list(own) for kind, own in seconds.items()}, [], []

    def __call__(self, w, call, inputs, gpu, *, cold, seconds):
        kind = "fused" if any("fused" in note for note in call.notes) else "apart"
        self.asked.append(kind)
        if kind not in self.seconds:
            raise DeviceError(f"cannot compute {kind}")
        own = self.seconds[kind]
        taken = own.pop(0) if len(own) > 1 else own[0]
        timing = Timing((taken,), "by hand", cold)
        return SimpleNamespace(call=call, timing=timing, close=lambda: self.closed.append(taken))


@pytest.fixture
def pick(monkeypatch, described):
    def run(**seconds):
        picks = FakePicks(**seconds)
        monkeypatch.setattr(cudnn, "PickOnThread", picks)
        w = parse("conv2d:1x4x6x6,4x4x3x3,f16,nhwc,bias,relu")
        return cudnn.pick_fastest(w, w.inputs(0), described, cold=False, seconds=0.1), picks

    return run


def test_cudnn_is_asked_for_every_call_and_several_times_for_the_fastest(pick):
    fastest, picks = pick(fused=[1.0, 1.1, 0.9, 1.2], apart=[2.0])
    assert picks.asked == [*["apart", "fused"] * 2, *["fused"] * 2]
    assert fastest.timing.median == 0.9
    assert sorted(picks.closed) == [1.0, 1.1, 1.2, 2.0, 2.0]  # only the fastest keeps its tensors


def test_calls_that_cudnn_cannot_run_are_left_out_unless_there_is_none_else(pick):
    fastest, picks = pick(apart=[2.0])
    assert fastest.timing.median == 2.0
    assert picks.asked.count("fused") == 2  # once in each layout
    with pytest.raises(DeviceError, match="cannot compute apart"):
        pick()


def test_a_call_that_takes_long_is_asked_once(pick, monkeypatch):
    monkeypatch.setattr(cudnn, "PICKING_SECONDS", -1.0)
    assert pick(fused=[1.0], apart=[2.0])[1].asked == ["apart", "fused"] * 2
