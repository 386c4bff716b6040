"""Whole networks in PyTorch, by its own kernels and by ours: eager, in CUDA graphs, and compiled.

    python scripts/torch_models.py resnet50 efficientnet_b0 --dtype f16 --batch 32 --seconds 120 -o results
    python scripts/torch_models.py sd_vae_decoder --dtype f32 --layout contiguous --seconds 120 --compile default

Each network is timed as it is, in either memory format, under `torch.compile` in each mode that is named, as
`tvmconv.torch.optimize` makes it, again with its log, and compiled; from CUDA graphs, and once eager, with the host in
the time. Outputs are compared with those of the network in float64. Writes DIR/torch-NAME.json and .md, with what runs
layer by layer. The log is DIR/torch.jsonl.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tvmconv import devices
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.cli.options import count, positive
from tvmconv.cli.progress import progress_line
from tvmconv.experiments.provenance import provenance
from tvmconv.reports.tables import NOTHING, Table, significant
from tvmconv.workloads import dtypes

OWN = {"yolov8s_backbone": (3, 640, 640), "sd_vae_decoder": (4, 64, 64)}  # of torch_networks.py, and their images
IMAGE = (3, 224, 224)  # of torchvision's networks
EAGER, OURS, AGAIN = "PyTorch", "tvmconv", "tvmconv, from the log"
BY_BACKEND = "tvmconv, compiled (backend)"
LAYOUTS = ("channels_last", "contiguous")
SETTLING = 8  # images that normalisations take their statistics from


@dataclass(frozen=True)
class Timed:
    """A way to run a network.

    Attributes:
        name: such as "PyTorch" or "tvmconv, compiled (default)".
        graph: seconds of a CUDA graph of it.
        eager: seconds of a call, with the host in the time.
        made: seconds that it took to compile, or to find kernels.
        error: relative L2 difference from float64.
    """

    name: str
    graph: float
    eager: float
    made: float
    error: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    return guarded("torch_models", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="torch_models", description="Whole networks in PyTorch, by its own kernels and by ours.")
    parser.add_argument("networks", nargs="+", metavar="NAME", help=f"of torchvision, or {', '.join(OWN)}")
    parser.add_argument("--dtype", choices=dtypes.BY_TEXT, default="f16", help="(default: %(default)s)")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="images (default: %(default)s)")
    parser.add_argument("--side", type=count, metavar="N", help="height and width of the images")
    parser.add_argument("--seconds", type=positive, metavar="T", help="to search for kernels, for each network")
    parser.add_argument(
        "--compile", action="append", default=[], metavar="MODE", help="torch.compile's, such as default"
    )
    parser.add_argument("--backend", action="store_true", help="compile by our backend, too, with the log")
    parser.add_argument("--layout", choices=LAYOUTS, default="channels_last", help="(default: %(default)s)")
    parser.add_argument("--device", default="auto", metavar="D", help="(default: %(default)s)")
    parser.add_argument("-o", dest="out", type=Path, default=Path("results"), metavar="DIR", help="where results go")
    args = parser.parse_args(argv)
    device = devices.find(args.device)
    if isinstance(device, devices.Arch):
        raise UsageError(f"{device.text} is to compile for only")
    args.out.mkdir(parents=True, exist_ok=True)
    note = provenance(device, shlex.join(["python", "scripts/torch_models.py", *argv]), _library())
    for name in args.networks:
        timed, report = _network(name, device, args)
        title = "-".join(["torch", name, args.dtype, *([f"b{args.batch}"] if args.batch > 1 else [])])
        table = _table(timed)
        print("\n".join([title, table.text(), note, ""]), flush=True)
        page = "\n\n".join([f"# {title}", table.markdown(), report.table.markdown(), *report.notes, note])
        (args.out / f"{title}.md").write_text(page + "\n", encoding="utf-8")
        data = {"name": title, "network": name, "dtype": args.dtype, "batch": args.batch, "provenance": note}
        data["timed"] = [asdict(each) for each in timed]
        data["layers"] = [asdict(line) for line in report.lines]
        (args.out / f"{title}.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _library() -> str:
    import torch

    version = torch.backends.cudnn.version()
    cudnn = f"cuDNN {version // 10000}.{version // 100 % 100}, " if version else ""
    return f"{cudnn}PyTorch {torch.__version__}"


def _table(timed: Sequence[Timed]) -> Table:
    headers = ("by", "graph [µs]", "× PyTorch", "eager [µs]", "made in [s]", "rel. error")
    first = timed[0].graph
    rows = [
        (
            each.name,
            significant(each.graph * 1e6),
            significant(first / each.graph),
            significant(each.eager * 1e6),
            significant(each.made) if each.made else NOTHING,
            f"{each.error:.1e}",
        )
        for each in timed
    ]
    return Table(headers, rows, left=frozenset({"by"}))


def _network(name: str, device: Any, args: Any) -> tuple[list[Timed], Any]:
    """All ways to run a network, and our report."""
    import torch

    import tvmconv.torch
    from tvmconv.torch.backend import backend

    place = torch.device(device.text if device.kind == "cuda" else "cpu")
    torch.backends.cudnn.allow_tf32 = args.dtype == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = args.dtype == "tf32"
    torch.backends.cudnn.benchmark = True
    dtype = getattr(torch, dtypes.BY_TEXT[args.dtype].storage)
    model, shape = _made(name)
    if args.side:
        shape = (shape[0], args.side, args.side)
    torch.manual_seed(0)
    model = _settled(model.to(place), shape)
    x = torch.randn(args.batch, *shape).to(place, dtype)
    model = model.to(dtype).requires_grad_(False)
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(x[:1].double())

    def timed(label: str, run: Callable[[Any], Any], begun: float | None) -> Timed:
        with torch.no_grad():
            error = _deviation(run(x)[:1], wanted)
            made = time.perf_counter() - begun if begun is not None else 0.0
            from tvmconv.torch.timing import on_the_clock, seconds_of, wait_for

            graph = seconds_of(lambda: run(x), place)
            eager = on_the_clock(lambda: run(x), wait_for(place))
        return Timed(label, graph, eager, made, error)

    found = []
    for layout in sorted(LAYOUTS, key=args.layout.__eq__):  # the last one is what all others have
        lies = torch.channels_last if layout == "channels_last" else torch.contiguous_format
        x, model = x.contiguous(memory_format=lies), model.to(memory_format=lies)
        found.append(timed(EAGER if layout == args.layout else f"{EAGER}, {layout}", model, None))
    found.reverse()
    for mode in args.compile:
        begun = time.perf_counter()
        torch._dynamo.reset()
        found.append(timed(f"{EAGER}, compiled ({mode})", torch.compile(model, mode=mode), begun))
    begun = time.perf_counter()
    file = args.out / "torch.jsonl"
    log = file if args.seconds or file.exists() else None
    with progress_line(f"{name}: ") as show:
        ours = tvmconv.torch.optimize(model, x, seconds=args.seconds, log=log, device=device.text, progress=show)
    found.append(timed(OURS, ours, begun))
    if log and log.exists():
        begun = time.perf_counter()
        again = tvmconv.torch.optimize(model, x, seconds=args.seconds, log=log, device=device.text)
        found.append(timed(AGAIN, again, begun))
    for mode in args.compile:
        begun = time.perf_counter()
        torch._dynamo.reset()
        found.append(timed(f"{OURS}, compiled ({mode})", torch.compile(ours, mode=mode), begun))
    if args.backend:
        begun = time.perf_counter()
        torch._dynamo.reset()
        by = functools.partial(backend, options={"seconds": args.seconds, "log": log})
        found.append(timed(BY_BACKEND, torch.compile(model, backend=by), begun))
    return found, ours.report()


def _made(name: str) -> tuple[Any, tuple[int, int, int]]:
    """A network with random weights, and the shape of its images."""
    if name in OWN:
        sys.path.insert(0, str(Path(__file__).parent))
        import torch_networks

        return getattr(torch_networks, name)(), OWN[name]
    import torchvision

    try:
        return torchvision.models.get_model(name, weights=None), IMAGE
    except ValueError as error:
        raise UsageError(f"torchvision has no {name}, and there are {', '.join(OWN)}") from error


def _settled(model: Any, shape: tuple[int, int, int]) -> Any:
    """The model in evaluation mode, with statistics of its own values: else these vanish from layer to layer."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the mean of all batches
    with torch.no_grad():
        model.train()(torch.randn(SETTLING, *shape, device=next(model.parameters()).device))
    return model.eval()


def _deviation(ours: Any, wanted: Any) -> float:
    norm = float(wanted.norm())
    return float((ours.double() - wanted).norm()) / norm if norm else math.nan


if __name__ == "__main__":
    sys.exit(main())
