"""Compile the kernels of a search on one host, and measure them on another host with a GPU.

    tvmconv bench prebuild build --suite resnet50 --dtype f16 --layout nhwc --configs 24 --arch sm_90 -o kernels.zip
    tvmconv bench prebuild measure kernels.zip --log results/resnet50-f16-nhwc.jsonl --device cuda:0
    tvmconv bench prebuild build --suite resnet50 --dtype f16 --layout nhwc --best LOG -o best.zip

A search spends most of its time on compilation. `build` takes the configs that a search would propose first, or
continues a search with the measurements of --log, and compiles them on all processors. The same command resumes an
interrupted build. `measure` verifies and times each kernel, and appends its record to a log; it needs no TVM. Then
`tvmconv bench tune-suite --compare-only` compares the fastest kernels with libraries. With --best, `build` compiles the
fastest config of each layer in logs, for `tvmconv bench chain --kernel-archive`: that of the layer, or of the layer
without its epilogue, else a default. The archive contains only plain data: JSON and machine code.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import zipfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import metadata
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tvmconv as tc
from tvmconv import devices, registry
from tvmconv.benchmarks.common import add_device, find_device
from tvmconv.cli.errors import CommandParser, UsageError, print_note
from tvmconv.cli.options import add_suite_options, parse_count, parse_layers, parse_workers
from tvmconv.cli.progress import progress_line
from tvmconv.compiler import nvrtc
from tvmconv.compiler.executable import Executable
from tvmconv.devices import Device
from tvmconv.devices.device import Benchmark
from tvmconv.errors import Error
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import Log, read_records
from tvmconv.logs.record import Record
from tvmconv.measure.pipeline import format_target
from tvmconv.measure.results import NUM_FINAL_ROUNDS, NUM_FINALISTS, MeasureResult, RunnerResult, merge_results
from tvmconv.measure.runner_process import measure_executable
from tvmconv.measure.serialization import decode_executable, encode_executable
from tvmconv.space import Config
from tvmconv.verification import Problem
from tvmconv.version import VERSION
from tvmconv.workloads import Workload

ArchivedKernel = tuple[dict[str, Any], Executable]  # entry of an archive, and its compiled kernels


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parts = parser.add_subparsers(metavar="build|measure", required=True, parser_class=CommandParser)
    build = parts.add_parser("build", help="compile the configs that a search would try first")
    add_suite_options(build, "d2l")
    build.add_argument(
        "--schedule", action="append", metavar="S", help="Schedule to compile (default: those that a search tries)."
    )
    build.add_argument(
        "--configs",
        type=parse_count,
        default=24,
        metavar="N",
        help="Number of configs per schedule (default: %(default)s).",
    )
    source = build.add_mutually_exclusive_group()
    source.add_argument("--log", type=Path, metavar="FILE", help="Log of trials that the tuner learns from.")
    source.add_argument(
        "--best", nargs="+", type=Path, metavar="LOG", help="Logs whose fastest config of each layer is compiled."
    )
    build.add_argument("--arch", default="sm_90", help="CUDA architecture (default: %(default)s).")
    build.add_argument(
        "--workers",
        type=parse_workers,
        default=len(os.sched_getaffinity(0)),
        help="Number of processes (default: all processors).",
    )
    build.add_argument(
        "-o", "--output", dest="out", type=Path, required=True, metavar="FILE", help="Archive (.zip) to add kernels to."
    )
    build.set_defaults(do=_build)
    measuring = parts.add_parser("measure", help="verify and time the kernels of archives")
    measuring.add_argument("archives", nargs="+", type=Path, metavar="FILE", help="Archives (.zip) of build.")
    add_device(measuring)
    measuring.add_argument(
        "--share",
        type=_share,
        default=(1, 1),
        metavar="I/N",
        help="Measure the I-th of N parts, so that N GPUs can work in parallel.",
    )
    measuring.add_argument("--log", type=Path, required=True, metavar="FILE", help="Log to append records to.")
    measuring.set_defaults(do=_measure)


def run(args: Namespace) -> int:
    """Build or measure the kernels."""
    return args.do(args)


def _share(text: str) -> tuple[int, int]:
    """Parse the index of a part and the number of parts, for argparse."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ArgumentTypeError(f"expected I/N, such as 1/2, not {text!r}")
    return int(match[1]), int(match[2])


def _build(args: Namespace) -> int:
    if args.best and args.schedule:
        raise UsageError("--schedule and --best exclude each other: --best takes the fastest record of any schedule")
    jobs = list(_best(args) if args.best else _jobs(args))
    known = {_identity(entry) for entry, _, _ in entries(args.out)} if args.out.exists() else set()
    jobs = [job for job in jobs if _identity(job) not in known]
    failed, start = 0, time.monotonic()
    with (
        zipfile.ZipFile(args.out, "a", zipfile.ZIP_LZMA) as archive,
        ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool,
        progress_line(f"{args.out}: ") as show,
    ):
        for number, done in enumerate(as_completed([pool.submit(_built, job) for job in jobs]), 1):
            entry, code = done.result()
            if code is None:
                failed += 1
                print_note(f"{entry['workload']} {entry['schedule']}: {entry['error']}")
            else:
                archive.writestr(f"{len(known) + number}.bin", code)
                archive.writestr(f"{len(known) + number}.json", json.dumps(entry))
            rate = number / (time.monotonic() - start)
            show(f"{number} of {len(jobs)}, {rate:.1f}/s, {failed} failed, {(len(jobs) - number) / rate:.0f} s left")
    print(f"{len(jobs) - failed} kernels in {args.out}, {len(known)} were there")
    return 0


def _jobs(args: Namespace) -> Iterator[dict[str, Any]]:
    from tvmconv.search.tuners import create_tuner  # hosts that only measure need not have xgboost

    limits = devices.find_device(args.arch).limits
    for workload in dict.fromkeys(layer.workload for layer in parse_layers(args).layers.values()):
        chosen = [registry.find_schedule(workload, name) for name in args.schedule or ()]
        for schedule in chosen or registry.schedules_to_tune(workload, "cuda", args.arch):
            space = schedule.space(workload, limits)
            tuner = create_tuner("gp", space, seed=0)
            if args.log:
                records = read_records(args.log, InvalidLines())
                tuner.tell(r for r in records if (r.workload, r.schedule) == (workload, schedule.name))
            for config in tuner.ask(args.configs):
                yield _job(workload, schedule.name, config, args.arch)


def _best(args: Namespace) -> Iterator[dict[str, Any]]:
    """Yield the best candidate of each layer, and its origin."""
    from tvmconv.logs.candidates import DEFAULT_CONFIG, PREDICTED, iterate_candidates

    device = devices.find_device(args.arch)
    for workload in dict.fromkeys(layer.workload for layer in parse_layers(args).layers.values()):
        best = next(iterate_candidates(args.best, workload, device))
        if best.config_source in (PREDICTED, DEFAULT_CONFIG):
            print_note(f"no record of {workload}: {best.schedule.name}, {best.config_source} knobs")
        yield _job(workload, best.schedule.name, best.config, args.arch, origin=best.config_source)


def _job(workload: Workload, schedule: str, config: Config, arch: str, **more: str) -> dict[str, Any]:
    """Return the description of a kernel to build, with the values that JSON gives when it is read."""
    job = {"workload": str(workload), "schedule": schedule, "config": config, "arch": arch, **more}
    return json.loads(json.dumps(job))


def _config(job: Mapping[str, Any]) -> Config:
    """Return a job's config, whose splits are lists in JSON."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in job["config"].items()}


def _identity(job: Mapping[str, Any]) -> str:
    return json.dumps([job[name] for name in ("workload", "schedule", "config", "arch")])


def _built(job: dict[str, Any]) -> tuple[dict[str, Any], bytes | None]:
    """Build a job, and return it with its resources and versions, and its code; the code is None for a failure."""
    started_at = time.monotonic()
    try:
        kernel = tc.build(tc.parse(job["workload"]), job["schedule"], arch=job["arch"], config=_config(job))
        program, resources = kernel.executable, kernel.resources
    except Error as error:
        return {**job, "error": str(error)}, None
    header, code = encode_executable(program, math.inf)
    versions = {"tvmconv": VERSION, "tvm": metadata.version("apache-tvm"), "nvrtc": nvrtc.get_version()}
    taken = {
        "registers": resources.registers,
        "spills": resources.spills,
        "dynamic_shared_bytes": max(step.dynamic_shared_bytes for step in program.kernels),
        "shared_bytes": max(step.shared_bytes for step in program.kernels),
        "threads": max(step.launch.threads_per_block for step in program.kernels),
        "blocks": max(step.launch.num_blocks for step in program.kernels),
    }
    seconds = time.monotonic() - started_at
    return {**job, "header": header, "resources": taken, "versions": versions, "seconds": seconds}, code


def entries(path: Path) -> Iterator[tuple[dict[str, Any], bytes, Executable]]:
    """Yield the entry, the code and the executable of each kernel of an archive; kernels of a workload are adjacent.

    Raises:
        Error: The file cannot be read, or is not such an archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".json")]
            found = [{**json.loads(archive.read(name)), "code": name[: -len("json")] + "bin"} for name in names]
            order = list(dict.fromkeys(entry["workload"] for entry in found))
            for entry in sorted(found, key=lambda entry: order.index(entry["workload"])):
                code = archive.read(entry["code"])
                yield entry, code, decode_executable(entry["header"], code)[0]
    except (OSError, zipfile.BadZipFile, ValueError, KeyError) as error:
        raise Error(f"cannot read {path}: {error}") from error


def _measure(args: Namespace) -> int:
    device = find_device(args)
    log, measured, failed = Log(args.log), 0, 0
    chosen, parts = args.share
    with progress_line(f"{device.text}: ") as show:
        for path in args.archives:
            for number, (text, kernels) in enumerate(groupby(entries(path), lambda entry: entry[0]["workload"])):
                if number % parts == chosen - 1:
                    show(f"{measured} kernels measured, {failed} failed; {text}")
                    archived = [(entry, program) for entry, _, program in kernels]
                    records = list(_records(Problem(tc.parse(text)), archived, device, log, path))
                    measured, failed = measured + len(records), failed + sum(not record.ok for record in records)
    print(f"{measured} kernels measured, {failed} failed; {args.log}")
    return 0


def _records(
    problem: Problem, kernels: Sequence[ArchivedKernel], device: Device, log: Log, path: Path
) -> Iterator[Record]:
    """Measure a workload's kernels and append their records to a log, then time the fastest ones again."""
    bench = device.create_benchmark(problem.inputs, problem.expected_output)
    fastest: list[tuple[float, ArchivedKernel]] = []
    for entry, program in kernels:
        if entry["arch"] != device.arch:
            raise Error(f"{path} is for {entry['arch']}, and {device.text} is {device.arch or device.kind}")
        best = fastest[0][0] if fastest else math.inf
        outcome = measure_executable(device, bench, program, best, problem.workload.tolerance)
        record = _record(problem.workload, device, entry, outcome)
        log.append(record)
        if record.ok:
            fastest = sorted([*fastest, (record.cost, (entry, program))], key=lambda each: each[0])[:NUM_FINALISTS]
        yield record
    for entry, outcome in _race(device, bench, problem, [kernel for _, kernel in fastest]):
        log.append(_record(problem.workload, device, entry, outcome, final=True))
    bench.close()


def _race(
    device: Device, bench: Benchmark, problem: Problem, kernels: Sequence[ArchivedKernel]
) -> Iterator[tuple[dict[str, Any], RunnerResult]]:
    """Time the fastest kernels again, in turn and for longer, and yield the results."""
    rounds = [
        [measure_executable(device, bench, program, None, problem.workload.tolerance) for _, program in kernels]
        for _ in range(NUM_FINAL_ROUNDS if len(kernels) > 1 else 0)
    ]
    for (entry, _), outcomes in zip(kernels, zip(*rounds, strict=True), strict=False):
        yield entry, merge_results(outcomes)


def _record(
    workload: Workload, device: Device, entry: Mapping[str, Any], outcome: RunnerResult, *, final: bool = False
) -> Record:
    """Return the record of a kernel of an archive."""
    found = MeasureResult(
        workload=workload,
        schedule=entry["schedule"],
        config=_config(entry),
        device=device.name,
        target=format_target(device),
        runner_result=outcome,
        seconds=entry["seconds"] + outcome.seconds,
        timestamp=time.time(),
        resources=entry["resources"],
        versions=entry["versions"],
        is_final=final,
    )
    return Record.from_measurement(found)
