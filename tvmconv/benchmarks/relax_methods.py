"""The ways to run a network that `tvmconv bench relax-models` times, each in a worker process of the benchmark.

The worker gets a case as JSON, and writes one line of JSON to its standard output for each event: "waiting" before it
imports the network and before it waits for the GPU, "running" afterwards, and a row for each method. Several workers
may compile and search at once, and take turns at the GPU (`tvmconv.devices.sharing`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tvmconv import devices
from tvmconv.compiler.tensor_intrinsics import import_tensor_intrinsics
from tvmconv.devices import sharing
from tvmconv.errors import Error, describe_error
from tvmconv.measure.workers.process import set_parent_death_signal

TIMING_SECONDS = 0.3  # device time of a timing
NUM_PROFILED_CALLS = 5
CHANNELS_LAST = {"relax.nn.conv2d": ["NHWC", "OHWI"]}
DTYPES = ("f32", "tf32", "f16", "bf16")
FAILURES = (AssertionError, Error, RuntimeError, TypeError, ValueError)  # dlight's rules raise AssertionError
METHODS_OF_PYTORCH = frozenset(
    ["pytorch", "pytorch-compiled", "pytorch-autotuned", "tvmconv-torch", "tvmconv-torch-log"]
)
METHODS_OF_TVM = frozenset(["tvm", "tvm-nhwc", "metaschedule"])  # which schedule convolutions by TVM's rules


@dataclass(frozen=True)
class NetworkCase:
    """A network, its dtype and batch, and how it is timed."""

    network: str
    dtype: str  # of `DTYPES`
    batch: int
    methods: tuple[str, ...]
    seconds: float | None  # of a search by tvmconv
    metaschedule_seconds: float
    log: str
    lock: str  # path of the file whose lock is held while the GPU is used, unless TVMCONV_GPU_LOCK names another
    device: str = "cuda:0"
    is_profiled: bool = False
    metaschedule_strategy: str = "evolutionary"
    metaschedule_folder: str = ""  # with a folder of candidates and times for each case

    @property
    def name(self) -> str:
        """Name of the files of results."""
        return "-".join(["relax", self.network, self.dtype, *([f"b{self.batch}"] if self.batch > 1 else [])])


@dataclass(frozen=True)
class MethodRow:
    """The result of one method.

    Attributes:
        method: Key of `METHODS`.
        device_seconds: Seconds per call of calls that are queued one after another; None if the method failed.
        call_seconds: Seconds of a call and the wait for its result.
        made_seconds: Seconds from the network, for TVM imported into Relax, until it could run: compilation and search.
        error: Relative L2 difference from the network in float64, for the first image.
        failure: Reason why there is no time.
        details: What the method reports, such as the kernel of each layer.
    """

    method: str
    device_seconds: float | None = None
    call_seconds: float | None = None
    made_seconds: float | None = None
    error: float | None = None
    failure: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def _convert_between_float32(network: Any) -> Any:
    """Return a network of PyTorch in bfloat16 with inputs and outputs in float32."""
    import torch

    class BetweenFloat32(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Any) -> Any:
            return self.network(x.bfloat16()).float()

    return BetweenFloat32().eval()


class Worker:
    """The network of a case, in PyTorch and in Relax, and the timing of calls. Everything is made when it is needed."""

    def __init__(self, case: NetworkCase, write_event: Callable[[dict[str, Any]], None]) -> None:
        self.case, self._write_event = case, write_event
        self.device = devices.find_device(case.device)
        self.waited_seconds = 0.0

    @functools.cached_property
    def network(self) -> Any:
        """The network of PyTorch on the CPU in float32, with random weights that depend on its name alone."""
        import torch

        from tvmconv.benchmarks.torch_models import make_network, set_statistics

        torch.manual_seed(0)
        network, shape = make_network(self.case.network)
        self.shape = (self.case.batch, *shape)
        return set_statistics(network, shape).requires_grad_(False)

    @functools.cached_property
    def example(self) -> Any:
        """A batch of random images on the CPU in float32."""
        import torch

        assert self.network is not None  # sets the shape
        return torch.randn(*self.shape, generator=torch.Generator().manual_seed(1))

    @functools.cached_property
    def expected(self) -> Any:
        """The network's output in float64 for the first image."""
        import torch

        with torch.no_grad():
            return copy.deepcopy(self.network).double()(self.example[:1].double())

    @functools.cached_property
    def module(self) -> Any:
        """The network as a module of Relax in the case's dtype, with inputs and outputs in float32."""
        import torch

        import tvmconv.relax

        network = self.network
        if self.case.dtype == "bf16":
            network = _convert_between_float32(copy.deepcopy(network).bfloat16())
        with torch.no_grad():
            module = tvmconv.relax.from_exported_program(torch.export.export(network, (self.example,)))
        return tvmconv.relax.to_float16(module) if self.case.dtype == "f16" else module

    @functools.cached_property
    def channels_last_module(self) -> Any:
        """The module with channels-last convolutions."""
        import tvm
        from tvm import relax

        passes = [relax.transform.ConvertLayout(CHANNELS_LAST), relax.transform.FoldConstant()]
        return tvm.ir.transform.Sequential(passes)(self.module)

    @functools.cached_property
    def optimized(self) -> Any:
        """The module optimized by tvmconv, after a search if the case has a time for it."""
        import tvmconv.relax

        case = self.case
        return tvmconv.relax.optimize_with_report(
            self.module, case.device, log=self.find_log(), seconds=case.seconds, tf32=case.dtype == "tf32"
        )

    def find_log(self) -> str | None:
        """Return the log if a search will write it, or one has written it."""
        return self.case.log if self.case.seconds or Path(self.case.log).exists() else None

    def get_torch_example(self) -> Any:
        """Return the batch on the GPU in the case's dtype, channels last."""
        import torch

        dtype = {"f16": torch.float16, "bf16": torch.bfloat16}.get(self.case.dtype, torch.float32)
        return self.example.to(self.case.device, dtype).contiguous(memory_format=torch.channels_last)

    def get_torch_network(self) -> Any:
        """Return the network on the GPU in the case's dtype, channels last."""
        import torch

        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self.case.dtype == "tf32"
        x = self.get_torch_example()
        return copy.deepcopy(self.network).to(self.case.device, x.dtype, memory_format=torch.channels_last)

    @contextlib.contextmanager
    def use_gpu(self) -> Iterator[None]:
        """Wait until no other process uses the GPU."""
        self._write_event({"event": "waiting"})
        started_at = time.monotonic()
        with sharing.hold_gpu():
            self.waited_seconds += time.monotonic() - started_at
            self._write_event({"event": "running"})
            yield

    def prepare_inputs(self, method: str) -> None:
        """Make what a method gets, so that its time leaves that out: the network, its output in float64, and
        the module of Relax unless the method is PyTorch's.
        """
        import torch  # noqa: F401

        assert self.expected is not None
        if method not in METHODS_OF_PYTORCH:
            assert self.module is not None

    def run(self, method: str) -> MethodRow:
        """Prepare and time one method."""
        self._write_event({"event": "waiting"})  # what all methods need counts for none of them
        prepare = METHODS[method].prepare
        try:
            self.prepare_inputs(method)
            self._write_event({"event": "running"})
            started_at, self.waited_seconds = time.monotonic(), 0.0
            time_it, details = prepare(self)
            made_seconds = time.monotonic() - started_at - self.waited_seconds
            with self.use_gpu():
                return MethodRow(method, *time_it(), made_seconds=made_seconds, **self._finish(details))
        except FAILURES as error:
            return MethodRow(method, failure=describe_error(error)[:500])

    def _finish(self, details: dict[str, Any]) -> dict[str, Any]:
        return {"error": details.pop("error", None), "details": details}


Timed = tuple[float, float]  # seconds of the device per call, and of a call
Prepared = tuple[Callable[[], Timed], dict[str, Any]]


def time_calls(call: Callable[[], object], stream: int, synchronize: Callable[[], None]) -> Timed:
    """Return the seconds per call of queued calls on a stream, and of a call with the wait for its result."""
    from tvmconv.devices.cuda.graphs import time_replay
    from tvmconv.torch.timing import time_wall_clock

    def run() -> None:
        call()

    device_seconds = statistics.median(time_replay(run, stream, TIMING_SECONDS))
    return device_seconds, time_wall_clock(run, synchronize)


def compute_error(output: Any, expected: Any) -> float:
    """Return the relative L2 difference of the first image's output from the expected one."""
    first = output[:1].detach().cpu().double()
    return float((first - expected).norm() / expected.norm())


def _prepare_executable(worker: Worker, executable: Any, details: dict[str, Any]) -> Prepared:
    """Return a function that times an executable of TVM on the GPU."""
    import torch
    import tvm
    import tvm_ffi
    from tvm import relax

    index = int(worker.case.device.partition(":")[2] or 0)
    machine = relax.VirtualMachine(executable, tvm.cuda(index))

    def time_it() -> Timed:
        from tvmconv.devices import cuda
        from tvmconv.devices.cuda.graphs import check_cuda, create_stream

        main = machine["main"]
        x = tvm.runtime.tensor(worker.example.numpy(), tvm.cuda(index))
        with create_stream(index) as stream, tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", index), stream):

            def synchronize() -> None:
                check_cuda(cuda.runtime.cudaStreamSynchronize(stream))

            output = main(x)
            synchronize()
            first = output if isinstance(output, tvm.runtime.Tensor) else output[0]
            details["error"] = compute_error(torch.from_numpy(first.numpy()), worker.expected)
            if worker.case.is_profiled:
                details["kernels"] = profile_kernels(lambda: main(x))
            return time_calls(lambda: main(x), stream, synchronize)

    return time_it, details


def profile_kernels(call: Callable[[], object]) -> list[tuple[str, float]]:
    """Return the names of the kernels that a call launches, and the seconds of each per call, the slowest first."""
    import torch

    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(NUM_PROFILED_CALLS):
            call()
        torch.cuda.synchronize()
    totals = {event.key: event.device_time_total * 1e-6 / NUM_PROFILED_CALLS for event in profile.key_averages()}
    return sorted(totals.items(), key=lambda item: -item[1])


def _prepare_torch(worker: Worker, network: Callable[[Any], Any], details: dict[str, Any]) -> Prepared:
    """Return a function that times a network of PyTorch eagerly and in a CUDA graph, and returns the faster one's."""
    import torch

    x = worker.get_torch_example()

    def time_it() -> Timed:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(3):
                output = network(x)
            stream.synchronize()
            details["error"] = compute_error(output, worker.expected)
            eager = time_calls(lambda: network(x), stream.cuda_stream, stream.synchronize)
            with torch.cuda.graph(graph, stream=stream):
                network(x)
            captured = time_calls(graph.replay, stream.cuda_stream, stream.synchronize)
            details.update(eager_seconds=eager[0], graph_seconds=captured[0])
            return min(eager, captured)

    return time_it, details


def _prepare_tvm(worker: Worker, *, is_channels_last: bool = False) -> Prepared:
    import tvm

    module = worker.channels_last_module if is_channels_last else worker.module
    return _prepare_executable(worker, tvm.compile(module, worker.device.make_target()), {})


def get_metaschedule_module(worker: Worker) -> Any:
    """Return the module that MetaSchedule tunes, channels last in float16 for tensor cores."""
    return worker.channels_last_module if worker.case.dtype == "f16" else worker.module


def _prepare_metaschedule(worker: Worker) -> Prepared:
    from tvmconv.baselines import metaschedule_model

    module = get_metaschedule_module(worker)
    log = Path(worker.case.log).with_name(f"{worker.case.name}-metaschedule.log")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(worker.case.metaschedule_folder or name) / worker.case.name
        folder.mkdir(parents=True, exist_ok=True)
        is_random = (
            bool(worker.case.metaschedule_folder)
            or worker.case.metaschedule_strategy == metaschedule_model.STRATEGIES[1]
        )
        search = metaschedule_model.sample_module if is_random else metaschedule_model.tune_module
        result = search(
            module,
            worker.device,
            folder,
            log=log,
            seconds=worker.case.metaschedule_seconds,
        )
        executable, num_scheduled = metaschedule_model.compile_module(module, worker.device, folder)
        return _prepare_executable(worker, executable, asdict(result) | {"num_scheduled": num_scheduled})


def _prepare_pytorch(worker: Worker) -> Prepared:
    with worker.use_gpu():
        return _prepare_torch(worker, worker.get_torch_network(), {})


def _prepare_pytorch_compiled(worker: Worker, *, mode: str = "default") -> Prepared:
    import torch

    with torch.no_grad():  # without the GPU's lock, because the compiler uses the host for most of the time
        network = torch.compile(worker.get_torch_network(), mode=mode)
        network(worker.get_torch_example())
    return _prepare_torch(worker, network, {})


def _prepare_tvmconv_torch(worker: Worker, *, searches: bool = True) -> Prepared:
    import tvmconv.torch

    case = worker.case
    network, x = worker.get_torch_network(), worker.get_torch_example()
    seconds = case.seconds if searches else None
    optimized = tvmconv.torch.optimize(network, x, seconds=seconds, log=worker.find_log(), device=case.device)
    return _prepare_torch(worker, optimized, {"lines": [asdict(line) for line in optimized.report().lines]})


def _prepare_tvmconv_relax(worker: Worker, *, cuda_graph: bool = True) -> Prepared:
    optimized = worker.optimized
    started_at = time.monotonic()
    prepared = _prepare_executable(worker, optimized.compile(cuda_graph=cuda_graph), asdict(optimized.report))
    prepared[1]["phase_seconds"]["compile"] = time.monotonic() - started_at
    return prepared


@dataclass(frozen=True)
class Method:
    """A way to run a network."""

    label: str
    prepare: Callable[[Worker], Prepared]


METHODS = {
    "tvm": Method("TVM", _prepare_tvm),
    "tvm-nhwc": Method("TVM, channels last", functools.partial(_prepare_tvm, is_channels_last=True)),
    "pytorch": Method("PyTorch", _prepare_pytorch),
    "pytorch-compiled": Method("PyTorch, compiled", _prepare_pytorch_compiled),
    "pytorch-autotuned": Method(
        "PyTorch, max-autotune", functools.partial(_prepare_pytorch_compiled, mode="max-autotune-no-cudagraphs")
    ),
    "tvmconv-relax": Method("tvmconv.relax", _prepare_tvmconv_relax),
    "tvmconv-launches": Method(
        "tvmconv.relax, no CUDA graph", functools.partial(_prepare_tvmconv_relax, cuda_graph=False)
    ),
    "tvmconv-torch": Method("tvmconv.torch", _prepare_tvmconv_torch),
    "tvmconv-torch-log": Method(
        "tvmconv.torch, from the log", functools.partial(_prepare_tvmconv_torch, searches=False)
    ),
    "metaschedule": Method("MetaSchedule", _prepare_metaschedule),
}


def main(argv: list[str], parent_pid: int) -> None:
    """Run the methods of the case whose JSON is the argument, at most until the parent ends. What they print goes to
    standard error.
    """
    set_parent_death_signal(parent_pid)
    events = os.dup(1)
    os.dup2(2, 1)

    def write_event(event: dict[str, Any]) -> None:
        os.write(events, f"{json.dumps(event)}\n".encode())

    case = NetworkCase(**json.loads(argv[0]))
    worker = Worker(case, write_event)
    if case.dtype in {"f16", "bf16"} and not METHODS_OF_TVM.isdisjoint(case.methods):
        write_event({"event": "waiting"})  # a process imports them once, and no method's time has that
        import_tensor_intrinsics()
    for method in case.methods:
        write_event({"event": "row", "row": asdict(worker.run(method))})
