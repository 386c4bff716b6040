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

from tvmconv.benchmarks.common import add_device, add_output, find_device, micros, report
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.reports.tables import Table

TITLE = "torch-overhead"
CALLS, ROUNDS = 1000, 15
CASES = {"float16, 3×3": ("float16", 3, False), "float16, 1×1, bias": ("float16", 1, True)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    add_device(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the calls, then print and write the times."""
    device = find_device(args, "calls must not wait for their kernels")
    source = describe_provenance(device, args.command)
    rows, data = [], []
    for name, (dtype, size, bias) in CASES.items():
        taken = _taken(device.text, dtype, size, bias)
        data.append({"case": name, "seconds": taken})
        rows += [(name, how, micros(seconds)) for how, seconds in taken.items()]
    table = Table(("convolution", "call", "host [µs]"), rows, left_aligned=frozenset({"convolution", "call"}))
    legend = f"A call's time on the host: median of {ROUNDS} rounds of {CALLS:,} calls. {source}"
    report(args.out, TITLE, [table], [legend], {"name": TITLE, "provenance": source, "cases": data}, TITLE)
    return 0


def _taken(device: str, dtype: str, size: int, bias: bool) -> dict[str, float]:
    """Return the seconds per call, by the name of the function."""
    import torch
    from torch.nn.functional import conv2d

    import tvmconv.torch
    from tvmconv.torch.layer import TunedConv
    from tvmconv.torch.operator import conv

    torch.backends.cudnn.benchmark = True
    made: Any = torch.nn.Conv2d(16, 16, size, padding=size // 2, bias=bias)
    made = made.to(device, getattr(torch, dtype)).to(memory_format=torch.channels_last).requires_grad_(False)
    x = torch.randn(1, 16, 8, 8, device=device, dtype=made.weight.dtype).to(memory_format=torch.channels_last)
    ours = tvmconv.torch.optimize(made, x, device=device, choose="tuned")
    (layer,) = [each for each in ours.graph.modules() if isinstance(each, TunedConv)]
    (text,) = layer.kernels.values()
    weight, packed = layer.weight0, layer.bias0
    return {
        "F.conv2d": _host_seconds(lambda: conv2d(x, made.weight, made.bias, padding=size // 2)),
        "nn.Conv2d": _host_seconds(lambda: made(x)),
        "torch.ops.tvmconv.conv": _host_seconds(lambda: conv(x, weight, packed, None, text)),
        "the layer that optimize makes": _host_seconds(lambda: layer(x)),
    }


def _host_seconds(call: Callable[[], object]) -> float:
    import torch

    rounds = []
    with torch.inference_mode():
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            started_at = time.perf_counter()
            for _ in range(CALLS):
                call()
            rounds.append((time.perf_counter() - started_at) / CALLS)
    return statistics.median(rounds)
