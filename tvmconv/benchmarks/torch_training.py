"""Time a training step of PyTorch models with PyTorch's kernels and with tvmconv's.

    tvmconv bench torch-training resnet50 efficientnet_b0 --batch 64 --seconds 120 -o results
    tvmconv bench torch-training r3d_18 --batch 8 --seconds 60 --compile default --backend

A step is a forward pass under autocast, cross-entropy, a backward pass with a scaled loss, and fused SGD with momentum.
Each network is timed unchanged, compiled by `torch.compile` in each named mode, after `optimize(train=True)`, and
compiled after that or by the backend `tvmconv`, with Inductor or without a compiler for the rest of the graph; each of
them eagerly and as one CUDA graph of the whole step. All of them are timed in turns, in several rounds, and the medians
are compared. Results are in DIR/torch-training-NAME.json and .md, with the kernel of each product; the log is
DIR/torch-training.jsonl. With --kernels, the kernels of a step that take most time are listed for each variant with a
CUDA graph.

The unchanged network and the optimized one come first, then the backend, PyTorch's compilations, and those of the
optimized network. Results are written each time, so that an interruption of a long compilation loses nothing. What was
compiled while another command had the GPU comes right after the unchanged network.

With --gpu-lock, several commands share a GPU. They compile their unchanged networks on the CPU at the same time, by the
default mode while another one has the GPU (`inductor_ahead.py`), and by other modes, which time kernels, before that.
Each one then has the GPU for itself until its end, so that searches and timings follow one another.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tvmconv.benchmarks.common import add_device, add_gpu_lock, add_output, find_device, hold_gpu, write_report
from tvmconv.benchmarks.inductor_ahead import compile_ahead
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.progress import progress_line
from tvmconv.errors import get_first_line
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.reports.tables import EMPTY_CELL, Table, format_micros, format_optional, format_speedup, make_table

PYTORCH, OURS, OURS_FUSED = "PyTorch", "tvmconv", "tvmconv, fused"
BY_BACKEND = "tvmconv, compiled (backend)"
BY_EAGER_BACKEND = "tvmconv, compiled (backend, eager)"
DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "tf32": "float32"}
IMAGE, VIDEO = (3, 224, 224), (3, 16, 112, 112)
VIDEO_NETWORKS = ("r3d_18", "mc3_18", "r2plus1d_18")
NUM_CLASSES = 1000
NUM_WARM_UP_STEPS = 5  # before a capture, as PyTorch's documentation of CUDA graphs has it
NUM_ROUNDS, NUM_STEPS = 5, 8  # timed steps of each variant per round
NUM_EAGER_ROUNDS = 2  # of them also eagerly, where the host often takes longer than the GPU; once for each variant
NUM_PROFILED_STEPS = 3
NAME_CHARACTERS = 96  # of a kernel in a table
# Groups of kernels by their names, or else by parts of them, the first that fits.
OWN_KERNELS = {
    **dict.fromkeys(("sum_elements", "finish_stats", "apply"), "batch norms of tvmconv"),
    **dict.fromkeys(("sum_gradients", "finish_gradients", "apply_gradients"), "batch norms of tvmconv"),
    **dict.fromkeys(("layer_norm", "layer_norm_backward", "add_parts"), "layer norms and element-wise of tvmconv"),
    **dict.fromkeys(("activate", "activate_backward", "scale_add"), "layer norms and element-wise of tvmconv"),
    **dict.fromkeys(("scale_add_backward", "gate", "gate_backward"), "layer norms and element-wise of tvmconv"),
    **dict.fromkeys(("max_pool", "max_pool_backward"), "poolings of tvmconv"),
}
KERNEL_GROUPS = {
    "triton_red": "Triton, reductions",
    "triton_per": "Triton, reductions",
    "triton_": "Triton, pointwise",
    "nvjet": "cuDNN and cuBLAS",
    "xmma": "cuDNN and cuBLAS",
    "cudnn": "cuDNN and cuBLAS",
    "cutlass": "cuDNN and cuBLAS",
    "sm80": "cuDNN and cuBLAS",
    "sm90": "cuDNN and cuBLAS",
    "nhwc": "cuDNN and cuBLAS",
    "nchw": "cuDNN and cuBLAS",
    "at::": "other of PyTorch",
    "mem": "copies and fills",
}
OTHER_GROUP = "convolutions of tvmconv"


@dataclass
class StepVariant:
    """One way to run a training step, and the seconds per step in each round."""

    name: str
    step: Callable[[], Any]
    made_seconds: float  # of compilation, or of the search for kernels
    replay: Callable[[], Any] | None = None  # of the step's CUDA graph
    failure: str = ""  # of the capture
    kernels: list[tuple[str, int, float]] = field(default_factory=list)  # names, launches and seconds of a step
    eager_seconds: list[float] = field(default_factory=list)
    graph_seconds: list[float] = field(default_factory=list)

    def summarize(self) -> dict[str, Any]:
        """Return the medians, for a table and JSON."""
        return {
            "name": self.name,
            "graph": statistics.median(self.graph_seconds) if self.graph_seconds else None,
            "eager": statistics.median(self.eager_seconds),
            "made": self.made_seconds,
            "failure": self.failure,
            "kernels": self.kernels,
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("networks", nargs="+", metavar="NAME", help="Networks of torchvision.")
    options.add_option(parser, "--dtype", None, "Dtype of autocast", choices=DTYPES, default="f16")
    options.add_option(parser, "--batch", "N", "Batch size", type=options.parse_count, default=64)
    options.add_option(parser, "--seconds", "S", "Seconds of tuning for each network", type=options.parse_positive)
    options.add_option(parser, "--compile", "MODE", "A mode of torch.compile for the unchanged network", repeat=True)
    text = "A mode of torch.compile for the optimized network"
    options.add_option(parser, "--compile-optimized", "MODE", text, repeat=True)
    parser.add_argument("--backend", action="store_true", help="Compile with the backend tvmconv as well.")
    text = "Use the backend tvmconv without a compiler for the rest of the graph as well"
    parser.add_argument("--backend-eager", action="store_true", help=f"{text}.")
    text = "Optimize with operators for normalizations and element-wise operations as well"
    parser.add_argument("--fused", action="store_true", help=f"{text}.")
    text = "Number of kernels to list for each variant"
    options.add_option(parser, "--kernels", "N", text, type=options.parse_count)
    layouts = ("channels_last", "contiguous")
    options.add_option(parser, "--layout", None, "Memory format", choices=layouts, default=layouts[0])
    add_gpu_lock(parser)
    add_device(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure each network, then print and write the times."""
    import torch

    device = find_device(args, "a training step is timed in CUDA graphs")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = args.dtype != "f32"
    version = torch.backends.cudnn.version()
    versions = f"cuDNN {version // 10000}.{version // 100 % 100}, PyTorch {torch.__version__}"
    source = describe_provenance(device, args.command, versions)
    for name in args.networks:
        torch.cuda.set_device(device.text)
        torch.backends.cudnn.benchmark = True
        title = f"torch-training-{name}-{args.dtype}-b{args.batch}"
        for summaries, layers in _measure(name, args):
            data = {"name": title, "network": name, "dtype": args.dtype, "batch": args.batch, "provenance": source}
            data |= {"timed": summaries, "layers": [asdict(line) for line in layers.lines] if layers else []}
            tables = [_make_table(summaries), *_make_kernel_tables(summaries, args.kernels)]
            tables += [layers.table] if layers else []
            notes = [*(layers.notes if layers else ()), source]
            write_report(args.out, title, tables, notes, data, title)
        output.print_report(args, tables, notes, title=title, json_data=data)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return 0


def _make_table(summaries: list[dict[str, Any]]) -> Table:
    best = min(summary["graph"] or summary["eager"] for summary in summaries if summary["name"].startswith(PYTORCH))
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "by": lambda summary: summary["name"],
        "graph [µs]": lambda summary: format_micros(summary["graph"]),
        "× best of PyTorch": lambda summary: format_speedup(best, summary["graph"]),
        "eager [µs]": lambda summary: format_micros(summary["eager"]),
        "made in [s]": lambda summary: format_optional(summary["made"] or None),
        "no graph because": lambda summary: summary["failure"] or EMPTY_CELL,
    }
    return make_table(summaries, columns, ["by", "no graph because"])


def _make_kernel_tables(summaries: list[dict[str, Any]], max_kernels: int | None) -> list[Table]:
    """Return a table of the kernels' groups of all variants, and one of each variant's longest kernels."""
    profiled = [summary for summary in summaries if summary["kernels"]] if max_kernels else []
    groups: list[tuple[str, str, int, float]] = []
    tables = []
    for summary in profiled:
        by_group: dict[str, list[tuple[str, int, float]]] = {}
        for kernel in summary["kernels"]:
            by_group.setdefault(_find_group(kernel[0]), []).append(kernel)
        sums = [
            (name, sum(each[1] for each in kernels), sum(each[2] for each in kernels))
            for name, kernels in by_group.items()
        ]
        groups += [(summary["name"], *each) for each in sorted(sums, key=lambda each: -each[2])]
        columns: dict[str, Callable[[tuple[str, int, float]], str]] = {
            f"kernel of {summary['name']}": lambda kernel: kernel[0][:NAME_CHARACTERS],
            "launches": lambda kernel: str(kernel[1]),
            "in all [µs]": lambda kernel: format_micros(kernel[2]),
        }
        tables.append(make_table(summary["kernels"][:max_kernels], columns, list(columns)[:1]))
    group_columns: dict[str, Callable[[tuple[str, str, int, float]], str]] = {
        "by": lambda group: group[0],
        "kernels": lambda group: group[1],
        "launches": lambda group: str(group[2]),
        "in all [µs]": lambda group: format_micros(group[3]),
    }
    return [make_table(groups, group_columns, ["by", "kernels"]), *tables] if profiled else []


def _find_group(kernel_name: str) -> str:
    name = kernel_name.lower()
    if kernel_name in OWN_KERNELS:
        return OWN_KERNELS[kernel_name]
    return next((group for part, group in KERNEL_GROUPS.items() if part in name), OTHER_GROUP)


def _measure(name: str, args: argparse.Namespace) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """Time all ways to run a step; yield the times so far, and the report of `optimize` or None, after each of them."""
    import torch

    import tvmconv.torch

    torch.manual_seed(0)
    model, images = _make_network(name, args)
    labels = torch.randint(NUM_CLASSES if images.dim() == 4 else 400, (args.batch,), device="cuda")
    pool = torch.cuda.graph_pool_handle()
    variants: list[StepVariant] = []

    def make(label: str, network: Any, started_at: float | None) -> StepVariant:
        step = _make_step(network, images, labels, args.dtype)
        step()
        torch.cuda.synchronize()
        return StepVariant(label, step, 0.0 if started_at is None else time.perf_counter() - started_at)

    def compile_network(label: str, network: Any, **settings: Any) -> StepVariant:
        started_at = time.perf_counter()
        return make(label, torch.compile(copy.deepcopy(network), **settings), started_at)

    def add(variant: StepVariant) -> None:
        variants.append(_capture(variant, pool))
        if args.kernels and variant.replay is not None:
            variant.kernels = _profile(variant.replay)

    compiled: dict[str, StepVariant] = {}
    if args.gpu_lock:
        with _without_cudnn_benchmark():
            for mode in args.compile:
                label = _name_compiled(PYTORCH, mode)
                compile_model = functools.partial(compile_network, label, model)
                compiled[label], waiting_seconds = compile_ahead(compile_model, mode, args.gpu_lock)
                compiled[label].made_seconds -= waiting_seconds
        torch.cuda.empty_cache()
    with hold_gpu(args.gpu_lock):
        add(make(PYTORCH, copy.deepcopy(model), None))
        for variant in compiled.values():
            add(variant)
        yield _time_in_turns(variants), None
        started_at = time.perf_counter()
        optimized, log = _optimize(name, model, images, args)
        layers = tvmconv.torch.get_training_report(optimized)
        add(make(OURS_FUSED if args.fused else OURS, optimized, started_at))
        yield _time_in_turns(variants), layers
        compilations = _list_compilations(args, model, optimized, log, [*compiled])
        for label, network, settings in compilations:
            add(compile_network(label, network, **settings))
            yield _time_in_turns(variants), layers


def _list_compilations(
    args: argparse.Namespace, model: Any, optimized: Any, log: Path | None, compiled: Collection[str]
) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return labels, networks and options of `torch.compile` of the compiled variants, without those in `compiled`."""
    import tvmconv.torch.backend

    backend, eager_backend = (
        functools.partial(tvmconv.torch.backend.backend, options={"log": log, "fallback_backend": fallback})
        for fallback in ("inductor", "eager")
    )
    modes = {_name_compiled(PYTORCH, mode): mode for mode in args.compile}
    return [
        *([(BY_EAGER_BACKEND, model, {"backend": eager_backend})] if args.backend_eager else []),
        *([(BY_BACKEND, model, {"backend": backend})] if args.backend else []),
        *((label, model, {"mode": mode}) for label, mode in modes.items() if label not in compiled),
        *((_name_compiled(OURS, mode), optimized, {"mode": mode}) for mode in args.compile_optimized),
    ]


def _name_compiled(name: str, mode: str) -> str:
    return f"{name}, compiled ({mode})"


def _optimize(name: str, model: Any, images: Any, args: argparse.Namespace) -> tuple[Any, Path | None]:
    """Return the network with tvmconv's kernels, and the log of their times; None for the log if there are none."""
    import tvmconv.torch

    log = args.out / "torch-training.jsonl"
    with progress_line(f"{name}: ") as show, _autocast(args.dtype):
        tuning = {"seconds": args.seconds, "log": log if args.seconds or log.exists() else None, "fused": args.fused}
        optimized = tvmconv.torch.optimize(copy.deepcopy(model), images, train=True, progress=show, **tuning)
    return optimized, log if log.exists() else None


@contextlib.contextmanager
def _without_cudnn_benchmark() -> Iterator[None]:
    """Let cuDNN choose algorithms without timing them, in a step whose time does not matter."""
    import torch

    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = True


def _time_in_turns(variants: list[StepVariant]) -> list[dict[str, Any]]:
    """Time all variants in turns, in several rounds, and return their medians; free the memory that steps need."""
    import torch

    for variant in variants:
        variant.graph_seconds = []
    for variant in itertools.chain(*itertools.repeat(variants, NUM_ROUNDS)):
        if len(variant.eager_seconds) < NUM_EAGER_ROUNDS:
            variant.eager_seconds.append(_time_steps(variant.step))
        if variant.replay is not None:
            variant.graph_seconds.append(_time_steps(variant.replay))
    torch.cuda.empty_cache()  # other processes may need it
    latest = variants[-1]
    if latest.graph_seconds:
        print_note(f"{latest.name}: {statistics.median(latest.graph_seconds) * 1e6:,.0f} µs in a graph")
    return [variant.summarize() for variant in variants]


def _autocast(dtype: str) -> Any:
    import torch

    return torch.autocast("cuda", getattr(torch, DTYPES[dtype]), enabled=DTYPES[dtype] != "float32")


def _make_network(name: str, args: argparse.Namespace) -> tuple[Any, Any]:
    """Return a network in training mode on the GPU, and a batch of images or videos, in the memory format."""
    import torch
    import torchvision

    try:
        model = torchvision.models.get_model(name, weights=None).train().cuda()
    except ValueError as error:
        raise UsageError(f"no network {name}: expected one of torchvision") from error
    shape = VIDEO if name in VIDEO_NETWORKS else IMAGE
    images = torch.randn(args.batch, *shape, device="cuda")
    if args.layout == "channels_last":
        memory_format = torch.channels_last_3d if shape is VIDEO else torch.channels_last
        images = images.contiguous(memory_format=memory_format)
        for parameter in model.parameters():
            if parameter.dim() == len(shape) + 1:
                parameter.data = parameter.data.contiguous(memory_format=memory_format)
    return model, images


def _make_step(model: Any, images: Any, labels: Any, dtype: str) -> Callable[[], Any]:
    """Return a function that trains a model by one step, without waiting for the GPU."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    # PyTorch's fused SGD leaves the momentum undefined if the first gradients are infinite, which 2^16 makes likely.
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=dtype == "f16")

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with _autocast(dtype):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def _capture(variant: StepVariant, pool: Any) -> StepVariant:
    """Capture a variant's step in a CUDA graph, after some steps on another stream."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UP_STEPS):
            variant.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            variant.step()
    except RuntimeError as error:
        variant.failure = get_first_line(error)
        return variant
    variant.replay = graph.replay
    return variant


def _time_steps(step: Callable[[], Any]) -> float:
    """Return the seconds per step of some steps, the host's time included where the GPU waits for the host."""
    import torch

    step()
    torch.cuda.synchronize()
    started_at = time.perf_counter()
    for _ in range(NUM_STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started_at) / NUM_STEPS


def _profile(replay: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """Return names, launches and seconds of the kernels of a step, those that take longest first."""
    import torch

    activity, device_type = torch.profiler.ProfilerActivity.CUDA, torch.autograd.DeviceType.CUDA
    replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(NUM_PROFILED_STEPS):
            replay()
        torch.cuda.synchronize()
    counts: collections.Counter[str] = collections.Counter()
    micros: collections.Counter[str] = collections.Counter()
    for event in profile.events():
        if event.device_type == device_type:
            counts[event.name] += 1
            micros[event.name] += event.time_range.elapsed_us()
    return [
        (name, counts[name] // NUM_PROFILED_STEPS, total / NUM_PROFILED_STEPS / 1e6)
        for name, total in micros.most_common()
    ]
