"""The search of all layers of a model at once: its tasks, and the order of its trials within a short time limit."""

from collections import Counter, deque
from types import SimpleNamespace

import pytest
import torch
from instant import made_up

import tvmconv as tc
import tvmconv.torch
from tvmconv.deadline import Deadline
from tvmconv.logs.log import Log
from tvmconv.logs.ranking import RecordIndex
from tvmconv.measure.builder import BuilderCallResult, BuilderResult
from tvmconv.measure.results import ErrorKind, RunnerResult
from tvmconv.registry import find_schedule
from tvmconv.search.candidate_lists import ListedConfig
from tvmconv.torch import product_search, selection
from tvmconv.torch.kernels import AvailableKernel
from tvmconv.torch.layer_task import LayerTask
from tvmconv.torch.product_runner import ProductJob, ProductResult, Reference, measure_product
from tvmconv.torch.product_search import NUM_FIRST_TRIALS, ProductSearch
from tvmconv.torch.timing import TimingCache

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("conv2d:2x4x9x11,8x4x3x3,s2,p1x0x0x1,bias,add,silu", "direct"),
        ("conv2d:2x4x9x11,8x2x3x3,s1,p1,g2,nhwc,bias,prelu", "direct"),
        ("conv2d:1x32x1x1,8x32x1x1,s1,p0,nhwc,bias,sigmoid", "direct"),
        ("conv1d:1x8x64,16x8x7,s1,p9,d3,bf16,nhwc,bias,leaky_relu0.1,add", "default"),
        ("conv2d_transpose:1x8x5x6,8x4x3x3,s2,p1,op1,bias,relu", "default"),
        ("conv2d:1x8x9x11,8x8x3x3,s1,p1,nchw-nhwc,bias,add,relu", "default"),
        ("conv3d:1x4x5x6x7,8x4x3x3x3,s2,p1,nhwc,bias,leaky_relu", "default"),
        ("conv2d:1x16x6x6,8x16x3x3,s1,p1,i8,nhwc,out-i8,scale,bias,relu,quantize", "default"),
    ],
)
def test_a_kernel_of_a_layer_is_checked_and_timed(opencl, text, schedule):
    task = LayerTask(text, CPU)
    w = tc.parse(text)
    program = tc.build(w, schedule, device=opencl).executable
    kernel = AvailableKernel(w.text, schedule, "", program, opencl, CPU)
    reference = Reference()
    answer = measure_product(ProductJob(task.strip(), kernel), reference)
    assert answer.result.error is ErrorKind.NONE, answer.result.message
    assert answer.call_seconds == answer.result.times[0] > 0
    reference.result = reference.result.float() * 1.2
    answer = measure_product(ProductJob(task, kernel), reference)
    assert answer.result.error is ErrorKind.WRONG_ANSWER


class Host:
    """Four builders that take a second for each kernel, and a runner, by a clock that each wait moves."""

    def __init__(self, kernel_seconds):
        self.kernel_seconds, self.now, self.built, self.timed = kernel_seconds, 0.0, [], []
        self.free_at, self.queue, self.jobs = [0.0] * 4, [], deque()

    def wait(self, *_):
        self.now += 0.1


class Builders:
    def __init__(self, host):
        self.host = host

    def submit_call(self, tag, call):
        name = f"{call.function.__name__} {call.arguments[2:]}"
        configs = [ListedConfig("direct", {"name": f"{name} {number}"}) for number in range(12)]
        self.host.queue.append((self.host.now, tag, BuilderCallResult(configs)))

    def submit(self, tag, key, config, workload):
        host = self.host
        index = host.free_at.index(min(host.free_at))
        host.free_at[index] = max(host.free_at[index], host.now) + 1.0
        host.queue.append((host.free_at[index], tag, BuilderResult(SimpleNamespace(kernels=(), num_prepack_kernels=0))))

    def poll(self):
        done = [(tag, result) for ready_at, tag, result in self.host.queue if ready_at <= self.host.now]
        self.host.queue = [each for each in self.host.queue if each[0] > self.host.now]
        return done

    def wait_handles(self):
        return []

    def close(self):
        pass


class Runner(Builders):
    is_hopeless, exit_info = False, None
    num_free_slots = property(lambda self: 2 - len(self.host.jobs))

    def submit(self, job):
        self.host.jobs.append(job)

    def poll(self):
        jobs, self.host.jobs = self.host.jobs, deque()
        self.host.timed += [job.message.kernel.workload_text for job in jobs]
        seconds = [self.host.kernel_seconds[job.message.kernel.workload_text] for job in jobs]
        return [
            (job, ProductResult(RunnerResult((each,), 1e-4), each)) for job, each in zip(jobs, seconds, strict=True)
        ]


TEXTS = [f"conv2d:1x64x{size}x{size},64x64x1x1,s1,p0" for size in range(8, 28)]


def search_layers(monkeypatch, opencl, tmp_path, limit, kernel_seconds, pytorch_seconds, records=None):
    """Search twenty layers for so many seconds, and return the texts of the timed kernels in turn."""
    host = Host(dict.fromkeys(TEXTS, 1e-3) | kernel_seconds)
    monkeypatch.setattr("tvmconv.deadline.time", SimpleNamespace(monotonic=lambda: host.now))
    monkeypatch.setattr(product_search.pool.shared, "prestart", lambda *_: None)
    monkeypatch.setattr(product_search.pool, "resolve_num_workers", lambda _: 4)
    monkeypatch.setattr(product_search, "BuilderPool", lambda *_: Builders(host))
    monkeypatch.setattr(product_search, "SupervisedWorker", lambda *_: Runner(host))
    monkeypatch.setattr(product_search, "wait", host.wait)
    monkeypatch.setattr(product_search.kernel_cache, "lookup", lambda *_: None)
    monkeypatch.setattr(product_search, "collect_resources", lambda program: {})
    tasks = [LayerTask(text, CPU, 1, pytorch_seconds) for text in TEXTS]
    log = Log(tmp_path / "log.jsonl")
    search = ProductSearch(
        tasks, opencl, CPU, log, records or RecordIndex([]), Deadline.after(limit), lambda text: None
    )
    search.run(iter(()))
    assert limit <= host.now < limit + 1
    return host.timed


def test_each_layer_gets_a_kernel_before_any_gets_a_second_one(monkeypatch, opencl, tmp_path):
    timed = search_layers(monkeypatch, opencl, tmp_path, 5.5, {}, {})
    assert sorted(timed) == sorted(TEXTS)
    assert timed[:4] == TEXTS[:-5:-1]  # those with the largest estimates


def test_after_a_faster_kernel_trials_go_to_layers_that_can_gain(monkeypatch, opencl, tmp_path):
    """One layer is slower than PyTorch, and another one can gain more than all others together."""
    slow, large = TEXTS[3], TEXTS[7]
    pytorch_seconds = dict.fromkeys(TEXTS, 2e-3) | {slow: 0.5e-3, large: 200e-3}
    timed = search_layers(monkeypatch, opencl, tmp_path, 8.5, {large: 100e-3}, pytorch_seconds)
    counts = Counter(timed)
    assert set(counts) == set(TEXTS)
    assert 1 < counts[slow] <= NUM_FIRST_TRIALS  # each waits for the time of the one before it
    assert counts[large] == len(timed) - 18 - counts[slow]


@pytest.mark.parametrize(
    ("searched_seconds", "names", "runs"),
    [(1e-3, [], True), (9e-3, [], False), (4.1e-3, ["PyTorch", "kernel"], True)],
    ids=["faster", "slower", "close"],
)
def test_a_kernel_that_was_timed_by_the_search_is_timed_again_only_if_close_to_pytorch(
    monkeypatch, opencl, searched_seconds, names, runs
):
    """PyTorch takes 4 ms by the first timing; a second one of both finds that the kernel is faster."""
    timed = []

    def measure(self, name, call):
        timed.append("PyTorch" if name.startswith("PyTorch") else "whole" if "the whole" in name else "kernel")
        self.add(name, {"PyTorch": 4.2e-3, "kernel": 3e-3}.get(timed[-1], 1.0 / len(timed)))
        return self.get_seconds(name, call)

    def find(provider, counts, deadline, pytorch_timings, pytorch_seconds):
        (text,) = counts
        program = tc.build(tc.parse(text), "direct", device=opencl).executable
        config = find_schedule(tc.parse(text), "direct").space(tc.parse(text), opencl.limits).default
        provider.add_searched_kernel(tc.parse(text), "direct", config, program, searched_seconds)

    def time_pytorch(self, site, arguments, *, again=False):
        return measure(self._timing_cache, "PyTorch", None) if again else 4e-3

    monkeypatch.setattr(TimingCache, "measure", measure)
    monkeypatch.setattr(selection, "_converts", lambda *_: False)
    monkeypatch.setattr(selection.KernelSelector, "_time_pytorch", time_pytorch)
    monkeypatch.setattr("tvmconv.torch.inference.find_layer_kernels", find)
    model = tvmconv.torch.optimize(torch.nn.Conv2d(4, 8, 3).eval(), torch.randn(1, 4, 9, 9))
    (line,) = model.report().lines
    assert [name for name in timed if name != "whole"] == names
    assert (line.implementation == "direct") == runs
    assert line.tvmconv_seconds == (3e-3 if names else searched_seconds)


def test_configs_of_logs_come_first_also_those_of_the_layer_without_its_epilogue(opencl, tmp_path):
    text, log = "conv2d:2x4x9x11,8x4x1x1,s1,p0", tmp_path / "log.jsonl"
    for number, recorded in enumerate([text, text + ",bias,relu", text + ",bias,relu", text, text, text]):
        Log(log).append(made_up(tc.parse(recorded), "direct", {"number": number}, opencl.name))
    task = LayerTask(text + ",bias,relu", CPU)
    search = ProductSearch([task], opencl, CPU, Log(log), RecordIndex([log]), Deadline(), print)
    (product,) = search.products
    assert product.num_recorded_trials == 2
    assert {each.config["number"] for each in [*product.candidates][:2]} == {1, 2}
    assert len(product.candidates) == 4


def test_a_layer_with_many_records_gets_a_kernel_before_others_get_a_second_one(monkeypatch, opencl, tmp_path):
    log = tmp_path / "log.jsonl"
    for number in range(9):
        Log(log).append(made_up(tc.parse(TEXTS[0]), "direct", {"number": number}, opencl.name))
    timed = search_layers(monkeypatch, opencl, tmp_path, 5.5, {}, dict.fromkeys(TEXTS, 2e-3), RecordIndex([log]))
    assert set(timed[:20]) == set(TEXTS)
