"""The search of kernels for the layers of a model for inference, all at once, and its results for a provider."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tvmconv.deadline import Deadline
from tvmconv.measure.workers.pool import keep_workers_alive
from tvmconv.torch.kernels import KernelProvider
from tvmconv.torch.layer_task import LayerTask
from tvmconv.torch.product_search import NUM_FIRST_TRIALS, ProductSearch, describe_failure, prestart_search


def find_layer_kernels(
    provider: KernelProvider,
    counts: Mapping[str, int],
    deadline: Deadline | None,
    pytorch_timings: Iterable[None] = (),
    pytorch_seconds: Mapping[str, float] | None = None,
) -> None:
    """Find kernels for each workload: by a search for those that the log does not cover, else as the provider does.

    Args:
        provider: Source of kernels, to which those of the search are added.
        counts: Numbers of layers by workload text.
        deadline: End of the search and of builds; None for no search.
        pytorch_timings: Steps of PyTorch's timings, which need the GPU alone. Kernels are built meanwhile.
        pytorch_seconds: Seconds of PyTorch by workload text, which these steps may add to.
    """
    timings = iter(pytorch_timings)
    with keep_workers_alive():
        searched: set[str] = set()
        if deadline is not None:
            searched = _search(provider, counts, deadline, timings, {} if pytorch_seconds is None else pytorch_seconds)
        for _ in timings:
            pass
        provider.find_kernels({text: count for text, count in counts.items() if text not in searched}, deadline)


def _search(
    provider: KernelProvider,
    counts: Mapping[str, int],
    deadline: Deadline,
    pytorch_timings: Iterator[None],
    pytorch_seconds: Mapping[str, float],
) -> set[str]:
    """Search the workloads that the log does not cover, and add the fastest kernel of each to the provider.

    Returns the texts of these workloads, except those that were not reached and of which logs have records.
    """
    log = provider.open_log()
    texts = provider.list_uncovered([text for text in counts if provider.has_dtypes(text)], NUM_FIRST_TRIALS)
    if not texts or deadline.cut_off.has_passed:
        provider.unsearched_workloads += texts
        return set()
    prestart_search(provider.torch_device)
    tasks = [LayerTask(text, provider.torch_device, counts[text], pytorch_seconds) for text in texts]
    search = ProductSearch(
        *(tasks, provider.device, provider.torch_device, log, provider.read_record_index(deadline)),
        *(deadline, provider.report_progress),
    )
    search.run(pytorch_timings)
    recorded: set[str] = set()
    for product in search.products:
        text = product.workload.text
        for kernel in product.kernels[:1]:
            provider.add_searched_kernel(product.workload, *kernel.config, kernel.program, kernel.seconds)
        if not product.num_trials:
            provider.unsearched_workloads.append(text)
            if product.num_recorded_trials:
                recorded.add(text)
        if not product.kernels:
            for config, program in product.untimed:
                provider.add_searched_kernel(product.workload, *config, program)
            provider.failure_reasons[text] = describe_failure(product)
    provider.forget_record_index()
    return set(texts) - recorded
