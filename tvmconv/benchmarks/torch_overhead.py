"""Time the host's cost of one call of the PyTorch operator in eager mode, and compare it with `F.conv2d`.

    tvmconv bench torch-overhead --device cuda:0 -o results

The convolutions are so small that the GPU finishes before the next call, so that thousands of calls without
synchronization time only the host. Results are in DIR/torch-overhead.json and .md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from tvmconv.benchmarks.common import add_device, add_output, find_device, report
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.reports.tables import Table, format_micros

TITLE = "torch-overhead"
NUM_CALLS, NUM_ROUNDS = 1000, 15
CASES = {"float16, 3×3": ("float16", 3, False), "float16, 1×1, bias": ("float16", 1, True)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    add_device(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the calls, then print and write the times."""
    device = find_device(args, "calls must not wait for their kernels")
    source = describe_provenance(device, args.command)
    rows, cases = [], []
    for name, case in CASES.items():
        seconds = _time_calls(device.text, *case)
        cases.append({"case": name, "seconds": seconds})
        rows += [(name, function, format_micros(value)) for function, value in seconds.items()]
    table = Table(("convolution", "call", "host [µs]"), rows, left_aligned=frozenset({"convolution", "call"}))
    legend = f"A call's time on the host: median of {NUM_ROUNDS} rounds of {NUM_CALLS:,} calls. {source}"
    report(args, TITLE, [table], [legend], {"name": TITLE, "provenance": source, "cases": cases}, TITLE)
    return 0


def _time_calls(device: str, dtype: str, size: int, bias: bool) -> dict[str, float]:
    """Return the host's seconds per call, by the name of the function."""
    import torch
    from torch.nn.functional import conv2d

    import tvmconv.torch
    from tvmconv.torch.layer import TunedConv
    from tvmconv.torch.operator import conv

    torch.backends.cudnn.benchmark = True
    module: Any = torch.nn.Conv2d(16, 16, size, padding=size // 2, bias=bias)
    module = module.to(device, getattr(torch, dtype)).to(memory_format=torch.channels_last).requires_grad_(False)
    x = torch.randn(1, 16, 8, 8, device=device, dtype=module.weight.dtype).to(memory_format=torch.channels_last)
    optimized = tvmconv.torch.optimize(module, x, device=device, choose="tuned")
    (layer,) = [layer for layer in optimized.graph.modules() if isinstance(layer, TunedConv)]
    (text,) = layer.kernels.values()
    weight, packed_bias = layer.weight0, layer.bias0
    calls: dict[str, Callable[[], object]] = {
        "F.conv2d": lambda: conv2d(x, module.weight, module.bias, padding=size // 2),
        "nn.Conv2d": lambda: module(x),
        "torch.ops.tvmconv.conv": lambda: conv(x, weight, packed_bias, None, text),
        "the layer that optimize makes": lambda: layer(x),
    }
    with torch.inference_mode():
        return {name: _time_on_host(call, torch.cuda.synchronize) for name, call in calls.items()}


def _time_on_host(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    seconds = []
    for _ in range(NUM_ROUNDS):
        synchronize()
        started_at = time.perf_counter()
        for _ in range(NUM_CALLS):
            call()
        seconds.append((time.perf_counter() - started_at) / NUM_CALLS)
    return statistics.median(seconds)
