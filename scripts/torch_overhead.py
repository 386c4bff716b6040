"""What a call of the operator costs the host in eager PyTorch, beside `F.conv2d`.

    python scripts/torch_overhead.py --device cuda:0 -o results

The convolutions are so small that the GPU is done before the next call: what is timed is the host, over thousands of
calls that nobody waits for. Writes DIR/torch-overhead.json and .md.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvmconv import devices
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.experiments.provenance import provenance
from tvmconv.reports.tables import Table, significant

TITLE = "torch-overhead"
CALLS, ROUNDS = 1000, 15
CASES = {"float16, 3×3": ("float16", 3, False), "float16, 1×1, bias": ("float16", 1, True)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    return guarded("torch_overhead", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="torch_overhead", description="What a call of the operator costs the host.")
    parser.add_argument("--device", default="cuda:0", metavar="D", help="(default: %(default)s)")
    parser.add_argument("-o", dest="out", type=Path, default=Path("results"), metavar="DIR", help="where results go")
    args = parser.parse_args(argv)
    device = devices.find(args.device)
    if isinstance(device, devices.Arch) or device.kind != "cuda":
        raise UsageError(f"{args.device}: expected a GPU of NVIDIA's, where calls do not wait for their kernels")
    note = provenance(device, shlex.join(["python", "scripts/torch_overhead.py", *argv]))
    rows, data = [], []
    for name, (dtype, size, bias) in CASES.items():
        taken = _taken(device.text, dtype, size, bias)
        data.append({"case": name, "seconds": taken})
        rows += [(name, how, significant(seconds * 1e6)) for how, seconds in taken.items()]
    table = Table(("convolution", "call", "host [µs]"), rows, left=frozenset({"convolution", "call"}))
    told = f"A call's time on the host: median of {ROUNDS} rounds of {CALLS:,} calls. {note}"
    print("\n".join([table.text(), told]))
    args.out.mkdir(parents=True, exist_ok=True)
    page = "\n\n".join([f"# {TITLE}", table.markdown(), told])
    (args.out / f"{TITLE}.md").write_text(page + "\n", encoding="utf-8")
    text = json.dumps({"name": TITLE, "provenance": note, "cases": data}, indent=1, ensure_ascii=False)
    (args.out / f"{TITLE}.json").write_text(text + "\n", encoding="utf-8")
    return 0


def _taken(device: str, dtype: str, size: int, bias: bool) -> dict[str, float]:
    """Seconds of a call, by what is called."""
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
            begun = time.perf_counter()
            for _ in range(CALLS):
                call()
            rounds.append((time.perf_counter() - begun) / CALLS)
    return statistics.median(rounds)


if __name__ == "__main__":
    sys.exit(main())
