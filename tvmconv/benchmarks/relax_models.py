"""Time whole networks that TVM compiles: with TVM's own kernels, MetaSchedule's and tvmconv's, and beside PyTorch.

    tvmconv bench relax-models resnet50 mobilenet_v2 --dtype f16 --batch 1 --batch 16 --seconds 30 -o results
    tvmconv bench relax-models resnet50 --method tvm --method tvmconv-relax --limit 60

Each network, dtype and batch is a case. A worker process per case runs its methods one after another. Several workers
compile and search at once, and take turns at the GPU for each timing. A method that takes longer than the limit, or
ends its process, costs only itself. Two times are measured: that of calls which are queued one after another, and
that of a call with the wait for its result. PyTorch and tvmconv.torch run eagerly and in CUDA graphs, of which the
faster counts. With the method tvmconv-torch-log after tvmconv-relax, both have kernels of the same search. Outputs
are compared with the network's in float64. Results are in DIR/relax-NAME.json and .md, which are written after each
method; the log is DIR/relax.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from tvmconv.baselines.metaschedule_model import STRATEGIES
from tvmconv.benchmarks.common import add_device, add_output, find_device, write_report
from tvmconv.benchmarks.relax_methods import DTYPES, METHODS, MethodRow, NetworkCase
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.compiler.cuda_environment import make_cuda_environment
from tvmconv.devices import sharing
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.reports.tables import EMPTY_CELL, Table, format_micros, format_optional, format_speedup

HEADERS = ("by", "queued [µs]", "× TVM", "call [µs]", "made in [s]", "rel. error", "note")
NUM_KERNELS_SHOWN = 20
OTHER_METHODS = ("metaschedule", "pytorch-autotuned", "tvmconv-torch-log")  # measured on request
THREADS_VARIABLE = "OMP_NUM_THREADS"  # without it, each worker's PyTorch starts as many threads as there are cores


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("networks", nargs="+", metavar="NAME", help="Networks of torchvision.")
    options.add_option(parser, "--dtype", None, "Dtype", choices=DTYPES, repeat=True)
    options.add_option(parser, "--batch", "N", "Batch size", type=options.parse_count, repeat=True)
    text = f"Method, of {', '.join(METHODS)}; all but {', '.join(OTHER_METHODS)} by default"
    options.add_option(parser, "--method", "NAME", text, choices=METHODS, repeat=True)
    options.add_option(parser, "--seconds", "S", "Seconds of search for each case", type=options.parse_positive)
    text = "Seconds of search by MetaSchedule for each case"
    options.add_option(parser, "--metaschedule-seconds", "S", text, type=options.parse_positive, default=600.0)
    text = "MetaSchedule's choice of candidates: its default, or random ones, which takes far less processor time"
    options.add_option(parser, "--metaschedule-strategy", None, text, choices=STRATEGIES, default=STRATEGIES[0])
    text = "Folder with random candidates of bench metaschedule-candidates, which MetaSchedule times"
    options.add_option(parser, "--metaschedule-folder", "DIR", text, default="")
    text = "Time limit of each method in seconds, without the import of the network and the wait for the GPU"
    options.add_option(parser, "--limit", "S", text, type=options.parse_positive, default=900.0)
    options.add_option(parser, "--jobs", "N", "Number of worker processes", type=options.parse_count, default=1)
    parser.add_argument("--kernels", action="store_true", help="List the time of each kernel of TVM's executables.")
    add_device(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure each case, write the rows while they come, and print a table for each case."""
    device = find_device(args, "The benchmark times CUDA kernels")
    args.out.mkdir(parents=True, exist_ok=True)
    source = describe_provenance(device, args.command, f"PyTorch {_find_version('torch')}")
    results = [_CaseResult(case, args.out, source) for case in _list_cases(args, device.text)]
    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(lambda result: _run_case(result, args.limit, args.jobs), results):
            print(f"{result.case.name}\n{result.table.format_text()}", flush=True)
            for line in result.list_kernels():
                print(line, flush=True)
    if args.json or args.csv:
        tables = [result.table for result in results]
        output.print_report(args, tables, [source], title="relax-models", json_data=[r.data for r in results])
    return 0


def _find_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise UsageError(f"the benchmark needs the package {package}") from error


def _list_cases(args: argparse.Namespace, device: str) -> list[NetworkCase]:
    methods = tuple(args.method) or tuple(name for name in METHODS if name not in OTHER_METHODS)
    return [
        NetworkCase(
            network,
            dtype,
            batch,
            methods,
            args.seconds,
            args.metaschedule_seconds,
            log=str(args.out / "relax.jsonl"),
            lock=str((args.out / "gpu.lock").resolve()),
            device=device,
            is_profiled=args.kernels,
            metaschedule_strategy=args.metaschedule_strategy,
            metaschedule_folder=args.metaschedule_folder,
        )
        for dtype, network, batch in itertools.product(args.dtype or ["f16"], args.networks, args.batch or [1])
    ]


class _CaseResult:
    """The rows of a case so far, and their files."""

    def __init__(self, case: NetworkCase, folder: Path, source: str) -> None:
        self.case, self._folder, self._source = case, folder, source
        self.rows: list[MethodRow] = []

    def add(self, row: MethodRow) -> None:
        """Add a row, print it, and write the files."""
        self.rows.append(row)
        seconds = EMPTY_CELL if row.device_seconds is None else f"{format_micros(row.device_seconds)} µs"
        made = "" if row.made_seconds is None else f", made in {row.made_seconds:.1f} s"
        print_note(f"{self.case.name}: {METHODS[row.method].label}: {seconds}{made} {row.failure}")
        write_report(self._folder, self.case.name, [self.table], [self._source], self.data, self.case.name)

    @property
    def data(self) -> dict[str, Any]:
        """The content of the JSON file."""
        fields = asdict(self.case)
        data = {name: fields[name] for name in ("network", "dtype", "batch", "seconds", "metaschedule_seconds")}
        return {"name": self.case.name, **data, "provenance": self._source, "rows": [asdict(row) for row in self.rows]}

    @property
    def table(self) -> Table:
        """The table of all methods."""
        first = next((row.device_seconds for row in self.rows if row.method == "tvm"), None)
        return Table(HEADERS, [_format_row(row, first) for row in self.rows], left_aligned={"by", "note"})

    def list_kernels(self) -> Iterator[str]:
        """Yield one line for each of the slowest kernels of each method."""
        for row in self.rows:
            for name, seconds in row.details.get("kernels", [])[:NUM_KERNELS_SHOWN]:
                yield f"  {row.method}: {format_micros(seconds)} µs {name[:100]}"


def _format_row(row: MethodRow, tvm_seconds: float | None) -> tuple[str, ...]:
    seconds, made, error = row.device_seconds, row.made_seconds, row.error
    return (
        METHODS[row.method].label,
        format_micros(seconds),
        format_speedup(tvm_seconds, seconds),
        format_micros(row.call_seconds),
        format_optional(made),
        EMPTY_CELL if error is None else f"{error:.1e}",
        row.failure.replace("\n", " ")[:100] or EMPTY_CELL,
    )


def _run_case(result: _CaseResult, limit: float, num_workers: int = 1) -> _CaseResult:
    """Run the methods of a case in worker processes; a new process follows one that a method has ended."""
    threads = {THREADS_VARIABLE: str(max(len(os.sched_getaffinity(0)) // num_workers, 1))}
    remaining = list(result.case.methods)
    while remaining:
        with _start_worker(replace(result.case, methods=tuple(remaining)), result.case, threads) as process:
            for row in _read_rows(process, limit):
                if isinstance(row, str):
                    result.add(MethodRow(remaining.pop(0), failure=row))
                    break
                remaining.remove(row.method)
                result.add(row)
                if not remaining:
                    break
    return result


@contextlib.contextmanager
def _start_worker(
    case: NetworkCase, named: NetworkCase, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker, and end it together with the processes that it started. Variables that are set stay so."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from tvmconv.benchmarks.relax_methods import main; "
        f"main(sys.argv[1:], {os.getpid()})"
    )
    log = Path(case.log).with_name(f"{named.name}.log")
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(asdict(case))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**environment, sharing.LOCK_VARIABLE: case.lock, **os.environ, **make_cuda_environment()},
            start_new_session=True,  # a process group, which can be ended as a whole
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_rows(process: subprocess.Popen[bytes], limit: float) -> Iterator[MethodRow | str]:
    """Yield the rows of a worker, and at last the reason why it ends before all of its methods are done."""
    assert process.stdout is not None
    remaining, is_waiting, buffer = limit, False, b""
    while True:
        started_at = time.monotonic()
        ready, _, _ = select.select([process.stdout], [], [], None if is_waiting else max(remaining, 0))
        if not is_waiting:
            remaining -= time.monotonic() - started_at
        if not ready:
            yield f"time limit of {limit:g} s"
            return
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            yield f"the worker ended with status {process.wait()}"
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            is_waiting = event["event"] == "waiting"
            if event["event"] == "row":
                remaining = limit
                yield MethodRow(**event["row"])
