"""Check tvmconv's times: time the same kernels with NVBench, which flushes the L2 cache before each launch.

    tvmconv bench nvbench filter2d:4096x4096x1,5x5 filter2d:8192x8192x1,5x5 --device cuda:0 -o results
    tvmconv bench nvbench filter1d:16777216,k5 filter1d:268435456,k5 --schedule register --device cuda:0

It needs NVBench's Python bindings: pip install -e '.[bench]'. Kernels are verified first. The table compares NVBench's
mean time with the median of `Kernel.time(cold=True)`. It also shows NVBench's bandwidth for the workload's minimum
bytes, and its fraction of the peak. Results are in DIR/OPERATOR-nvbench.json and .md. The exit status is 1 if a kernel
failed.
"""

from __future__ import annotations

import argparse
import functools
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tvmconv as tc
from tvmconv.benchmarks.common import add_device, add_output, find_device
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError
from tvmconv.cli.progress import progress_line
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.devices.cuda.loaded_kernel import CudaLoadedKernel, DeviceArrays
from tvmconv.devices.device import get_first_line
from tvmconv.errors import DeviceError, Error
from tvmconv.experiments.kernel_metrics import KernelMetricsFile
from tvmconv.experiments.preparation import select_schedules
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.experiments.run import ProgressCallback
from tvmconv.optional_packages import format_install_command
from tvmconv.reports.tables import EMPTY_CELL, format_micros, format_significant, make_table
from tvmconv.verification import Problem
from tvmconv.workloads import Workload

NAME, SCHEDULE, WORKLOAD = "tvmconv", "schedule", "workload"  # names of the benchmark and its axes
SUMMARIES = ("time/gpu/mean", "time/gpu/stdev/relative", "bw/global/bytes_per_second", "bw/global/utilization")
NOT_APPLICABLE = "a schedule for another workload of the axis"


@dataclass(frozen=True)
class NvbenchRow:
    """The times of a kernel by NVBench and by tvmconv."""

    workload: str
    schedule: str
    nvbench: float  # seconds per launch, the mean of NVBench
    noise: float | None  # standard deviation divided by the mean; None if NVBench reports none
    bandwidth: float  # bytes per second: the workload's minimum bytes divided by NVBench's time
    bandwidth_share: float  # fraction of the peak memory bandwidth, 0 to 1
    ours: float  # seconds per launch, the median of `Kernel.time(cold=True)`


COLUMNS: dict[str, Callable[[NvbenchRow], str]] = {
    WORKLOAD: lambda row: row.workload,
    SCHEDULE: lambda row: row.schedule,
    "NVBench [µs]": lambda row: format_micros(row.nvbench),
    "noise": lambda row: EMPTY_CELL if row.noise is None else f"{row.noise:.1%}",
    "GB/s": lambda row: format_significant(row.bandwidth / 1e9),
    "of memory's peak": lambda row: f"{row.bandwidth_share:.1%}",
    "tvmconv [µs]": lambda row: format_micros(row.ours),
    "NVBench / tvmconv": lambda row: f"{row.nvbench / row.ours:.3f}",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD", help="Workloads of one operator.")
    text = "Schedule to time in addition to the naive one (default: all that apply)"
    options.add_option(parser, "--schedule", "S", text, repeat=True)
    add_device(parser)
    text = "Seconds of tvmconv's timing per kernel"
    options.add_option(parser, "--seconds", "S", text, type=options.parse_positive, default=0.2)
    options.add_option(parser, "--seed", "N", "Seed of the inputs", type=options.parse_seed, default=0)
    add_output(parser, None)


def run(args: argparse.Namespace) -> int:
    """Measure the kernels, then print and write the times."""
    workloads = [tc.parse(text) for text in args.workloads]
    if len(operators := dict.fromkeys(w.operator for w in workloads)) > 1:
        raise UsageError(f"expected workloads of one operator, not of {', '.join(operators)}")
    version = nvbench_version()
    device = find_device(args, "NVBench times on an NVIDIA GPU")
    assert isinstance(device, CudaDevice)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)  # fails before the measurement if it is not permitted

    names = {w: [schedule.name for schedule in select_schedules(w, args.schedule or None, device)] for w in workloads}
    with progress_line(f"{device.text}: ") as progress:
        rows, failures = measure(names, device, seed=args.seed, seconds=args.seconds, progress=progress)
    table = make_table(rows, COLUMNS, [WORKLOAD, SCHEDULE])
    source = describe_provenance(device, args.command, f"NVBench of {version}")
    notes = [*failures, source]
    output.print_report(args, [table], notes, json_data=list(map(asdict, rows)))
    if args.out:
        metrics = KernelMetricsFile(f"{workloads[0].operator}-nvbench", source, rows)
        metrics.write(args.out, "\n\n".join([table.format_markdown(), *notes]))
    return 1 if failures else 0


def nvbench_version() -> str:
    """Return the name and version of NVBench's bindings; raise DeviceError if they are missing."""
    try:
        import cuda.bench
    except ImportError as error:
        raise DeviceError(f"NVBench's Python bindings are missing: {format_install_command('cuda.bench')}") from error
    return f"cuda-bench {cuda.bench.__version__}"


def measure(
    schedule_names: Mapping[Workload, Sequence[str]],
    device: CudaDevice,
    *,
    seed: int,
    seconds: float,
    progress: ProgressCallback,
) -> tuple[list[NvbenchRow], list[str]]:
    """Run a benchmark of NVBench with workloads and schedules as its axes, which is possible once per process.

    Returns:
        The rows, and one line for each failure.
    """
    from cuda import bench

    workloads = {w.text: w for w in schedule_names}
    make_problem = functools.lru_cache(maxsize=1)(lambda text: Problem(workloads[text], seed))
    our_seconds: dict[tuple[str, str], float] = {}

    def run_state(state: Any) -> None:
        text, name = state.get_string(WORKLOAD), state.get_string(SCHEDULE)
        if name not in schedule_names[workloads[text]]:
            state.skip(NOT_APPLICABLE)
            return
        progress(f"{text}, {name}")
        try:
            kernel, problem = tc.build(workloads[text], name, device=device), make_problem(text)
            if not (verification := kernel.verify(problem)).ok:
                raise Error(f"wrong result: relative error {verification.error:.2g}")
            our_seconds[text, name] = kernel.time(problem, cold=True, seconds=seconds).median
            _run_on_stream(kernel, problem, state)
        except Error as error:
            state.skip(str(error))

    names = list(dict.fromkeys(name for names in schedule_names.values() for name in names))
    # The axis that is added last changes last, so that inputs and reference are computed once for each workload.
    benchmark = bench.register(run_state).set_name(NAME)
    benchmark.add_string_axis(SCHEDULE, names).add_string_axis(WORKLOAD, list(workloads))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "nvbench.json"
        try:
            bench.run_all_benchmarks(["nvbench", "--devices", str(device.index), "--json", str(file), "--quiet"])
        except bench.NVBenchRuntimeError as error:
            raise DeviceError(f"NVBench: {get_first_line(error)}") from error
        return read_states(file, our_seconds)


def _run_on_stream(kernel: tc.Kernel, problem: Problem, state: Any) -> None:
    """Run a kernel on NVBench's stream."""
    loaded = kernel.loaded_kernel
    assert isinstance(loaded, CudaLoadedKernel)
    output = loaded.executable.output
    state.add_global_memory_reads(kernel.workload.min_bytes - output.nbytes)
    state.add_global_memory_writes(output.nbytes)
    with (
        loaded.translate_errors(),
        DeviceArrays() as arrays,
        loaded.bind(arrays.upload_all(problem.inputs, output), state.get_stream().addressof()) as bound,
    ):
        state.exec(lambda launch: bound.launch(), batched=False)  # batches do not flush the L2 cache between launches


def read_states(file: Path, our_seconds: Mapping[tuple[str, str], float]) -> tuple[list[NvbenchRow], list[str]]:
    """Read NVBench's JSON, and return a row for each kernel with tvmconv's times, and one line for each failure."""
    from cuda.bench.results import BenchmarkResult

    rows, failures = [], []
    for state in BenchmarkResult.from_json(file)[NAME].states:
        names = state.point[WORKLOAD], state.point[SCHEDULE]
        if state.skip_reason == NOT_APPLICABLE:
            continue
        if state.is_skipped:
            failures.append(f"{' '.join(names)} failed: {state.skip_reason}")
            continue
        time, noise, bandwidth, share = (float(state.summaries[f"nv/cold/{tag}"].value) for tag in SUMMARIES)
        known_noise = noise if math.isfinite(noise) else None
        rows.append(NvbenchRow(*names, time, known_noise, bandwidth, share, our_seconds[names]))
    return rows, failures
