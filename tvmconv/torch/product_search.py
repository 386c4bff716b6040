"""The search of kernels for all layers of a model at once, or all products of a training step, within one time limit.

A search of one workload after another leaves processes idle at the end of each, and a step of a ResNet-50 has some 90
products. Here the builder processes always have configs of the products that promise most, and one process checks and
times what they have built. A product is one convolution of a model for inference, or one of the three convolutions that
a layer needs in training.

1. Each product gets its first configs, one at a time: the best ones of logs, predictions, defaults, and those with
   which its schedules start. The products that take most of the model's time come first. This ends for a product with
   `NUM_FIRST_TRIALS` trials, or with a kernel that is faster than PyTorch.
2. The remaining time goes to the products with the largest difference to the roofline's time in the model per trial so
   far. Their next configs are neighbours of their fastest ones.

Times in training include the packing of a weight, which is part of each call there. Measurements are appended to the
log, and those of earlier calls count.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from multiprocessing.connection import wait
from operator import attrgetter

import torch

from tvmconv import registry
from tvmconv.compiler.executable import Executable
from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.errors import Error, HostError
from tvmconv.logs.log import Log
from tvmconv.logs.ranking import DeviceMatch, RecordIndex
from tvmconv.logs.record import Record
from tvmconv.measure import kernel_cache
from tvmconv.measure.builder import (
    BUILD_MEMORY_BYTES,
    BUILD_SECONDS,
    NO_TIME_MESSAGE,
    BuilderCall,
    BuilderCallResult,
    BuilderPool,
    BuilderResult,
    BuilderSetup,
)
from tvmconv.measure.measurer import collect_versions
from tvmconv.measure.pipeline import collect_resources, format_target
from tvmconv.measure.results import ErrorKind, MeasureResult
from tvmconv.measure.runner import EXIT_MESSAGES
from tvmconv.measure.workers import pool
from tvmconv.measure.workers.supervisor import Job, SupervisedWorker, WorkerLimits
from tvmconv.search.candidate_lists import ListedConfig, list_first_configs, list_neighbors
from tvmconv.target import UNKNOWN_TARGET
from tvmconv.torch.kernels import AvailableKernel
from tvmconv.torch.product_runner import ProductJob, ProductResult, ProductRunnerSetup, SearchTask
from tvmconv.workloads import Workload

RUNNER_MODULE = "tvmconv.torch.product_runner"
RUNNER_START_SECONDS = 120.0  # limit of the start of its process
RUN_SECONDS = {"cuda": 5.0, "opencl": 60.0}  # limit of one kernel; PoCL compiles at the first launch
POLL_SECONDS = 0.02
MAX_BUILT_KERNELS = 200  # kernels that wait to be timed
NUM_FIRST_TRIALS = 4  # of each product before others get more
# Fastest configs in logs that come first: of each kind of device, with the epilogue of the workload and without it.
MAX_RECORDED_CONFIGS = 2
NUM_KEPT_KERNELS = 2  # fastest kernels of a product, which are compared with PyTorch, and whose neighbours are tried
CLOSE_RATIO = 1.08  # a kernel is kept if it takes at most this multiple of the fastest one's time
PATIENCE = 24  # trials without a faster kernel after which the search of a product ends
ATTAINABLE_RATIO = 1.05  # multiple of the roofline's time at which it ends as well
UNKNOWN_RATIO = 3.0  # the same for a product without any time, to estimate what it can gain

_logger = logging.getLogger("tvmconv.torch")


@dataclass(frozen=True)
class SearchedKernel:
    """A correct kernel that the search has timed."""

    config: ListedConfig
    program: Executable
    seconds: float  # of a call; in training with the packing of its weight


@dataclass
class SearchedProduct:
    """A product, the configs to try for it, and its fastest kernels."""

    task: SearchTask
    workload: Workload
    bound_seconds: float  # at the device's peak rates
    candidates: deque[ListedConfig] = field(default_factory=deque)
    tried: set[str] = field(default_factory=set)  # keys of all configs that were candidates
    first_config: ListedConfig | None = None  # the most promising one
    kernels: list[SearchedKernel] = field(default_factory=list)  # the fastest first
    expanded: set[str] = field(default_factory=set)  # keys of configs whose neighbours were listed
    num_trials: int = 0  # of this search
    num_recorded_trials: int = 0  # of earlier searches on the device, in logs
    num_since_best: int = 0  # trials since the fastest one
    num_in_flight: int = 0  # configs that are built or timed
    untimed: list[tuple[ListedConfig, Executable]] = field(default_factory=list)  # kernels for which time was too short
    is_listed: bool = False  # whether its first configs were listed
    is_listing: bool = False  # whether a builder process lists configs
    reason: str = ""  # why the last kernel failed

    def add_candidates(self, configs: Sequence[ListedConfig]) -> None:
        """Add the configs that are new."""
        for config in configs:
            self.first_config = self.first_config or config
            if config.key not in self.tried:
                self.tried.add(config.key)
                self.candidates.append(config)

    def add_kernel(self, kernel: SearchedKernel) -> None:
        """Add a timed kernel, and keep the fastest ones."""
        if self.kernels and kernel.seconds >= self.kernels[0].seconds:
            self.num_since_best += 1
        else:
            self.num_since_best = 0
        self.kernels = sorted([*self.kernels, kernel], key=attrgetter("seconds"))[:NUM_KEPT_KERNELS]

    def find_unexpanded(self) -> ListedConfig | None:
        """Return the fastest config whose neighbours were not listed; the first one as long as none has succeeded."""
        configs = [kernel.config for kernel in self.kernels]
        if not configs and not self.num_in_flight and self.first_config is not None:
            configs = [self.first_config]
        return next((config for config in configs if config.key not in self.expanded), None)

    @property
    def can_advance(self) -> bool:
        """Whether there is a config to build, or configs can be listed."""
        best = self.kernels[0].seconds if self.kernels else math.inf
        if self.num_since_best + self.num_in_flight >= PATIENCE or best <= ATTAINABLE_RATIO * self.bound_seconds:
            return False
        if self.candidates:
            return True
        return not self.is_listing and (not self.is_listed or self.find_unexpanded() is not None)

    @property
    def priority(self) -> tuple[int, float]:
        """Sort key; the product with the smallest one is advanced next."""
        num_trials, num_calls = self.num_trials + self.num_in_flight, self.task.num_calls
        if self.kernels:  # before that, a recorded config has to be built again
            num_trials += self.num_recorded_trials
        times = [kernel.seconds for kernel in self.kernels]
        times += [self.task.pytorch_seconds] if self.task.pytorch_seconds is not None else []
        seconds = min(times, default=UNKNOWN_RATIO * self.bound_seconds)
        # Whether a kernel in flight may end the first trials of the product.
        is_waiting = self.num_in_flight > 0 and self.task.pytorch_seconds is not None
        if num_trials < NUM_FIRST_TRIALS and not self.is_faster_than_pytorch and not is_waiting:
            return num_trials, -num_calls * seconds
        return NUM_FIRST_TRIALS, -num_calls * max(seconds - self.bound_seconds, 0.0) / (1 + num_trials)

    @property
    def is_faster_than_pytorch(self) -> bool:
        """Whether a kernel is known to be faster than PyTorch."""
        pytorch_seconds = self.task.pytorch_seconds
        return bool(self.kernels) and pytorch_seconds is not None and self.kernels[0].seconds < pytorch_seconds


@dataclass(frozen=True)
class _Build:
    """A config that is being built."""

    product: SearchedProduct
    config: ListedConfig


class ProductSearch:
    """A search for several products; it has to run in a block of `keep_workers_alive`.

    Args:
        tasks: Products with a workload; of those with the same workload the first one is searched.
        device: Device that kernels are built for.
        torch_device: The same device in PyTorch.
        log: Log to which measurements are appended.
        record_index: Records of logs.
        deadline: End of the search.
        on_progress: Callback that receives a line of text now and then.
        comparison_seconds: Seconds that the search leaves until its end for each product that has a kernel by then, in
            all at most half of its time.
    """

    def __init__(
        self,
        tasks: Sequence[SearchTask],
        device: Device,
        torch_device: torch.device,
        log: Log,
        record_index: RecordIndex,
        deadline: Deadline,
        on_progress: Callable[[str], None],
        comparison_seconds: float = 0.0,
    ) -> None:
        self._device, self._torch_device, self._log = device, torch_device, log
        self._deadline, self._on_progress = deadline, on_progress
        self._comparison_seconds, self._max_reserved_seconds = comparison_seconds, deadline.remaining_seconds / 2
        self.products = _make_products(tasks, device, record_index)
        self._versions = collect_versions(device)
        self._tags = count()
        self._building: dict[int, _Build | SearchedProduct] = {}  # by tag; a product while its configs are listed
        self._built: deque[tuple[_Build, BuilderResult]] = deque()  # to be timed
        self._timing: dict[int, tuple[_Build, BuilderResult]] = {}  # by tag
        self._num_timed = 0

    def run(self, preparation: Iterator[None]) -> None:
        """Search until the deadline, or until no product can advance.

        A search without any kernel by then, on a busy machine, goes on until the deadline's cut-off.

        Args:
            preparation: Steps of work that needs the GPU alone. Kernels are built meanwhile, and timed after it.
        """
        num_workers = pool.resolve_num_workers(None)
        builders = BuilderPool(self._make_builder_setup(), num_workers, BUILD_SECONDS)
        runner: SupervisedWorker | None = None
        try:
            while not self._is_over():
                self._submit_builds(builders, 2 * num_workers)
                if runner is None and next(preparation, self) is self:
                    runner = self._start_runner()
                handles = [*builders.wait_handles(), *(runner.wait_handles() if runner else ())]
                wait(handles, POLL_SECONDS if runner else 0)
                for tag, result in builders.poll():
                    self._finish_build(tag, result)
                if runner and not self._advance_runner(runner):
                    break
                if not (self._building or self._built or self._timing or self._find_next()):
                    break
                seconds, num_products = self._deadline.remaining_seconds, len(self.products)
                self._on_progress(f"{self._num_timed:,} configs of {num_products} workloads, {seconds:.0f} s left")
        finally:
            builders.close()
            if runner:
                runner.close()
        for build, built in self._built:
            assert built.executable is not None
            build.product.untimed.append((build.config, built.executable))
        for _ in preparation:
            pass

    def _is_over(self) -> bool:
        """Return whether the time is up: with time to compare the products that have a kernel, or without any at the
        cut-off of the deadline.
        """
        num_found = sum(bool(product.kernels) for product in self.products)
        if not num_found:
            return self._deadline.cut_off.has_passed
        reserved_seconds = min(num_found * self._comparison_seconds, self._max_reserved_seconds)
        return self._deadline.remaining_seconds <= reserved_seconds

    def _start_runner(self) -> SupervisedWorker:
        limits = WorkerLimits(RUNNER_START_SECONDS, RUN_SECONDS[self._device.kind])
        setup = ProductRunnerSetup(self._torch_device)
        runner = SupervisedWorker(RUNNER_MODULE, lambda: setup, limits, EXIT_MESSAGES, RUNNER_MODULE)
        pool.shared.prestart(RUNNER_MODULE, RUNNER_MODULE, 1, self._torch_device)  # replaces it if a kernel ends it
        return runner

    def _make_builder_setup(self) -> BuilderSetup:
        workloads = [product.workload for product in self.products]
        operators = {workload.operator for workload in workloads}
        # Whether each schedule computes each workload is known to the processes that list configs.
        by_key = {
            f"{schedule.operator} {schedule.name}": schedule
            for schedule in registry.schedules()
            if schedule.operator in operators
        }
        return BuilderSetup(workloads[0], by_key, self._device, BUILD_MEMORY_BYTES)

    def _find_next(self) -> SearchedProduct | None:
        """Return the product to advance next."""
        eligible = (product for product in self.products if product.can_advance)
        return min(eligible, key=lambda product: product.priority, default=None)

    def _submit_builds(self, builders: BuilderPool, max_jobs: int) -> None:
        """Keep the builder processes busy."""
        if len(self._built) > MAX_BUILT_KERNELS:
            return  # the next configs depend on the times of these
        while len(self._building) < max_jobs and (product := self._find_next()):
            if product.candidates:
                self._submit_build(builders, product, product.candidates.popleft())
                continue
            unexpanded = product.find_unexpanded()
            call = BuilderCall(list_first_configs, (product.workload, self._device))
            if product.is_listed and unexpanded is not None:
                product.expanded.add(unexpanded.key)
                call = BuilderCall(list_neighbors, (product.workload, self._device, *unexpanded))
            product.is_listed = product.is_listing = True
            tag = next(self._tags)
            self._building[tag] = product
            builders.submit_call(tag, call)

    def _submit_build(self, builders: BuilderPool, product: SearchedProduct, config: ListedConfig) -> None:
        """Have a config built, or take its kernel from the cache."""
        product.num_in_flight += 1
        build = _Build(product, config)
        program = kernel_cache.lookup(product.workload, *config, self._device)
        if program is not None:
            self._built.append((build, BuilderResult(program)))
            return
        tag = next(self._tags)
        self._building[tag] = build
        builders.submit(tag, _make_key(product.workload, config.schedule), config.config, product.workload)

    def _finish_build(self, tag: int, result: BuilderResult | BuilderCallResult) -> None:
        """Queue a built kernel, or add listed configs."""
        entry = self._building.pop(tag)
        if isinstance(entry, SearchedProduct):
            entry.is_listing = False
            if isinstance(result, BuilderCallResult) and not result.error:
                entry.add_candidates(result.value)
            else:
                entry.reason = entry.reason or (result.error if isinstance(result, BuilderCallResult) else "")
            return
        assert isinstance(result, BuilderResult)
        if result.executable is None:
            self._count_failure(entry.product, result.message)
        else:
            self._built.append((entry, result))

    def _advance_runner(self, runner: SupervisedWorker) -> bool:
        """Collect results, and send kernels to time; return False if the process cannot run on the device."""
        for job, answer in runner.poll():
            build, built = self._timing.pop(job.tag)
            if isinstance(answer, ProductResult):
                self._finish_run(build, built, answer)
            else:  # the kernel has ended the process
                self._count_failure(build.product, answer.reason)
                _logger.warning("%s by %s %s: %s", build.product.workload.text, *build.config, answer.reason)
        if runner.exit_info:
            if runner.is_hopeless:
                self._on_progress(f"no search: {runner.exit_info.reason}")
                return False
            try:
                runner.restart()
            except HostError as error:
                self._on_progress(f"no search: {error}")
                return False
            pool.shared.prestart(RUNNER_MODULE, RUNNER_MODULE, 1, self._torch_device)
        while runner.num_free_slots and self._built:
            build, built = self._built.popleft()
            assert built.executable is not None
            kernel = AvailableKernel(
                *(build.product.workload.text, build.config.schedule, "", built.executable),
                *(self._device, self._torch_device),
            )
            tag = next(self._tags)
            self._timing[tag] = build, built
            runner.submit(Job(tag, ProductJob(build.product.task.strip(), kernel)))
        return True

    def _finish_run(self, build: _Build, built: BuilderResult, answer: ProductResult) -> None:
        """Count a kernel that was checked and timed, and append its record to the log."""
        product, program, result = build.product, built.executable, answer.result
        assert program is not None
        self._num_timed += 1
        if result.error is ErrorKind.NONE:
            product.num_trials, product.num_in_flight = product.num_trials + 1, product.num_in_flight - 1
            product.add_kernel(SearchedKernel(build.config, program, answer.call_seconds))
        else:
            self._count_failure(product, result.message)
        if result.error in (ErrorKind.NONE, ErrorKind.WRONG_ANSWER):
            measurement = MeasureResult(
                product.workload,
                *build.config,
                self._device.name,
                format_target(self._device),
                result,
                built.seconds + result.seconds,
                time.time(),
                collect_resources(program),
                self._versions,
            )
            self._log.append(Record.from_measurement(measurement))

    @staticmethod
    def _count_failure(product: SearchedProduct, reason: str) -> None:
        product.num_trials, product.num_in_flight = product.num_trials + 1, product.num_in_flight - 1
        product.num_since_best += 1
        product.reason = reason


def prestart_search(torch_device: torch.device) -> None:
    """Start the processes of a search before it begins; call it in a block of `keep_workers_alive`."""
    pool.shared.prestart(RUNNER_MODULE, RUNNER_MODULE, 1, torch_device)  # first, as builders wait for TVM's loading
    pool.shared.prestart(pool.BUILDER_MODULE, pool.BUILDER_MODULE, pool.resolve_num_workers(None))


def start_search_early(torch_device: torch.device) -> None:
    """Start the processes of a search and load the schedules, which import TVM, while this thread does other work.

    Call it in a block of `keep_workers_alive`.
    """
    prestart_search(torch_device)
    threading.Thread(target=_load_schedules, daemon=True).start()


def _load_schedules() -> None:
    with contextlib.suppress(Error):  # the search raises it again
        registry.schedules()


def _make_products(tasks: Sequence[SearchTask], device: Device, record_index: RecordIndex) -> list[SearchedProduct]:
    """Return the products to search, whose first candidates are the fastest configs of logs."""
    target = device.target or UNKNOWN_TARGET
    products: dict[str, SearchedProduct] = {}
    for task in tasks:
        workload = task.workload
        if workload is None or workload.text in products:
            continue
        product = SearchedProduct(task, workload, target.roofline_seconds(workload))
        num_configs: Counter[tuple[DeviceMatch, bool]] = Counter()
        for match, record in islice(record_index.iterate_applicable_records(workload, device), PATIENCE):
            has_epilogue = record.workload == workload
            num_configs[match, has_epilogue] += 1
            is_fast = num_configs[match, has_epilogue] <= MAX_RECORDED_CONFIGS
            if is_fast and _can_build(workload, record, device):
                product.add_candidates([ListedConfig(record.schedule, record.config)])
        product.num_recorded_trials = num_configs[DeviceMatch.DEVICE, True]
        products[workload.text] = product
    return list(products.values())


def _can_build(workload: Workload, record: Record, device: Device) -> bool:
    """Return whether the schedule of a record exists and computes the workload on the device."""
    try:
        return registry.find_schedule(workload, record.schedule).can_run_on(device.kind, device.arch)
    except Error:
        return False


def _make_key(workload: Workload, schedule_name: str) -> str:
    """Return the key of a schedule in the setup of builders; schedule names are unique per operator only."""
    return f"{workload.operator} {schedule_name}"


def list_kept_kernels(product: SearchedProduct) -> list[SearchedKernel]:
    """Return the kernels of a product to compare with PyTorch, the fastest first."""
    return [kernel for kernel in product.kernels if kernel.seconds <= CLOSE_RATIO * product.kernels[0].seconds]


def describe_failure(product: SearchedProduct) -> str:
    """Return the reason why a product has no kernel."""
    return product.reason or NO_TIME_MESSAGE
