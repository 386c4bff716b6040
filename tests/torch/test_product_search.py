"""The search of all products of a step: the order of its trials, what it keeps and logs, and the check of a kernel."""

from collections import Counter, deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tvmconv as tc
from tvmconv.deadline import Deadline
from tvmconv.devices import find_device
from tvmconv.logs.log import Log
from tvmconv.logs.ranking import RecordIndex
from tvmconv.measure.builder import BuilderCallResult, BuilderResult
from tvmconv.measure.results import ErrorKind, RunnerResult
from tvmconv.measure.workers.supervisor import ExitCause, ExitInfo
from tvmconv.search.candidate_lists import list_first_configs, list_neighbors
from tvmconv.space.search_space import Space
from tvmconv.torch import product_search
from tvmconv.torch.functional import conv2d, record_calls
from tvmconv.torch.kernels import AvailableKernel
from tvmconv.torch.product_runner import ProductJob, ProductResult, Reference, measure_product
from tvmconv.torch.product_search import NUM_FIRST_TRIALS, ProductSearch, list_kept_kernels
from tvmconv.torch.product_task import collect_tasks


@pytest.mark.parametrize(
    "text", ["conv2d:8x24x9x9,40x24x3x3,s2,p1,f16,nhwc", "conv2d_wgrad:8x64x7x7,64x1x3x3,s1,p1,g64,f16,nhwc"]
)
def test_listed_configs_are_distinct_and_legal(text):
    w, device = tc.parse(text), find_device("sm_90")
    first = list_first_configs(w, device)
    neighbors = list_neighbors(w, device, *first[0])
    for configs in (first, neighbors):
        assert len({each.key for each in configs}) == len(configs) > 1
        for name, config in configs:
            space: Space = tc.registry.find_schedule(w, name).space(w, device.limits)
            assert space.is_legal(space.point_from_config(config)[None])[0]
    assert all(sum(first[0].config[k] != v for k, v in config.items()) == 1 for _, config in neighbors)


def make_tasks():
    x, weight = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(8, 4, 3, 3, requires_grad=True)
    with record_calls() as calls:
        conv2d(x, weight, None)
    return collect_tasks(calls)


class Builders:
    """Builders that are done at once; a "kernel" is the text of its config."""

    def __init__(self, *_):
        self.done, self.built = [], []

    def submit(self, tag, key, config, workload):
        self.built.append(workload.text)
        self.done.append((tag, BuilderResult(SimpleNamespace(text=f"{workload.operator} {config}", kernels=()))))

    def submit_call(self, tag, call):
        self.done.append((tag, BuilderCallResult(call.function(*call.arguments))))

    def poll(self):
        done, self.done = self.done, []
        return done

    def wait_handles(self):
        return []

    def close(self):
        pass


class Runner:
    """A process to which each wgrad is wrong, and which the tenth kernel ends."""

    is_hopeless, exit_info = False, None

    def __init__(self, *_):
        self.jobs, self.num_answers, self.num_restarts = deque(), 0, 0

    @property
    def num_free_slots(self):
        return 2 - len(self.jobs)

    def submit(self, job):
        self.jobs.append(job)

    def poll(self):
        if not self.jobs:
            return []
        job, self.num_answers = self.jobs.popleft(), self.num_answers + 1
        if self.num_answers == 10:
            self.exit_info = ExitInfo(ExitCause.CRASH, "the device process crashed", 0.1, True)
            return [(job, self.exit_info)]
        if "wgrad" in job.message.kernel.workload_text:
            return [(job, ProductResult(RunnerResult(error=ErrorKind.WRONG_ANSWER, message="wrong")))]
        seconds = 1e-3 / self.num_answers  # without packing, which takes as long
        return [(job, ProductResult(RunnerResult((seconds,), 1e-4), 2 * seconds))]

    def restart(self):
        self.exit_info, self.num_restarts = None, self.num_restarts + 1

    def wait_handles(self):
        return []

    def close(self):
        pass


def test_each_product_gets_its_first_trials_early(opencl, tmp_path, monkeypatch):
    builders, runner, log = Builders(), Runner(), tmp_path / "log.jsonl"
    monkeypatch.setattr(product_search.pool.shared, "prestart", lambda *_: None)
    monkeypatch.setattr(product_search, "BuilderPool", lambda *_: builders)
    monkeypatch.setattr(product_search, "SupervisedWorker", lambda *_: runner)
    monkeypatch.setattr(product_search, "wait", lambda *_: None)
    monkeypatch.setattr(product_search.kernel_cache, "lookup", lambda *_: None)
    monkeypatch.setattr(product_search, "collect_resources", lambda program: {})
    monkeypatch.setattr(product_search, "SearchedProduct", limit_trials(12))
    search = ProductSearch(
        make_tasks(), opencl, torch.device("cpu"), Log(log), RecordIndex([]), Deadline.after(60.0), lambda text: None
    )
    timings = iter([None] * 3)
    search.run(timings)
    assert next(timings, "all done") == "all done"
    assert min(Counter(builders.built[: 5 * NUM_FIRST_TRIALS]).values()) >= NUM_FIRST_TRIALS
    assert runner.num_restarts == 1
    found = {product.workload.operator: list_kept_kernels(product) for product in search.products}
    assert not found["conv2d_wgrad"]
    assert "wrong" in next(each.reason for each in search.products if "wgrad" in each.workload.operator)
    for operator in ("conv2d", "conv2d_dgrad"):
        records = [each for each in Log(log).new_records() if each.workload.operator == operator]
        assert min(each.cost for each in records) == pytest.approx(found[operator][0].seconds / 2)
        assert found[operator][0].seconds == min(each.seconds for each in found[operator])


def limit_trials(most):
    """Products that end after so many trials."""

    class Limited(product_search.SearchedProduct):
        @property
        def can_advance(self):
            return self.num_trials + self.num_in_flight < most and super().can_advance

    return Limited


def test_a_kernel_is_checked_and_timed_beside_pytorch_in_float32(opencl):
    task = next(each for each in make_tasks() if each.product == "forward")
    program = tc.build(task.workload, "direct", device=opencl).executable
    kernel = AvailableKernel(task.workload.text, "direct", "", program, opencl, torch.device("cpu"))
    reference = Reference()
    answer = measure_product(ProductJob(task, kernel), reference)
    assert answer.result.error is ErrorKind.NONE
    assert answer.call_seconds == answer.result.times[0] > 0
    reference.result *= 1.01
    answer = measure_product(ProductJob(replace(task), kernel), reference)
    assert answer.result.error is ErrorKind.WRONG_ANSWER
