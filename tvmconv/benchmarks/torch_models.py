"""Time whole PyTorch models with PyTorch's kernels and with tvmconv's: eager, in CUDA graphs, and compiled.

    tvmconv bench torch-models resnet50 efficientnet_b0 --dtype f16 --batch 32 --seconds 120 -o results
    tvmconv bench torch-models sd_vae_decoder --dtype f32 --layout contiguous --seconds 120 --compile default

Each network is timed unchanged in both memory formats, and under `torch.compile` in each named mode. Then
`tvmconv.torch.optimize` optimizes it by a search, and again from the log, and the result is compiled. Times are those
of CUDA graphs, and of eager calls with the host's time included. Outputs are compared with the network's in float64.
Results are in DIR/torch-NAME.json and .md, with the kernel of each layer; the log is DIR/torch.jsonl.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tvmconv import devices
from tvmconv.benchmarks.common import add_device, add_output, find_device, make_table, micros, report
from tvmconv.cli.errors import UsageError
from tvmconv.cli.options import add_renamed_option, parse_count, parse_positive
from tvmconv.cli.progress import progress_line
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant
from tvmconv.workloads import dtypes

OWN = {"yolov8s_backbone": (3, 640, 640), "sd_vae_decoder": (4, 64, 64)}  # networks of torch_networks.py
IMAGE = (3, 224, 224)  # input of torchvision's networks
EAGER, OURS, AGAIN = "PyTorch", "tvmconv", "tvmconv, from the log"
BY_BACKEND = "tvmconv, compiled (backend)"
LAYOUTS = ("channels_last", "contiguous")
SETTLING = 8  # number of images for the statistics of batch normalizations


@dataclass(frozen=True)
class NetworkTiming:
    """The times of one way to run a network.

    Attributes:
        name: Name, such as "PyTorch" or "tvmconv, compiled (default)".
        graph: Seconds of its CUDA graph.
        eager: Seconds of a call, the host's time included.
        made: Seconds of compilation, or of the search for kernels.
        error: Relative L2 difference from float64.
    """

    name: str
    graph: float
    eager: float
    made: float
    error: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("networks", nargs="+", metavar="NAME", help=f"Networks of torchvision, or {', '.join(OWN)}.")
    parser.add_argument("--dtype", choices=dtypes.DTYPES_BY_TEXT, default="f16", help="Dtype (default: %(default)s).")
    parser.add_argument("--batch", type=parse_count, default=1, metavar="N", help="Batch size (default: %(default)s).")
    add_renamed_option(
        parser, "--image-size", "--side", type=parse_count, metavar="N", help="Height and width of the images."
    )
    parser.add_argument("--seconds", type=parse_positive, metavar="S", help="Seconds of tuning for each network.")
    parser.add_argument("--compile", action="append", default=[], metavar="MODE", help="A mode of torch.compile.")
    parser.add_argument("--backend", action="store_true", help="Compile with the backend tvmconv as well.")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="Memory format (default: %(default)s).")
    add_device(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure each network, then print and write the times."""
    device = find_device(args)
    if isinstance(device, devices.Arch):
        raise UsageError(f"{device.text} can only be compiled for: expected cuda:N or opencl:N to run models on")
    args.out.mkdir(parents=True, exist_ok=True)
    source = describe_provenance(device, args.command, _library())
    for name in args.networks:
        timed, layers = _network(name, device, args)
        title = "-".join(["torch", name, args.dtype, *([f"b{args.batch}"] if args.batch > 1 else [])])
        data = {"name": title, "network": name, "dtype": args.dtype, "batch": args.batch, "provenance": source}
        data["timed"] = [asdict(each) for each in timed]
        data["layers"] = [asdict(line) for line in layers.lines]
        report(args.out, title, [_table(timed), layers.table], [*layers.notes, source], data, title)
    return 0


def _library() -> str:
    import torch

    version = torch.backends.cudnn.version()
    cudnn = f"cuDNN {version // 10000}.{version // 100 % 100}, " if version else ""
    return f"{cudnn}PyTorch {torch.__version__}"


def _table(timed: Sequence[NetworkTiming]) -> Table:
    first = timed[0].graph
    columns: dict[str, Callable[[NetworkTiming], str]] = {
        "by": lambda each: each.name,
        "graph [µs]": lambda each: micros(each.graph),
        "× PyTorch": lambda each: format_significant(first / each.graph),
        "eager [µs]": lambda each: micros(each.eager),
        "made in [s]": lambda each: format_significant(each.made) if each.made else EMPTY_CELL,
        "rel. error": lambda each: f"{each.error:.1e}",
    }
    return make_table(timed, columns, ["by"])


def _network(name: str, device: Any, args: Any) -> tuple[list[NetworkTiming], Any]:
    """Time all ways to run a network, and return the times and the report of `optimize`."""
    import torch

    import tvmconv.torch
    from tvmconv.torch.backend import backend

    torch_device = torch.device(device.text if device.kind == "cuda" else "cpu")
    torch.backends.cudnn.allow_tf32 = args.dtype == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = args.dtype == "tf32"
    torch.backends.cudnn.benchmark = True
    dtype = getattr(torch, dtypes.DTYPES_BY_TEXT[args.dtype].storage)
    model, shape = _made(name)
    if args.image_size:
        shape = (shape[0], args.image_size, args.image_size)
    torch.manual_seed(0)
    model = _settled(model.to(torch_device), shape)
    x = torch.randn(args.batch, *shape).to(torch_device, dtype)
    model = model.to(dtype).requires_grad_(False)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x[:1].double())

    def timed(label: str, run: Callable[[Any], Any], started_at: float | None) -> NetworkTiming:
        with torch.no_grad():
            error = _deviation(run(x)[:1], expected)
            made = time.perf_counter() - started_at if started_at is not None else 0.0
            from tvmconv.torch.timing import make_waiter, time_call, time_wall_clock

            graph = time_call(lambda: run(x), torch_device)
            eager = time_wall_clock(lambda: run(x), make_waiter(torch_device))
        return NetworkTiming(label, graph, eager, made, error)

    found = []
    for layout in sorted(LAYOUTS, key=args.layout.__eq__):  # the last layout is that of all later timings
        memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
        x, model = x.contiguous(memory_format=memory_format), model.to(memory_format=memory_format)
        found.append(timed(EAGER if layout == args.layout else f"{EAGER}, {layout}", model, None))
    found.reverse()

    def compiled(label: str, module: Any, **options: Any) -> NetworkTiming:
        started_at = time.perf_counter()
        torch._dynamo.reset()
        return timed(label, torch.compile(module, **options), started_at)

    def optimized(label: str, **options: Any) -> Any:
        started_at = time.perf_counter()
        ours = tvmconv.torch.optimize(model, x, seconds=args.seconds, log=log, device=device.text, **options)
        found.append(timed(label, ours, started_at))
        return ours

    found += [compiled(f"{EAGER}, compiled ({mode})", model, mode=mode) for mode in args.compile]
    file = args.out / "torch.jsonl"
    log = file if args.seconds or file.exists() else None
    with progress_line(f"{name}: ") as show:
        ours = optimized(OURS, progress=show)
    if log and log.exists():
        optimized(AGAIN)
    found += [compiled(f"{OURS}, compiled ({mode})", ours, mode=mode) for mode in args.compile]
    if args.backend:
        options = {"seconds": args.seconds, "log": log}
        found.append(compiled(BY_BACKEND, model, backend=functools.partial(backend, options=options)))
    return found, ours.report()


def _made(name: str) -> tuple[Any, tuple[int, int, int]]:
    """Return a network with random weights, and the shape of its images."""
    if name in OWN:
        from tvmconv.benchmarks import torch_networks

        return getattr(torch_networks, name)(), OWN[name]
    import torchvision

    try:
        return torchvision.models.get_model(name, weights=None), IMAGE
    except ValueError as error:
        raise UsageError(f"no network {name}: expected one of torchvision, or {', '.join(OWN)}") from error


def _settled(model: Any, shape: tuple[int, int, int]) -> Any:
    """Return the model in evaluation mode, with batch normalizations that have the statistics of random images.

    Without them, the values vanish from layer to layer.
    """
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # a cumulative mean over batches
    with torch.no_grad():
        model.train()(torch.randn(SETTLING, *shape, device=next(model.parameters()).device))
    return model.eval()


def _deviation(ours: Any, expected: Any) -> float:
    norm = float(expected.norm())
    return float((ours.double() - expected).norm()) / norm if norm else math.nan
