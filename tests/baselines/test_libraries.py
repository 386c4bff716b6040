"""What every library is asked for and refuses; that they are right, and their times, need an NVIDIA GPU."""

import contextlib
import math
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from scipy import ndimage
from strategies import filters

from tvmconv import baselines
from tvmconv.baselines import cudnn, cupy
from tvmconv.baselines.base import UnsupportedDeviceError
from tvmconv.baselines.torch_calls import TorchConvCall
from tvmconv.devices import Timing
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.devices.cuda.graphs import IDLE_WARM_UP_SECONDS
from tvmconv.errors import DeviceError
from tvmconv.verification import Problem
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


LIBRARIES = baselines.load_baselines()


@pytest.mark.parametrize("name", LIBRARIES)
def test_other_devices_than_gpus_are_refused(opencl, name):
    w = parse("filter1d:99,k3")
    with pytest.raises(UnsupportedDeviceError, match="needs an NVIDIA GPU: expected cuda:N instead of opencl:0"):
        LIBRARIES[name](w, w.inputs(0), device=opencl)


@pytest.fixture
def described():
    """An NVIDIA GPU as data, for what is refused before it is used."""
    return CudaDevice("cuda:0", "a GPU", "sm_90", 1 << 30, 1, 1024, 49152, None, None, None, 0)


def test_without_cupy_the_error_says_what_to_install(described, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    w = parse("filter1d:99,k3")
    with pytest.raises(DeviceError, match="pip install cupy-cuda13x"):
        LIBRARIES["cupy"](w, w.inputs(0), device=described)


@given(filters())
def test_what_cupy_is_asked_for_is_the_filter(w):
    problem = Problem(w, seed=0)
    y = np.full(w.signal_shape, np.nan, "float32")
    cupy.apply_filter(ndimage, w, *problem.inputs, y)
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
    assert problem.workload.clamp == ("a kernel of its own" in baseline.description)


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", ["", ",bias,relu", ",bias,add,relu"])
@pytest.mark.parametrize("dtype", ["f32", "tf32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_cudnn_is_right_in_every_dtype_layout_and_epilogue(gpu, dtype, layout, epilogue):
    pytest.importorskip("torch")
    problem = Problem(parse(f"conv2d:4x64x14x14,128x64x3x3,s1,p1,{dtype},{layout}{epilogue}"))
    baseline = LIBRARIES["cudnn"](problem.workload, problem.inputs, device=gpu, seconds=0.01)
    assert problem.check(baseline.output).ok, baseline.description
    assert ("no TF32" in baseline.description) == (dtype != "tf32")


@pytest.mark.gpu
def test_a_copy_has_a_time_and_no_output(gpu):
    w = parse("filter1d:67108864,k5")
    copy = LIBRARIES["copy"](w, w.inputs(0), device=gpu, seconds=0.02)
    assert copy.output is None
    assert copy.timing.median > 0
    assert gpu.peak_bandwidth is None or w.min_bytes / copy.timing.median < gpu.peak_bandwidth


class FakePicks:
    """Stands in for cuDNN's picks of a convolution's calls, by the seconds of each kind, one a pick.

    Args:
        heuristics: seconds of what cuDNN's heuristics choose; they cannot compute other kinds.
        seconds: of what cuDNN's trials pick. The output of a pick are its seconds.
    """

    def __init__(self, heuristics=None, **seconds):
        self.heuristics = {kind: list(own) for kind, own in (heuristics or {}).items()}
        self.seconds = {kind: list(own) for kind, own in seconds.items()}
        self.asked, self.num_algorithms, self.closed = [], [], []

    def __call__(self, w, call, inputs, gpu, *, cold, num_algorithms, has_gpu=True):
        kind = "fused" if any("fused" in note for note in call.notes) else "apart"
        tries = num_algorithms is not None
        if tries:
            self.asked.append(kind)
            self.num_algorithms.append(num_algorithms)
        own = self.seconds.get(kind) if tries else self.heuristics.get(kind)
        if own is None:
            raise DeviceError(f"cannot compute {kind}")
        taken = own.pop(0) if len(own) > 1 else own[0]
        pick = SimpleNamespace(call=call, seconds=taken if has_gpu else math.inf, time_launch=lambda: taken)
        pick.compare = lambda best_seconds: setattr(pick, "seconds", taken)
        pick.compute_output, pick.pick = lambda: taken, SimpleNamespace(description=f"an algorithm of {taken} s")
        pick.close = lambda: self.closed.append(taken)
        return pick


@pytest.fixture
def pick(monkeypatch, described):
    pytest.importorskip("torch")  # whose calls are picked among

    def run(text="conv2d:1x4x6x6,4x4x3x3,f16,nhwc,bias,relu", is_right=None, **seconds):
        picks = FakePicks(**seconds)
        monkeypatch.setattr(cudnn, "CudnnPickThread", picks)
        w = parse(text)
        return cudnn.pick_fastest(w, [], described, cold=False, is_right=is_right), picks

    return run


def test_cudnn_picks_for_every_call_and_again_for_the_fastest(pick):
    fastest, picks = pick(fused=[1.0, 1.1, 0.9, 1.0], apart=[2.0])
    again = ["fused"] * 2 * (1 + cudnn.MAX_UNIMPROVED_ROUNDS)  # in both layouts, and the first round finds 0.9
    assert picks.asked == [*["apart", "fused"] * 2, *again]
    assert fastest.seconds == 0.9
    assert picks.closed.count(0.9) == 0  # only the fastest keeps its tensors
    assert len(picks.closed) == len(picks.asked) - 1


@pytest.mark.parametrize("slow_picks", range(8))
def test_a_fast_algorithm_that_is_seldom_picked_is_found(pick, slow_picks):
    fastest, _ = pick("conv2d:1x4x6x6,4x4x3x3", apart=[*[36.7e-6] * slow_picks, 29.3e-6, 36.7e-6])
    assert fastest.seconds == 29.3e-6


@pytest.mark.parametrize("wrong_picks", range(1, 6))
def test_the_fastest_algorithm_whose_result_is_right_is_taken(pick, wrong_picks):
    checked = []
    seconds = [*[1.0] * wrong_picks, 3.0, 1.0, 2.0, 2.5, 1.0]  # those of 1.0 are wrong
    fastest, picks = pick("conv2d:1x4x6x6,4x4x3x3", lambda y: checked.append(y) or y > 1.0, apart=seconds)
    assert fastest.seconds == 2.0
    assert 2.5 not in checked  # a pick that is slower than a right one
    assert len(picks.closed) == len(picks.asked) - 1
    assert 2.0 not in picks.closed


def test_an_error_names_a_wrong_algorithm_if_no_result_is_right(pick):
    with pytest.raises(DeviceError, match=r"wrong results of an algorithm of 2.0 s"):
        pick("conv2d:1x4x6x6,4x4x3x3", lambda y: False, apart=[1.0, 2.0])


def test_cudnn_tries_another_number_of_algorithms_in_each_round(pick):
    _, picks = pick("conv2d:1x4x6x6,4x4x3x3", apart=[1.0])
    first, rounds = picks.num_algorithms[:2], picks.num_algorithms[2::2]  # each in both layouts
    assert first == [4, 4]
    assert {*rounds} == {*cudnn.NUM_ALGORITHMS}
    assert rounds[:3] == [8, 2, 3]


def test_a_call_that_is_far_slower_by_heuristics_is_not_tried_again(pick):
    _, picks = pick(fused=[9.0], apart=[1.0], heuristics={"fused": [3.1], "apart": [1.0]})
    assert set(picks.asked) == {"apart"}
    _, picks = pick(fused=[9.0], apart=[1.0], heuristics={"fused": [2.9], "apart": [1.0]})
    assert picks.asked.count("fused") == 2  # once in each layout


def test_picks_before_a_turn_are_timed_in_it_and_tried_again(monkeypatch, described):
    pytest.importorskip("torch")
    w = parse("conv2d:1x4x6x6,4x4x3x3,f16,nhwc,bias,relu")
    heuristics = {"fused": [9.0], "apart": [1.0]}  # so that the former is not tried
    seconds = [*[3.0] * (2 * cudnn.NUM_PREPARED - 1), 0.8, 3.0, 0.7, 0.9]  # the first ones in both layouts
    picks = FakePicks(heuristics=heuristics, fused=[9.0], apart=seconds)
    monkeypatch.setattr(cudnn, "CudnnPickThread", picks)
    prepared = cudnn.prepare_picks(w, [], described, cold=False)
    assert set(picks.asked) == {"apart"}
    assert sorted({count or -1 for _, count in prepared}) == sorted([-1, *cudnn.NUM_ALGORITHMS[: cudnn.NUM_PREPARED]])
    assert {pick.seconds for pick in prepared.values()} == {math.inf}
    picks.num_algorithms.clear()
    fastest = cudnn.pick_fastest(w, [], described, cold=False, picking_seconds=0.0, prepared=prepared)
    assert fastest.seconds == 0.8
    assert picks.num_algorithms == []  # there was no time
    picks = FakePicks(heuristics=heuristics, fused=[9.0], apart=seconds)
    monkeypatch.setattr(cudnn, "CudnnPickThread", picks)
    prepared = cudnn.prepare_picks(w, [], described, cold=False)
    picks.num_algorithms.clear()
    assert cudnn.pick_fastest(w, [], described, cold=False, prepared=prepared).seconds == 0.7
    assert picks.num_algorithms[:3] == [*cudnn.NUM_ALGORITHMS[:3]]  # those of the first picks, which were disturbed


def test_a_turn_at_the_gpu_begins_after_the_first_picks(steps, described, monkeypatch, tmp_path):
    held = []
    fastest = SimpleNamespace(seconds=1e-6, pick=SimpleNamespace(description="a pick"), compute_output=lambda: None)
    fastest.time_elsewhere = fastest.open_timer = fastest.close = None
    other = SimpleNamespace(close=lambda: held.append("closed"))

    @contextlib.contextmanager
    def hold_gpu():
        held.append("begin")
        yield
        held.append("end")

    def prepare_picks(*_, **how):
        held.append("prepare")
        return {(0, None): fastest, (1, None): other}

    steps.torch.cuda.current_stream = lambda index: SimpleNamespace(cuda_stream=7)
    steps.torch.cuda.empty_cache = lambda: None
    monkeypatch.setenv(cudnn.sharing.LOCK_VARIABLE, str(tmp_path / "lock"))
    monkeypatch.setattr(cudnn.sharing, "hold_gpu", hold_gpu)
    monkeypatch.setattr(cudnn, "require_gpu", lambda device, *_: device)
    monkeypatch.setattr(cudnn, "copy_to_gpu", lambda inputs, gpu: [])
    monkeypatch.setattr(cudnn, "prepare_picks", prepare_picks)
    monkeypatch.setattr(cudnn, "pick_fastest", lambda *_, prepared, **how: held.append("pick") or prepared[0, None])
    cudnn.time_cudnn(CONVOLUTION, CONVOLUTION.inputs(0), device=described, seconds=0)
    assert held == ["prepare", "begin", "pick", "end", "closed"]


def test_picking_ends_after_the_time_that_a_command_gives(steps, described, monkeypatch):
    """The whole path, with PyTorch's calls and the timing replaced."""
    steps.torch.cuda.current_stream = lambda index: SimpleNamespace(cuda_stream=7)
    steps.torch.cuda.empty_cache = steps.torch.cuda.synchronize = lambda *index: None
    monkeypatch.setattr(cudnn, "require_gpu", lambda device, *_: device)
    monkeypatch.setattr(cudnn, "list_gradient_calls", lambda w: [steps.call])
    monkeypatch.setattr(cudnn, "copy_to_gpu", lambda inputs, gpu: [])
    monkeypatch.setattr(cudnn.CudnnPick, "time_briefly", lambda self, _: time.sleep(0.01) or 2e-6)
    w = parse("conv2d_wgrad:2x4x6x6,4x4x3x3,p1")
    num_computed = {}
    for seconds in (1e-9, 10.0):
        steps.done.clear()
        timed = cudnn.time_cudnn(w, w.inputs(0), device=described, seconds=0.0, picking_seconds=seconds)
        num_computed[seconds] = sum(name == "compute" for name, *_ in steps.done)
        assert timed.timing.seconds == (2e-6,)
        assert "algorithm by heuristics" in timed.description
        timed.close()
    picks = 2 + cudnn.MAX_UNIMPROVED_ROUNDS  # two before the time begins
    assert num_computed == {1e-9: 3 * 2 + 1, 10.0: 3 * picks + 1}  # the last one computes the output


def test_calls_that_cudnn_cannot_run_are_left_out_if_others_can(pick):
    fastest, picks = pick(apart=[2.0])
    assert fastest.seconds == 2.0
    assert picks.asked.count("fused") == 2  # once in each layout
    with pytest.raises(DeviceError, match="cannot compute apart"):
        pick()


class FakeTensor:
    """A tensor of whatever is asked for, whose values are zero."""

    def to(self, device):
        return self

    float = cpu = lambda self: self

    def add_(self, value):
        return self

    def numpy(self):
        return np.zeros(1)


@pytest.fixture
def steps(monkeypatch):
    """What is done on a GPU while cuDNN picks, with the flag that lets it try its algorithms, in PyTorch's place."""
    done = []
    torch = SimpleNamespace(
        __version__="0",
        zeros=lambda count, device: FakeTensor(),
        no_grad=contextlib.nullcontext,
        cuda=SimpleNamespace(
            Stream=lambda index: SimpleNamespace(cuda_stream=7),
            device=contextlib.nullcontext,
            stream=contextlib.nullcontext,
        ),
        backends=SimpleNamespace(
            cudnn=SimpleNamespace(benchmark=None, benchmark_limit=10, allow_tf32=True, version=lambda: 91900),
            cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True)),
        ),
    )

    def compute(*tensors):
        done.append(("compute", torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit))
        return FakeTensor()

    monkeypatch.setattr(cudnn, "torch_with_cudnn", lambda: torch)
    monkeypatch.setattr(cudnn.CudnnPick, "_busy_until", {})
    monkeypatch.setattr(cudnn, "to_tensor", lambda array: FakeTensor())
    monkeypatch.setattr(cudnn, "translate_library_errors", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(cudnn, "warm_up", lambda replay, stream, seconds: done.append(("warm up", stream)))
    return SimpleNamespace(done=done, call=TorchConvCall(compute), torch=torch)


@pytest.mark.parametrize("number", [0, 6, None])
def test_the_gpu_is_warm_before_cudnn_tries_its_algorithms(steps, described, number):
    picked = cudnn.CudnnPick(
        CONVOLUTION, steps.call, CONVOLUTION.inputs(0), described, cold=False, num_algorithms=number
    )
    tries = number is not None
    assert steps.done == [("warm up", 7)] + [("compute", tries, number or 0)] * 3
    assert steps.torch.backends.cudnn.benchmark_limit == 10  # as before
    assert ("best algorithm" if tries else "algorithm by heuristics") in picked.description


@pytest.mark.parametrize(("seconds_ago", "warm_up_seconds"), [(0.0, None), (5.0, IDLE_WARM_UP_SECONDS)])
def test_a_gpu_that_another_process_has_just_used_is_warm(steps, described, monkeypatch, seconds_ago, warm_up_seconds):
    warm_ups = []
    fastest = SimpleNamespace(
        seconds=1e-6,
        pick=SimpleNamespace(description="a pick"),
        compute_output=lambda: None,
        **dict.fromkeys(["time_elsewhere", "open_timer", "close"]),
    )
    steps.torch.cuda.current_stream = lambda index: SimpleNamespace(cuda_stream=7)
    steps.torch.cuda.empty_cache = lambda: None
    monkeypatch.setattr(cudnn, "require_gpu", lambda device, *_: device)
    monkeypatch.setattr(cudnn, "copy_to_gpu", lambda inputs, gpu: [])
    monkeypatch.setattr(cudnn, "pick_fastest", lambda *_, **how: fastest)
    monkeypatch.setattr(cudnn, "warm_up", lambda replay, stream, seconds: warm_ups.append(seconds))
    monkeypatch.setattr(cudnn.sharing, "get_last_use", lambda: time.monotonic() - seconds_ago)
    timed = cudnn.time_cudnn(CONVOLUTION, CONVOLUTION.inputs(0), device=described, seconds=0)
    assert warm_ups == [warm_up_seconds]
    assert timed.timing.seconds == (1e-6,)


def test_a_pick_is_timed_briefly_and_leaves_the_gpu_warm_for_the_next_one(steps, described, monkeypatch):
    monkeypatch.setattr(cudnn, "capture_until_long_enough", lambda capture, stream, launch_multiple: ("replay", 4))
    monkeypatch.setattr(cudnn, "time_between_events", lambda stream, replay, count: [1e-3] + [2e-3] * (count - 1))

    def pick():
        return cudnn.CudnnPick(CONVOLUTION, steps.call, CONVOLUTION.inputs(0), described, cold=False)

    assert pick().time_briefly() == pick().time_briefly(1.1e-3 / 4 / cudnn.SLOW_RATIO) == 2e-3 / 4
    assert pick().time_briefly(0.9e-3 / 4 / cudnn.SLOW_RATIO) == 1e-3 / 4  # of the first replay, as it is far slower
    steps.done.clear()
    pick()
    assert ("warm up", 7) not in steps.done


def test_a_pick_is_timed_in_turns_in_its_own_thread(steps, described, monkeypatch):
    threads = []

    class FakeTimer:
        def __init__(self, capture, stream, sets):
            threads.append(threading.get_ident())

        def take_turn(self, seconds, *, counts):
            threads.append((threading.get_ident(), seconds, counts))

        def finish(self):
            return Timing((1.0,), "in turns", False)

    monkeypatch.setattr(cudnn, "GraphTimer", FakeTimer)
    monkeypatch.setattr(cudnn.CudnnPick, "time_briefly", lambda self, _: 1.0)
    picked = cudnn.CudnnPickThread(CONVOLUTION, steps.call, CONVOLUTION.inputs(0), described, cold=True)
    with picked.open_timer() as timer:
        timer.take_turn(0.01, counts=False)
        timer.take_turn(0.02)
        assert timer.finish().method == "in turns"
    thread, *turns = threads
    assert turns == [(thread, 0.01, False), (thread, 0.02, True)]
    assert thread != threading.get_ident()
    picked.close()
