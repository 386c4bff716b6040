"""The selection of kernels for the products of recorded convolutions, which fills the kernel table.

Each product is timed with PyTorch and with the kernels that logs, a search or predictions provide. The products that
take most of PyTorch's time are searched and compared first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from tvmconv.arithmetic import ceil_div
from tvmconv.deadline import Deadline
from tvmconv.errors import Error, get_first_line
from tvmconv.measure.workers.pool import keep_workers_alive, resolve_num_workers
from tvmconv.target import UNKNOWN_TARGET
from tvmconv.torch.batch_norm_operators import batch_norm_stats
from tvmconv.torch.conv_call import FORWARD, FORWARD_BIAS, FORWARD_STATS, STATS_IN_GRAPHS, make_workload
from tvmconv.torch.conv_operators import run_forward, run_forward_with_stats, run_with_stats
from tvmconv.torch.kernel_table import TableEntry, table
from tvmconv.torch.kernels import BUILD_SECONDS, AvailableKernel, KernelProvider
from tvmconv.torch.normalization import NormalizationExample
from tvmconv.torch.product_search import ProductSearch, describe_failure, list_kept_kernels, prestart_search
from tvmconv.torch.product_task import Operands, ProductTask, check_kernel, make_entry
from tvmconv.torch.report import PYTORCH_NAME
from tvmconv.torch.selection import NO_TIME_REASON, ChooseMode, reserve_comparison
from tvmconv.torch.timing import CallTimingCache
from tvmconv.torch.training_report import ProductReport

PYTORCH_TIMING_FRACTION = 0.2  # of the time until the deadline, for PyTorch's times, which order the searches
# Approximate times of the check of a product, and of one with statistics, whose kernel is not searched but timed.
COMPARE_SECONDS = {"cuda": 0.1, "cpu": 1.0}
COMPARE_STATS_SECONDS = {"cuda": 0.25, "cpu": 1.0}
MAX_STATS_FRACTION = 0.15  # of a time limit, to build and compare kernels with statistics; else there are none
CLOSE_RATIO = 0.1  # relative difference of two times below which both are measured again, one after the other


class ProductSelector:
    """A selector of the kernels of products, which are installed in the kernel table.

    The mode "fastest" selects kernels that are faster than PyTorch, "tuned" selects every correct kernel.
    """

    def __init__(
        self, provider: KernelProvider, choose: ChooseMode, deadline: Deadline | None, timing_cache: CallTimingCache
    ) -> None:
        self._provider, self._choose_mode, self._deadline = provider, choose, deadline
        self._timing_cache = timing_cache
        self.num_omitted = 0  # products for which no time was left

    def select(self, tasks: Sequence[ProductTask]) -> None:
        """Select what computes each product, and install the selected kernels."""
        supported = self._omit_stats([task for task in tasks if task.workload is not None])
        derived = [task.workload.text for task in supported if task.workload and task.product == FORWARD_STATS]
        timings = self._iterate_pytorch_timings([task for task in supported if task.product != FORWARD_STATS])
        try:
            with keep_workers_alive():
                stats_seconds = len(derived) * COMPARE_STATS_SECONDS[self._provider.torch_device.type]
                deadline, num_found = self._deadline and reserve_comparison(stats_seconds, self._deadline), 0
                if deadline is not None and supported:
                    num_waves = ceil_div(len(derived), resolve_num_workers(None))
                    search_deadline = deadline.reserve_seconds(
                        min(num_waves * BUILD_SECONDS, deadline.remaining_seconds / 2)
                    )
                    num_found = self._search(supported, search_deadline, timings)
                    deadline = reserve_comparison(num_found * self._comparison_seconds, deadline)
                for _ in timings:
                    pass
                siblings = self._find_siblings(supported)
                if siblings:
                    self._provider.adopt_configs(siblings, deadline)
                weights = self._compute_weights(supported)
                if num_found:  # what the search has not reached would not be built in time, either
                    known = {*derived, *siblings, *(text for text in weights if self._is_measured(text))}
                    weights = {text: weight for text, weight in weights.items() if text in known}
                self._provider.find_kernels(weights, deadline, derived)
            self._timing_cache.is_awake = False
            # Products with statistics are compared with forward passes, which are selected before them.
            for task in sorted(
                supported,
                key=lambda task: (task.product == FORWARD_STATS, -(task.pytorch_seconds or 0.0) * len(task.paths)),
            ):
                self._select_kernel(task)
            if self._deadline:  # a time limit holds for graphs that are compiled afterwards, too
                table.compared.update((task.product, task.call) for task in tasks)
        finally:
            self._timing_cache.save()

    def _omit_stats(self, tasks: Sequence[ProductTask]) -> list[ProductTask]:
        """Return the tasks without those with statistics if a time limit is too short for them."""
        stats = [task for task in tasks if task.product == FORWARD_STATS]
        seconds = ceil_div(len(stats), resolve_num_workers(None)) * BUILD_SECONDS
        seconds += len(stats) * COMPARE_STATS_SECONDS[self._provider.torch_device.type]
        if self._deadline is None or seconds <= MAX_STATS_FRACTION * self._deadline.remaining_seconds:
            return list(tasks)
        self.num_omitted += len(stats)
        for task in stats:
            task.reason = NO_TIME_REASON
        return [task for task in tasks if task.product != FORWARD_STATS]

    def _find_siblings(self, tasks: Sequence[ProductTask]) -> dict[str, str]:
        """Return forward passes that were measured with a bias only, with the texts of those.

        In a graph, another operator may add the bias.
        """
        siblings = {}
        for task in tasks:
            if task.product != FORWARD or task.workload is None or task.workload.text in self._provider.available:
                continue
            sibling = make_workload(FORWARD_BIAS, task.call).text
            is_measured = self._provider.is_measured
            if is_measured(sibling, self._deadline) and not is_measured(task.workload.text, self._deadline):
                siblings[task.workload.text] = sibling
        return siblings

    def _is_measured(self, text: str) -> bool:
        return self._provider.is_measured(text, self._deadline)

    @property
    def _comparison_seconds(self) -> float:
        """Approximate seconds of the check of a product."""
        return COMPARE_SECONDS[self._provider.torch_device.type]

    def _search(self, tasks: Sequence[ProductTask], deadline: Deadline, timings: Iterator[None]) -> int:
        """Search kernels, and give them to the provider; PyTorch is timed while the first ones are built.

        Returns the number of products that have kernels.
        """
        provider = self._provider
        log = provider.open_log()
        prestart_search(provider.torch_device)
        search = ProductSearch(
            [task for task in tasks if task.product != FORWARD_STATS],
            *(provider.device, provider.torch_device, log, provider.read_record_index(self._deadline)),
            *(deadline, provider.report_progress, self._comparison_seconds),
        )
        search.run(timings)
        for product in search.products:
            kernels = list_kept_kernels(product)
            for kernel in kernels:
                provider.add_searched_kernel(product.workload, *kernel.config, kernel.program, kernel.seconds)
            if not (product.num_trials or product.num_recorded_trials):
                provider.unsearched_workloads.append(product.workload.text)
            if not kernels:
                provider.failure_reasons[product.workload.text] = describe_failure(product)
        provider.forget_record_index()
        return sum(bool(product.kernels) for product in search.products)

    def _iterate_pytorch_timings(self, tasks: Sequence[ProductTask]) -> Iterator[None]:
        """Time a product with PyTorch in each step, the most expensive ones first; a part of the time is reserved."""
        deadline = Deadline()
        if self._deadline:
            deadline = self._deadline.reserve_seconds((1 - PYTORCH_TIMING_FRACTION) * self._deadline.remaining_seconds)
        for task in sorted(tasks, key=lambda task: -self._estimate_seconds(task)):
            if deadline.has_passed:
                return
            operands = task.make_operands()
            try:
                task.pytorch_seconds = self._time_pytorch(task, operands)
            except RuntimeError as error:  # for example, no memory
                task.reason = get_first_line(error)
            yield

    def _time_pytorch(self, task: ProductTask, operands: Operands) -> float:
        """Return the seconds of a product by PyTorch."""
        return self._timing_cache.get_seconds(f"PyTorch: {task.name}", lambda: task.run_by_pytorch(operands))

    def _estimate_seconds(self, task: ProductTask) -> float:
        target = self._provider.device.target or UNKNOWN_TARGET
        assert task.workload is not None
        return len(task.paths) * target.roofline_seconds(task.workload)

    def _compute_weights(self, tasks: Sequence[ProductTask]) -> dict[str, float]:
        """Return a weight for each workload, such that the search orders and divides its time by PyTorch's times.

        The search multiplies weights by the workloads' times at the device's peak rates.
        """
        weights: dict[str, float] = {}
        for task in tasks:
            assert task.workload is not None
            weight = float(len(task.paths))
            if task.pytorch_seconds is not None:
                weight *= weight * task.pytorch_seconds / self._estimate_seconds(task)
            weights[task.workload.text] = weights.get(task.workload.text, 0.0) + weight
        return weights

    def _select_kernel(self, task: ProductTask) -> None:
        """Select the fastest correct kernel of a product, and install it if it should run."""
        assert task.workload is not None
        kernels = self._provider.available.get(task.workload.text, [])
        if not kernels:
            task.reason = task.reason or self._provider.failure_reasons.get(task.workload.text, "")
        elif self._deadline and self._deadline.cut_off.has_passed:
            self.num_omitted, task.reason = self.num_omitted + 1, NO_TIME_REASON
        else:
            self._compare_kernels(task, kernels)
        if not task.tvmconv_seconds:  # nothing was compared, so that an earlier selection is still valid
            task.entry = table.find(task.product, task.call)
            return
        table.compared.add((task.product, task.call))
        if task.entry is None:
            table.remove(task.product, task.call)
        else:
            table.install(task.product, task.call, task.entry)

    def _compare_kernels(self, task: ProductTask, kernels: Sequence[AvailableKernel]) -> None:
        """Compare the kernels of a product with PyTorch, and select one."""
        operands = task.make_operands()
        try:
            expected = task.run_by_pytorch(operands)
            task.pytorch_seconds = self._time_pytorch(task, operands)
        except RuntimeError as error:  # for example, no memory
            task.reason = get_first_line(error)
            return
        for number, kernel in enumerate(kernels):
            if self._deadline and (self._deadline.cut_off.has_passed or (number and self._deadline.has_passed)):
                break
            self._try_kernel(task, kernel, operands, expected)
            if task.entry is not None and kernel.seconds is not None:
                break  # the search has compared the kernels with one another
        if task.entry is None or task.tvmconv_seconds is None:
            return
        if task.product == FORWARD_STATS and self._select_for_graphs(task, task.entry, operands):
            self._time_with_normalization(task, task.entry, operands)
        if task.entry is None:
            return
        if self._choose_mode == "fastest" and task.tvmconv_seconds >= task.pytorch_seconds:
            task.entry, task.reason = None, "PyTorch is no slower"

    def _try_kernel(
        self, task: ProductTask, kernel: AvailableKernel, operands: Operands, expected: torch.Tensor
    ) -> None:
        """Check and time a kernel, and keep it if it is the fastest so far."""
        try:
            entry = make_entry(kernel)
            _, problem = check_kernel(task, entry, operands, expected)
        except (Error, RuntimeError) as failure:
            problem = get_first_line(failure)
        if problem:
            task.reason = task.reason or problem
            return
        seconds = self._compare(task, kernel, entry, operands)
        if task.tvmconv_seconds is None or seconds < task.tvmconv_seconds:
            task.tvmconv_seconds, task.entry, task.reason = seconds, entry, ""

    def _select_for_graphs(self, task: ProductTask, entry: TableEntry, operands: Operands) -> bool:
        """Have compiled graphs use a kernel with statistics if these cost less than a pass over the output.

        A compiler fuses the other operations of a normalization, or `batch_norm_operators.py` computes them, so that
        the kernels and this pass are all that differs. Returns whether they do. Otherwise the times are those without
        the normalization.
        """
        call, (x, weight, _) = task.call, operands
        forward_entry = table.find(FORWARD, call)
        name = f"{forward_entry.name if forward_entry else PYTORCH_NAME}, then statistics: {task.name}"
        seconds = self._timing_cache.get_seconds(name, lambda: batch_norm_stats(run_forward(call, x, weight, None)))
        if self._choose_mode == "tuned" or (task.tvmconv_seconds or math.inf) < seconds:
            table.install(STATS_IN_GRAPHS, call, entry)
            return True
        table.remove(STATS_IN_GRAPHS, call)
        task.pytorch_seconds = seconds
        return False

    def _time_with_normalization(self, task: ProductTask, entry: TableEntry, operands: Operands) -> None:
        """Replace a task's seconds by those of the convolution, and both passes of the batch normalization after it.

        The convolution without statistics is computed by the kernel in the table, or by PyTorch.
        """
        call, (x, weight, _) = task.call, operands

        def run_by_pytorch() -> object:
            return normalization.run(run_forward(call, x, weight, None), None)

        def run_with_statistics() -> object:
            return normalization.run(*run_forward_with_stats(call, entry, x, weight))

        forward_entry = table.find(FORWARD, call)
        name, suffix = forward_entry.name if forward_entry else PYTORCH_NAME, f", normalized: {task.name}"
        try:
            normalization = NormalizationExample.for_output(call)
            task.pytorch_seconds = self._timing_cache.get_seconds(name + suffix, run_by_pytorch)
            task.tvmconv_seconds = self._timing_cache.get_seconds(entry.name + suffix, run_with_statistics)
        except RuntimeError as error:  # for example, no memory
            task.entry, task.reason = None, get_first_line(error)

    def _compare(self, task: ProductTask, kernel: AvailableKernel, entry: TableEntry, operands: Operands) -> float:
        """Return the seconds of a kernel; if they are close to PyTorch's, both are measured again, in turns."""
        pytorch_name, name = f"PyTorch: {task.name}", f"{kernel.digest}: {task.name}"
        is_new = not self._timing_cache.has_seconds(name)

        def run_kernel() -> object:
            return run_with_stats(task.product, task.call, entry, *operands)

        if is_new and kernel.seconds is not None:
            self._timing_cache.add(name, kernel.seconds)
        seconds = self._timing_cache.get_seconds(name, run_kernel)
        assert task.pytorch_seconds is not None
        if is_new and abs(seconds / task.pytorch_seconds - 1) < CLOSE_RATIO:
            task.pytorch_seconds = self._timing_cache.measure(pytorch_name, lambda: task.run_by_pytorch(operands))
            seconds = self._timing_cache.measure(name, run_kernel)
        return seconds


def make_reports(tasks: Sequence[ProductTask]) -> tuple[ProductReport, ...]:
    """Return one report for each product of each call."""
    reports = []
    for task in tasks:
        report = ProductReport(
            "",
            task.product,
            task.workload.text if task.workload else "",
            reason=task.reason,
            pytorch_seconds=task.pytorch_seconds,
            tvmconv_seconds=task.tvmconv_seconds,
        )
        if task.entry is not None:
            report = replace(report, implementation=task.entry.schedule, config_source=task.entry.config_source)
        reports += [replace(report, path=path) for path in dict.fromkeys(task.paths)]
    return tuple(reports)


def fill_table(
    tasks: Sequence[ProductTask],
    provider: KernelProvider,
    choose: ChooseMode,
    deadline: Deadline | None,
) -> list[str]:
    """Fill the kernel table for some products, and return sentences about the work for which no time was left."""
    timing_cache = CallTimingCache(["products of convolutions"], provider.torch_device, provider.device.name)
    selector = ProductSelector(provider, choose, deadline, timing_cache)
    selector.select(tasks)
    notes = []
    if num_unsearched := len(provider.unsearched_workloads):
        notes.append(f"No time was left for the search of {num_unsearched} of {len(tasks)} products.")
    if selector.num_omitted:
        notes.append(f"No time was left to compare {selector.num_omitted} products with PyTorch, which computes them.")
    return notes
