"""Time whole PyTorch models with PyTorch's kernels and with tvmconv's: eager, in CUDA graphs, and compiled.

    tvmconv bench torch-models resnet50 efficientnet_b0 --dtype f16 --batch 32 --seconds 120 -o results
    tvmconv bench torch-models sd_vae_decoder --dtype f32 --layout contiguous --seconds 120 --compile default

Each network is timed unchanged in both memory formats, and under `torch.compile` in each named mode. Then
`tvmconv.torch.optimize` optimizes it by a search, and again from the log, and the result is compiled, except in modes
of --compile-unchanged. With --quantize, it optimizes the network in an 8-bit dtype, calibrated on the input, in place
of the optimization from the log.
Times are those of CUDA graphs, and of eager calls with the host's time included. Outputs are compared with the
network's in float64.
After each timing, DIR/torch-NAME.json and .md have all results so far, with the kernel of each layer; the log is
DIR/torch.jsonl. With --gpu-lock, several commands share a GPU: they compile their unchanged networks on the CPU at the
same time, and then have the GPU one after another.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tvmconv import devices
from tvmconv.benchmarks.common import add_device, add_gpu_lock, add_output, find_device, hold_gpu, report, write_report
from tvmconv.benchmarks.inductor_ahead import compile_ahead
from tvmconv.cli import options
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.progress import progress_line
from tvmconv.devices import Device
from tvmconv.errors import Error, describe_error
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.reports.tables import Table, format_micros, format_optional, format_significant, make_table
from tvmconv.workloads import dtypes

# Networks of torch_networks.py, with the shapes of their inputs.
OWN_NETWORKS = {
    "yolov8s_backbone": (3, 640, 640),
    "sd_vae_decoder": (4, 64, 64),
    "hifigan_generator": (80, 256),
    "nnunet_3d": (1, 96, 96, 96),
    "mobilenetv4_conv_medium": (3, 256, 256),
    "conv_tasnet": (1, 32_000),
    "edsr_baseline": (3, 256, 256),
    "unet_2d": (3, 256, 256),
}
IMAGE = (3, 224, 224)  # input of torchvision's networks
TIMM_PREFIX = "timm:"  # of names of timm's networks
EAGER, OURS, FROM_LOG = "PyTorch", "tvmconv", "tvmconv, from the log"
BY_BACKEND = "tvmconv, compiled (backend)"
QUANTIZED_DTYPES = (dtypes.FLOAT8_E4M3.text, dtypes.INT8.text)
LAYOUTS = ("channels_last", "contiguous")
NUM_STATISTICS_IMAGES = 8  # number of images for the statistics of batch normalizations


@dataclass(frozen=True)
class NetworkTiming:
    """The times in seconds of one way to run a network, such as "PyTorch" or "tvmconv, compiled (default)"."""

    name: str
    graph: float  # of its CUDA graph
    eager: float  # of a call, the host's time included
    made: float  # of compilation, or of the search for kernels
    error: float  # relative L2 difference from float64


@dataclass
class NetworkResult:
    """The times of a network, and the reports of `optimize` by the dtype of its operands."""

    name: str
    dtype: str  # of the unquantized network
    batch: int
    provenance: str
    timings: list[NetworkTiming] = field(default_factory=list)
    reports: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return the name of the files."""
        parts = ["torch", *self.name.split(":"), self.dtype]
        return "-".join([*parts, *([f"b{self.batch}"] if self.batch > 1 else [])])

    def describe(self) -> tuple[list[Table], list[str], dict[str, Any]]:
        """Return the tables, the notes below them, and the data for JSON."""
        data = {"name": self.title, "network": self.name, "dtype": self.dtype, "batch": self.batch}
        data |= {"provenance": self.provenance, "timed": [asdict(timing) for timing in self.timings]}
        for text, each in self.reports.items():
            key = "layers" if text == self.dtype else f"layers in {text}"
            data[key] = [asdict(line) for line in each.lines]
        tables = [_make_table(self.timings), *(each.table for each in self.reports.values())]
        notes = dict.fromkeys(note for each in self.reports.values() for note in each.notes)
        return tables, [*notes, self.provenance], data


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    text = f"Networks of torchvision, {TIMM_PREFIX}NAME for those of timm, or {', '.join(OWN_NETWORKS)}."
    parser.add_argument("networks", nargs="+", metavar="NAME", help=text)
    options.add_option(parser, "--dtype", None, "Dtype", choices=dtypes.MODEL_DTYPES_BY_TEXT, default="f16")
    options.add_option(parser, "--batch", "N", "Batch size", type=options.parse_count, default=1)
    text = "Height and width of the images"
    options.add_option(parser, "--image-size", "N", text, former="--side", type=options.parse_count)
    options.add_option(parser, "--seconds", "S", "Seconds of tuning for each network", type=options.parse_positive)
    options.add_option(parser, "--compile", "MODE", "A mode of torch.compile", repeat=True)
    text = "A mode of torch.compile for the unchanged network alone"
    options.add_option(parser, "--compile-unchanged", "MODE", text, repeat=True)
    text = "Optimize with operands in an 8-bit dtype as well"
    options.add_option(parser, "--quantize", None, text, choices=QUANTIZED_DTYPES, repeat=True)
    parser.add_argument("--backend", action="store_true", help="Compile with the backend tvmconv as well.")
    options.add_option(parser, "--layout", None, "Memory format", choices=LAYOUTS, default=LAYOUTS[0])
    text = "Time the unchanged network in the memory format of --layout alone."
    parser.add_argument("--one-layout", action="store_true", help=text)
    parser.add_argument("--once", action="store_true", help="Do not optimize the network again from the log.")
    add_gpu_lock(parser)
    add_device(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure each network, then print and write the times."""
    import torch

    device = find_device(args)
    if isinstance(device, devices.Arch):
        raise UsageError(f"{device.text} can only be compiled for: expected cuda:N or opencl:N to run models on")
    args.out.mkdir(parents=True, exist_ok=True)
    version = torch.backends.cudnn.version()
    cudnn = f"cuDNN {version // 10000}.{version // 100 % 100}, " if version else ""
    source = describe_provenance(device, args.command, f"{cudnn}PyTorch {torch.__version__}")
    num_failed = 0
    for name in args.networks:
        result = NetworkResult(name, args.dtype, args.batch, source)
        try:
            for _ in _measure(result, device, args):
                write_report(args.out, result.title, *result.describe(), result.title)
        except UsageError:
            raise
        except (Error, RuntimeError) as error:  # the other networks are measured all the same
            num_failed += 1
            print(f"{name}: {describe_error(error)}", file=sys.stderr)
        if result.reports:
            tables, notes, data = result.describe()
            report(args, result.title, tables, notes, data, result.title)
    return 1 if num_failed else 0


def _make_table(timings: list[NetworkTiming]) -> Table:
    first = timings[0].graph
    columns: dict[str, Callable[[NetworkTiming], str]] = {
        "by": lambda timing: timing.name,
        "graph [µs]": lambda timing: format_micros(timing.graph),
        "× PyTorch": lambda timing: format_significant(first / timing.graph),
        "eager [µs]": lambda timing: format_micros(timing.eager),
        "made in [s]": lambda timing: format_optional(timing.made or None),
        "rel. error": lambda timing: f"{timing.error:.1e}",
    }
    return make_table(timings, columns, ["by"])


class _NetworkTimer:
    """The times of a network on a device, which are added to a result one by one.

    Attributes:
        model: The network, in the memory format that was set last.
        x: Its input, in the same format.
    """

    def __init__(self, result: NetworkResult, device: Device, args: argparse.Namespace) -> None:
        import torch

        from tvmconv.torch.timing import make_waiter

        self._result, self._device, self._args = result, device, args
        self._torch_device = torch.device(device.text if device.kind == "cuda" else "cpu")
        self._wait = make_waiter(self._torch_device)
        dtype = getattr(torch, dtypes.DTYPES_BY_TEXT[args.dtype].storage)
        model, shape = make_network(result.name)
        if args.image_size:
            shape = (shape[0], *(args.image_size for _ in shape[1:]))
        torch.manual_seed(0)
        has_norms = any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
        with hold_gpu(args.gpu_lock if has_norms else None):
            model = set_statistics(model.to(self._torch_device), shape)
            self._wait()
        self.x = torch.randn(args.batch, *shape).to(self._torch_device, dtype)
        self.model = model.to(dtype).requires_grad_(False)
        self._expected: Any = None  # result of the unchanged network in float64, for the first input of the batch

    def set_layout(self, layout: str) -> None:
        """Convert network and input to a memory format."""
        import torch

        channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(self.x.dim(), torch.contiguous_format)
        memory_format = channels_last if layout == "channels_last" else torch.contiguous_format
        self.x = self.x.contiguous(memory_format=memory_format)
        self.model = self.model.to(memory_format=memory_format)

    def time_network(self, label: str, network: Callable[[Any], Any], made: float = 0.0) -> NetworkTiming:
        """Return the times of a network, which was made in some seconds."""
        import torch

        from tvmconv.torch.timing import time_call, time_wall_clock

        x = self.x
        with torch.no_grad():
            if self._expected is None:
                self._expected = copy.deepcopy(self.model).double()(x[:1].double())
            error = _compute_error(network(x)[:1], self._expected)
            graph = time_call(lambda: network(x), self._torch_device)
            eager = time_wall_clock(lambda: network(x), self._wait)
        times = f"{graph * 1e6:.0f} µs in a graph, {eager * 1e6:.0f} µs eager"
        print_note(f"{self._result.name}, {label}: {times}, error {error:.1e}")
        return NetworkTiming(label, graph, eager, made, error)

    def add(self, label: str, network: Callable[[Any], Any], made: float) -> None:
        """Time a network, and add the times to the result."""
        self._result.timings.append(self.time_network(label, network, made))

    def time_layouts(self) -> None:
        """Time the unchanged network in its memory formats; the last one is that of all later timings."""
        layout = self._args.layout
        for each in [layout] if self._args.one_layout else sorted(LAYOUTS, key=layout.__eq__):
            self.set_layout(each)
            label = EAGER if each == layout else f"{EAGER}, {each}"
            self._result.timings.insert(0, self.time_network(label, self.model))

    def compile_network(self, network: Any, **settings: Any) -> tuple[Any, float]:
        """Return a network that `torch.compile` has compiled, and the seconds that this took."""
        import torch

        started_at = time.perf_counter()
        compiled = torch.compile(network, **settings)
        with torch.no_grad():
            compiled(self.x)
        seconds = time.perf_counter() - started_at
        self._wait()
        return compiled, seconds

    def compile_ahead(self, mode: str) -> tuple[Any, float]:
        """Compile the unchanged network before the GPU is free; return it, and the seconds without those of waiting."""
        compile_model = functools.partial(self.compile_network, self.model)
        (compiled, seconds), waiting_seconds = compile_ahead(compile_model, mode, self._args.gpu_lock)
        return compiled, seconds - waiting_seconds

    def time_compiled(self, label: str, network: Any, **settings: Any) -> None:
        """Compile a network, time it, and add the times to the result."""
        import torch

        torch._dynamo.reset()
        self.add(label, *self.compile_network(network, **settings))

    def time_optimized(self, label: str, log: Path | None, **settings: Any) -> Any:
        """Optimize the network, time it, and add the times to the result; return the optimized network."""
        import tvmconv.torch

        started_at = time.perf_counter()
        with progress_line(f"{self._result.name}, {label}: ") as show:
            optimized = tvmconv.torch.optimize(
                *(self.model, self.x),
                seconds=self._args.seconds,
                log=log,
                device=self._device.text,
                progress=show,
                **settings,
            )
        self.add(label, optimized, time.perf_counter() - started_at)
        return optimized


def _measure(result: NetworkResult, device: Device, args: argparse.Namespace) -> Iterator[None]:
    """Time all ways to run a network; yield whenever the result has another one."""
    import torch

    from tvmconv.torch.backend import backend

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = args.dtype == "tf32"
    torch.backends.cudnn.benchmark = True
    timer = _NetworkTimer(result, device, args)
    modes = {f"{EAGER}, compiled ({mode})": mode for mode in [*args.compile, *args.compile_unchanged]}
    compiled_networks: dict[str, tuple[Any, float]] = {}
    if args.gpu_lock:
        timer.set_layout(args.layout)
        torch.backends.cudnn.benchmark = False
        compiled_networks = {label: timer.compile_ahead(mode) for label, mode in modes.items()}
        torch.backends.cudnn.benchmark = True
    with hold_gpu(args.gpu_lock):
        timer.time_layouts()
        yield
        for label, mode in modes.items():
            if label in compiled_networks:
                timer.add(label, *compiled_networks[label])
            else:
                timer.time_compiled(label, timer.model, mode=mode)
            yield
        file = args.out / "torch.jsonl"
        log = file if args.seconds or file.exists() else None
        optimized = timer.time_optimized(OURS, log)
        result.reports[result.dtype] = optimized.report()
        yield
        for text in args.quantize:
            quantized = timer.time_optimized(f"{OURS}, {text}", log, dtype=text, calibrate=[timer.x])
            result.reports[text] = quantized.report()
            yield
        if log and log.exists() and not (args.quantize or args.once):
            timer.time_optimized(FROM_LOG, log)
            yield
        for mode in args.compile:
            timer.time_compiled(f"{OURS}, compiled ({mode})", optimized, mode=mode)
            yield
        if args.backend:
            tuned_backend = functools.partial(backend, options={"seconds": args.seconds, "log": log})
            timer.time_compiled(BY_BACKEND, timer.model, backend=tuned_backend)
            yield


def make_network(name: str) -> tuple[Any, tuple[int, ...]]:
    """Return a network with random weights, and the shape of its images."""
    if name in OWN_NETWORKS:
        from tvmconv.benchmarks import torch_networks

        return getattr(torch_networks, name)(), OWN_NETWORKS[name]
    if name.startswith(TIMM_PREFIX):
        model = _import_networks("timm").create_model(name.removeprefix(TIMM_PREFIX), pretrained=False)
        return model, tuple(model.default_cfg["input_size"])
    models = _import_networks("torchvision").models
    try:
        return models.get_model(name, weights=None), IMAGE
    except ValueError as error:
        networks = f"one of torchvision, {TIMM_PREFIX}NAME, or {', '.join(OWN_NETWORKS)}"
        raise UsageError(f"no network {name}: expected {networks}") from error


def _import_networks(package: str) -> Any:
    """Return a package of networks, or raise UsageError where it is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UsageError(f"the network needs the package {package}: pip install {package}") from error


def set_statistics(model: Any, shape: tuple[int, ...]) -> Any:
    """Return the model in evaluation mode, with batch normalizations that have the statistics of random images. Without
    them, the values vanish from layer to layer.
    """
    import torch

    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    if not norms:
        return model.eval()
    for module in norms:
        module.reset_running_stats()
        module.momentum = None  # a cumulative mean over batches
    with torch.no_grad():
        model.train()(torch.randn(NUM_STATISTICS_IMAGES, *shape, device=next(model.parameters()).device))
    return model.eval()


def _compute_error(output: Any, expected: Any) -> float:
    norm = float(expected.norm())
    return float((output.double() - expected).norm()) / norm if norm else math.nan
