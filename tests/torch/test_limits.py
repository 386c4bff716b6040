"""A time limit covers the whole of `optimize`; what there was no time for is PyTorch's, and the report says so."""

import itertools
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from instant import Clock, made_up
from small_models import X, differ, runs

import tvmconv as tc
import tvmconv.torch
from tvmconv.deadline import Deadline
from tvmconv.errors import FallbackWarning, TuningError
from tvmconv.logs.candidates import Candidate
from tvmconv.logs.log import Log
from tvmconv.registry import find_schedule
from tvmconv.search.candidate_lists import ListedConfig
from tvmconv.target import H200
from tvmconv.torch import kernels, layer_search, timing
from tvmconv.torch.optimize import optimize_within
from tvmconv.torch.product_search import SearchedKernel
from tvmconv.torch.report import PYTORCH_NAME
from tvmconv.torch.selection import kernels_deadline
from tvmconv.torch.timing import TimingCache

pytestmark = pytest.mark.usefixtures("shared_processes")  # those of searches
USERS_SECONDS = timing.TIMING_SECONDS, timing.MAX_TIMING_SECONDS  # before tests shorten them
LARGE, SMALL = torch.nn.Conv2d(8, 8, 3), torch.nn.Conv2d(4, 8, 1)


@pytest.fixture
def model():
    return torch.nn.Sequential(SMALL, torch.nn.ReLU(), LARGE).eval()


def test_without_time_left_all_is_left_to_pytorch(model, tmp_path):
    deadline = Deadline.after(-60.0)  # its slack, in which a kernel of each layer may be built, is over too
    optimized = optimize_within(deadline, model, X, log=tmp_path / "log.jsonl", choose="tuned")
    assert [line.reason for line in optimized.report().lines] == ["not built: no time left"] * 2
    assert "No time was left for the search of 2 of 2 workloads." in str(optimized.report())
    assert differ(optimized, model) == 0


@pytest.fixture
def clock(monkeypatch):
    """A clock by which each timing takes a thousand seconds more than it does; nothing is searched."""
    clock, seconds, monotonic = SimpleNamespace(added=0.0), TimingCache.get_seconds, time.monotonic

    def timed(self, name, call):
        clock.added += 1000.0
        return seconds(self, name, call)

    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + clock.added)
    monkeypatch.setattr(TimingCache, "get_seconds", timed)
    monkeypatch.setattr(layer_search, "_search", lambda *_: set())
    return clock


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("seconds", "ours", "ends"),
    [
        (12e3, [True, True], 6e3),
        (4.5e3, [False, True], 4e3),
        (3e3, [False, True], 3e3),
        (1.5e3, [False, False], 1e3),
    ],
    ids=["time for all", "time for one layer", "a comparison ends in the slack", "time for none"],
)
def test_the_layers_that_cost_most_are_compared_first(clock, model, tmp_path, seconds, ours, ends):
    """The whole takes a timing before and, if there is time, one after; and each layer two."""
    optimized = optimize_within(Deadline.after(seconds), model, X, log=tmp_path / "log.jsonl", choose="tuned")
    assert list(runs(optimized).values()) == ours
    assert clock.added == ends <= seconds
    left_out = [line.reason for line in optimized.report().lines if line.implementation == PYTORCH_NAME]
    assert [reason.partition(": ")[2] for reason in left_out] == ["no time left"] * ours.count(False)
    assert differ(optimized, model) < 1e-5


@pytest.mark.parametrize(
    ("seconds", "slack", "left", "left_to_cut_off"),  # comparing takes three seconds
    [(20.0, 7.0, 17.0, 24.0), (2.0, 4.0, 1.0, 3.0), (-1.0, 4.0, -1.0, 1.5), (-5.0, 4.0, -5.0, -1.0)],
    ids=["all fits", "half of the time", "in the slack", "after it"],
)
def test_finding_kernels_leaves_time_to_compare_them(monkeypatch, seconds, slack, left, left_to_cut_off):
    monkeypatch.setattr(time, "monotonic", Clock())
    now = time.monotonic()
    finding = kernels_deadline(60, torch.device("cuda"), Deadline(now + seconds, slack))
    assert finding.end_time - now == pytest.approx(left)
    assert finding.cut_off.end_time - now == pytest.approx(left_to_cut_off)


@pytest.mark.parametrize("is_timed", [True, False], ids=["timed", "no time to time it"])
def test_what_a_search_built_is_not_built_again(opencl, tmp_path, monkeypatch, is_timed):
    w = tc.parse("conv2d:2x4x9x11,8x4x1x1")
    found = kernels.KernelProvider(opencl, X.device, tmp_path / "log.jsonl", print)
    program = tc.build(w, "direct", device=opencl).executable
    config = ListedConfig("direct", find_schedule(w, "direct").space(w, opencl.limits).default)

    def search(self, timings):
        (product,) = self.products
        if is_timed:
            product.add_kernel(SearchedKernel(config, program, 1e-3))
        else:
            product.untimed.append((config, program))

    monkeypatch.setattr("tvmconv.torch.layer_search.ProductSearch.run", search)
    monkeypatch.setattr("tvmconv.torch.layer_search.prestart_search", lambda *_: None)
    monkeypatch.setattr("tvmconv.torch.kernels.build_all", lambda choices, *_, **__: [] if not choices else 1 / 0)
    layer_search.find_layer_kernels(found, {w.text: 1}, Deadline.after(100.0))
    (kernel,) = found.available[w.text]
    assert kernel.program == program
    assert kernel.seconds == (1e-3 if is_timed else None)


@pytest.mark.parametrize(("num_records", "is_covered"), [(0, False), (3, False), (4, True)])
def test_a_layer_with_few_records_is_searched_again(opencl, tmp_path, num_records, is_covered):
    w, log = tc.parse("conv2d:2x4x9x11,8x4x1x1"), tmp_path / "log.jsonl"
    for number in range(num_records):
        Log(log).append(made_up(w, "direct", {"number": number}, opencl.name))
    found = kernels.KernelProvider(opencl, X.device, log, print)
    assert found.list_uncovered([w.text], 4) == ([] if is_covered else [w.text])


def test_a_dtype_that_the_device_lacks_is_not_searched(opencl, tmp_path):
    """PoCL has no float16."""
    text = "conv2d:2x4x9x11,8x4x1x1,s1,p0,f16"
    found = kernels.KernelProvider(opencl, X.device, tmp_path / "log.jsonl", print)
    layer_search.find_layer_kernels(found, {text: 1}, Deadline.after(100.0))
    assert found.available == {}
    assert "no float16" in found.failure_reasons[text]


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "5"])
def test_seconds_have_to_be_a_positive_number(model, seconds):
    with pytest.raises(TuningError, match="seconds has to be "):
        tvmconv.torch.optimize(model, X, seconds=seconds)


@pytest.fixture
def long_timings(monkeypatch):
    """Calls are timed as long as for users."""
    monkeypatch.setattr(timing, "TIMING_SECONDS", USERS_SECONDS[0])
    monkeypatch.setattr(timing, "MAX_TIMING_SECONDS", USERS_SECONDS[1])


@pytest.mark.usefixtures("long_timings")
@pytest.mark.parametrize(
    ("seconds", "most"), [(1e-3, timing.NUM_WARM_UP_CALLS + timing.MAX_SAMPLES), (0.3, 7), (10.0, 2)]
)
def test_a_slow_call_is_timed_a_few_times(monkeypatch, seconds, most):
    clock, calls = Clock(), []
    monkeypatch.setattr(timing.time, "perf_counter", clock)

    def call():
        calls.append(clock.now)
        clock.now += seconds

    assert timing.time_wall_clock(call, lambda: None) == pytest.approx(seconds)
    assert len(calls) <= most


def test_an_interrupted_search_keeps_the_times_of_pytorch(model, tmp_path, monkeypatch):
    monkeypatch.setenv("TVMCONV_CACHE", str(tmp_path))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels.KernelProvider, "find_kernels", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tvmconv.torch.optimize(model, X, seconds=1.0, log=tmp_path / "log.jsonl")
    assert len(list(tmp_path.glob("times-*.json"))) == 1


@pytest.mark.slow
def test_finding_compiled_modules_imports_no_compiler():
    code = (
        "import sys, torch; from tvmconv.torch.partition import record_calls\n"
        "with record_calls(torch.nn.Conv2d(1, 1, 1)): print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_a_search_for_a_model_on_the_cpu_warns_first(log):
    model = torch.nn.Conv2d(4, 4, 1).eval()
    with pytest.warns(FallbackWarning, match="on the CPU, where PyTorch is mostly faster"):
        tvmconv.torch.optimize(model, torch.randn(1, 4, 4, 4), seconds=0.1, log=log)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("long_timings")
def test_threads_that_wait_for_a_time_slice_do_not_count(two_threads):
    def call():
        if torch.get_num_threads() > 1:
            time.sleep(0.016)

    assert timing.time_call(call, torch.device("cpu")) < 0.001
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("long_timings")
def test_calls_that_were_disturbed_do_not_count():
    slow = itertools.cycle([True, False, False])
    seconds = timing.time_wall_clock(lambda: time.sleep(0.01 if next(slow) else 0.0005), lambda: None)
    assert seconds < 0.003


@pytest.mark.parametrize(("seconds", "is_measured"), [(40e-6, True), (15e-3, False)])
def test_a_record_of_a_search_that_was_cut_off_does_not_exclude_predictions(seconds, is_measured):
    """The search of 15 ms has found one of the naive kernels before its time was up."""
    w = tc.parse("conv2d:64x64x56x56,256x64x1x1,s1,p0,f16,nhwc")
    record = SimpleNamespace(cost=seconds)
    index = SimpleNamespace(iterate_on_device=lambda *_: iter([record]))
    provider = kernels.KernelProvider(SimpleNamespace(target=H200), torch.device("cpu"), None, print)
    tuned, *predicted = [Candidate(None, {"number": i}, kernels.TUNED if i == 0 else "predicted") for i in range(9)]
    candidates = provider._next_candidates(w, iter([tuned, *predicted]), index)
    assert candidates == ([tuned] if is_measured else [tuned, *predicted[: kernels.MAX_CANDIDATES - 1]])


@pytest.mark.parametrize(("num_threads", "is_taken"), [(4, True), (4096, False)])
def test_a_config_that_makes_no_kernel_with_another_epilogue_is_replaced(log, opencl, num_threads, is_taken):
    sibling, text = "conv2d:1x4x6x6,4x4x3x3,s1,p1,relu", "conv2d:1x4x6x6,4x4x3x3,s1,p1,add,relu"
    config = {"tile_f": [-1, 1, num_threads, 1]}
    Log(log).append(tc.Record(tc.parse(sibling), "implicit_gemm", config, opencl.name, "opencl", times=(1e-6,)))
    provider = kernels.KernelProvider(opencl, torch.device("cpu"), log, lambda text: None)
    provider.adopt_configs({text: sibling}, None)
    assert any(kernel.config_source == kernels.OTHER_EPILOGUE for kernel in provider.available[text]) == is_taken


@pytest.mark.parametrize("num_prepack_kernels", [0, 1])
def test_a_kernel_that_packs_in_each_call_is_compared_with_those_of_other_schedules(monkeypatch, num_prepack_kernels):
    """Measurements leave the packing out, and in training it is part of each call."""
    w, h200 = tc.parse("conv2d:64x64x56x56,64x64x3x3,s1,p1,f16,nhwc"), SimpleNamespace(name="H200", target=H200)
    names = ["winograd_hopper", "hopper", "hopper", "mma_sync", "tensor_core"]
    records = [SimpleNamespace(schedule=name, config={"number": i}, cost=i * 1e-5) for i, name in enumerate(names, 1)]
    index = SimpleNamespace(iterate_on_device=lambda *_: iter(records))
    provider = kernels.make_training_provider(h200, torch.device("cpu"), None, None)

    def lookup(workload, schedule, config, device):
        return SimpleNamespace(num_prepack_kernels=num_prepack_kernels if config["number"] == 1 else 0)

    monkeypatch.setattr(kernels.kernel_cache, "lookup", lookup)
    assert provider._load_cached(w, index)
    provider._build_alternatives([w], index, None)
    schedules = [kernel.schedule for kernel in provider.available[w.text]]
    assert schedules == (["winograd_hopper", "hopper", "mma_sync"] if num_prepack_kernels else ["winograd_hopper"])
