"""Compile the kernels of a search on one host, and measure them on another host with a GPU.

    tvmconv bench prebuild build --suite resnet50 --dtype f16 --layout nhwc --configs 24 --arch sm_90 -o kernels.zip
    tvmconv bench prebuild measure kernels.zip --log results/resnet50-f16-nhwc.jsonl --device cuda:0
    tvmconv bench prebuild build --suite resnet50 --dtype f16 --layout nhwc --best LOG -o best.zip
    tvmconv bench prebuild list --suite resnet50 --training --dtype f16 --layout nhwc --first 16 -o configs.jsonl

A search spends most of its time on compilation. `build` takes the configs that a search would propose first, or
continues a search with the measurements of --log, and compiles them on all processors. The same command resumes an
interrupted build. `measure` verifies and times each kernel, and appends its record to a log; it needs no TVM. Then
`tvmconv bench tune-suite --compare-only` compares the fastest kernels with libraries. With --best, `build` compiles the
fastest config of each layer in logs, for `tvmconv bench chain --kernel-archive`: that of the layer, or of the layer
without its epilogue, else a default. The archive contains only plain data: JSON and machine code. `list` writes the
configs that `build` would compile, for `tvmconv bench tune-suite --configs`.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import zipfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import closing
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import tvmconv as tc
from tvmconv import devices, registry
from tvmconv.benchmarks.builder_pool import start_builders
from tvmconv.benchmarks.common import add_device, find_device, read_lines
from tvmconv.cli import options
from tvmconv.cli.errors import CommandParser, UsageError, print_note
from tvmconv.cli.progress import progress_line
from tvmconv.compiler import nvrtc
from tvmconv.compiler.executable import Executable
from tvmconv.devices import Device
from tvmconv.devices.device import Benchmark
from tvmconv.errors import Error
from tvmconv.files import check_archive, open_regular
from tvmconv.logs.candidates import DEFAULT_CONFIG, PREDICTED, iterate_candidates
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import Log, read_records
from tvmconv.logs.record import Record
from tvmconv.measure.kernel_archive import MAX_ARCHIVE_BYTES
from tvmconv.measure.pipeline import collect_resources, format_target
from tvmconv.measure.results import NUM_FINAL_ROUNDS, NUM_FINALISTS, MeasureResult, RunnerResult, merge_results
from tvmconv.measure.runner import measure_executable
from tvmconv.measure.serialization import decode_executable, encode_executable
from tvmconv.space import Config
from tvmconv.verification import Problem
from tvmconv.version import VERSION
from tvmconv.workloads import Workload

NUM_LEADING_CONFIGS = 4  # number of defaults and estimates before the first prediction

Entry = dict[str, Any]  # JSON of a kernel in an archive: what was built, and how
ArchivedKernel = tuple[Entry, Executable]


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parts = parser.add_subparsers(metavar="build|list|measure", required=True, parser_class=CommandParser)
    build = parts.add_parser("build", help="compile the configs that a search would try first")
    _add_choice(build)
    cores, text = len(os.sched_getaffinity(0)), "Number of processes (default: all processors)."
    build.add_argument("--workers", type=options.parse_workers, default=cores, metavar="N", help=text)
    text = "Archive (.zip) to add kernels to."
    build.add_argument("-o", "--output", dest="out", type=Path, required=True, metavar="FILE", help=text)
    text = "Files of `list` whose configs are compiled, in place of the other options' choice."
    build.add_argument("--list", nargs="+", type=Path, metavar="FILE", help=text)
    build.set_defaults(action=_build)
    listing = parts.add_parser("list", help="list the configs that a search would try first")
    _add_choice(listing)
    text = "File of lines of JSON to append the configs to."
    listing.add_argument("-o", "--output", dest="out", type=Path, required=True, metavar="FILE", help=text)
    listing.set_defaults(action=_list)
    measure = parts.add_parser("measure", help="verify and time the kernels of archives")
    measure.add_argument("archives", nargs="+", type=Path, metavar="FILE", help="Archives (.zip) of build.")
    add_device(measure)
    text = "Measure the I-th of N parts, so that N GPUs can work in parallel."
    measure.add_argument("--share", type=_parse_share, default=(1, 1), metavar="I/N", help=text)
    measure.add_argument("--log", type=Path, required=True, metavar="FILE", help="Log to append records to.")
    measure.set_defaults(action=_measure)


def _add_choice(parser: ArgumentParser) -> None:
    """Add the options that choose layers and configs."""
    options.add_suite_options(parser, "d2l")
    text = "Schedule to compile (default: those that a search tries)"
    options.add_option(parser, "--schedule", "S", text, repeat=True)
    options.add_option(parser, "--configs", "N", "Number of configs per schedule", type=options.parse_count, default=24)
    text = "Number of configs with which a search of all schedules starts, in place of --configs."
    parser.add_argument("--first", type=options.parse_count, metavar="N", help=text)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--log", type=Path, metavar="FILE", help="Log of trials that the tuner learns from.")
    text = "Logs whose fastest config of each layer is compiled."
    source.add_argument("--best", nargs="+", type=Path, metavar="LOG", help=text)
    options.add_option(parser, "--arch", "A", "CUDA architecture", default="sm_90")


def run(args: Namespace) -> int:
    """Build or measure the kernels."""
    return args.action(args)


def _parse_share(text: str) -> tuple[int, int]:
    """Parse the index of a part and the number of parts, for argparse."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ArgumentTypeError(f"expected I/N, such as 1/2, not {text!r}")
    return int(match[1]), int(match[2])


def _choose(args: Namespace) -> Iterator[Entry]:
    """Return the configs that the options choose."""
    if args.best and args.schedule:
        raise UsageError("--schedule and --best exclude each other: --best takes the fastest record of any schedule")
    if args.first and (args.best or args.log or args.schedule):
        raise UsageError("--first excludes --schedule, --log and --best: it takes the configs of a new search")
    return _choose_best(args) if args.best else propose_first(args) if args.first else propose(args)


def _list(args: Namespace) -> int:
    num_listed = 0
    with args.out.open("a") as file:
        for entry in _choose(args):
            print(json.dumps(entry), file=file, flush=True)
            num_listed += 1
    print(f"{num_listed} configs in {args.out}")
    return 0


def read_configs(path: Path) -> list[Entry]:
    """Return the configs of a file of `bench prebuild list`."""
    try:
        entries = [json.loads(line) for line in read_lines(path) if line.strip()]
        for entry in entries:
            identify(entry)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path}: expected configs of tvmconv bench prebuild list") from error
    return entries


def _build(args: Namespace) -> int:
    entries = [entry for path in args.list for entry in read_configs(path)] if args.list else list(_choose(args))
    archived = {identify(entry) for entry, _, _ in read_entries(args.out)} if args.out.exists() else set()
    entries = [entry for entry in entries if identify(entry) not in archived]
    num_failed, started_at = 0, time.monotonic()
    with (
        zipfile.ZipFile(args.out, "a", zipfile.ZIP_LZMA) as archive,
        start_builders(args.workers) as pool,
        progress_line(f"{args.out}: ") as show,
    ):
        futures = [pool.submit(build_entry, entry) for entry in entries]
        for number, future in enumerate(as_completed(futures), 1):
            entry, code = future.result()
            if code is None:
                num_failed += 1
                print_note(f"{entry['workload']} {entry['schedule']}: {entry['error']}")
            else:
                archive.writestr(f"{len(archived) + number}.bin", code)
                archive.writestr(f"{len(archived) + number}.json", json.dumps(entry))
            rate = number / (time.monotonic() - started_at)
            seconds_left = (len(entries) - number) / rate
            show(f"{number} of {len(entries)}, {rate:.1f}/s, {num_failed} failed, {seconds_left:.0f} s left")
    print(f"{len(entries) - num_failed} kernels in {args.out}, {len(archived)} were there")
    return 0


def propose(args: Namespace) -> Iterator[Entry]:
    """Yield the configs that a search would try next."""
    from tvmconv.search.tuners import create_tuner  # hosts that only measure need not have xgboost

    limits = devices.find_device(args.arch).limits
    for workload in dict.fromkeys(options.parse_layers(args).workloads.values()):
        chosen = [registry.find_schedule(workload, name) for name in args.schedule]
        for schedule in chosen or registry.schedules_to_tune(workload, "cuda", args.arch):
            tuner = create_tuner("gp", schedule.space(workload, limits), seed=0)
            if args.log:
                records = read_records(args.log, InvalidLines())
                tuner.tell(r for r in records if (r.workload, r.schedule) == (workload, schedule.name))
            for config in tuner.ask(args.configs):
                yield _make_entry(workload, schedule.name, config, args.arch)


def propose_first(args: Namespace) -> Iterator[Entry]:
    """Yield the configs with which a search of all schedules starts: defaults, estimates, and predictions."""
    from tvmconv.search.options import TuneOptions
    from tvmconv.search.setup import ScheduleSelection, create_search

    device = devices.find_device(args.arch)
    tune_options = TuneOptions(log=os.devnull, workers=NUM_LEADING_CONFIGS)
    for workload in dict.fromkeys(options.parse_layers(args).workloads.values()):
        schedules = registry.schedules_to_tune(workload, "cuda", args.arch)
        search = create_search(workload, ScheduleSelection(schedules), device, tune_options)
        num_remaining = args.first
        while num_remaining and (proposals := search.ask(num_remaining)):
            num_remaining -= len(proposals)
            for name, config in proposals:
                yield _make_entry(workload, name, config, args.arch)


def _choose_best(args: Namespace) -> Iterator[Entry]:
    """Yield the best candidate of each layer, and its origin."""
    device = devices.find_device(args.arch)
    for workload in dict.fromkeys(options.parse_layers(args).workloads.values()):
        best = next(iterate_candidates(args.best, workload, device))
        if best.config_source in (PREDICTED, DEFAULT_CONFIG):
            print_note(f"no record of {workload}: {best.schedule.name}, {best.config_source} knobs")
        yield _make_entry(workload, best.schedule.name, best.config, args.arch, origin=best.config_source)


def _make_entry(workload: Workload, schedule: str, config: Config, arch: str, **more: str) -> Entry:
    """Return the description of a kernel to build, with the values that JSON gives when it is read."""
    entry = {"workload": str(workload), "schedule": schedule, "config": config, "arch": arch, **more}
    return json.loads(json.dumps(entry))


def get_config(entry: Entry) -> Config:
    """Return the config of an entry, whose splits are lists in JSON."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry["config"].items()}


def identify(entry: Entry) -> str:
    """Return what distinguishes the kernel of an entry from others."""
    return json.dumps([entry[name] for name in ("workload", "schedule", "config", "arch")])


def build_entry(entry: Entry) -> tuple[Entry, bytes | None]:
    """Build a kernel, and return its entry with resources and versions, and its code; no code for a failure."""
    started_at = time.monotonic()
    try:
        workload = tc.parse(entry["workload"])
        kernel = tc.build(workload, entry["schedule"], arch=entry["arch"], config=get_config(entry))
        executable = kernel.executable
    except Error as error:
        return {**entry, "error": str(error)}, None
    header, code = encode_executable(executable, math.inf)
    entry["versions"] = {"tvmconv": VERSION, "tvm": metadata.version("apache-tvm"), "nvrtc": nvrtc.get_version()}
    entry["resources"] = collect_resources(executable)
    return {**entry, "header": header, "seconds": time.monotonic() - started_at}, code


def read_entries(path: Path) -> Iterator[tuple[Entry, bytes, Executable]]:
    """Yield the entry, the code and the executable of each kernel of an archive; kernels of a workload are adjacent."""
    try:
        with open_regular(path) as stream, zipfile.ZipFile(stream) as archive:
            check_archive(archive, MAX_ARCHIVE_BYTES)
            stems = [name.removesuffix(".json") for name in archive.namelist() if name.endswith(".json")]
            entries = {stem: json.loads(archive.read(f"{stem}.json")) for stem in stems}
            order = list(dict.fromkeys(entry["workload"] for entry in entries.values()))
            for stem in sorted(stems, key=lambda stem: order.index(entries[stem]["workload"])):
                code = archive.read(f"{stem}.bin")
                yield entries[stem], code, decode_executable(entries[stem]["header"], code)[0]
    except Exception as error:  # zipfile and zlib raise many exception types for damaged files
        raise Error(f"cannot read {path}: {error}") from error


def check_arch(entry: Entry, device: Device, path: Path) -> None:
    """Raise Error if a kernel of the archive `path` is for another architecture than that of the device."""
    if entry["arch"] != device.arch:
        raise Error(f"{path} is for {entry['arch']}, and {device.text} is {device.arch or device.kind}")


def read_archives(paths: Sequence[Path], device: Device) -> dict[str, list[ArchivedKernel]]:
    """Return the kernels of archives of `bench prebuild build`, by the text of the workload."""
    kernels: dict[str, list[ArchivedKernel]] = {}
    for path in paths:
        for entry, _, executable in read_entries(path):
            check_arch(entry, device, path)
            kernels.setdefault(entry["workload"], []).append((entry, executable))
    return kernels


def _measure(args: Namespace) -> int:
    device = find_device(args)
    log, num_measured, num_failed = Log(args.log), 0, 0
    part, num_parts = args.share
    with progress_line(f"{device.text}: ") as show:
        for path in args.archives:
            groups = groupby(read_entries(path), lambda kernel: kernel[0]["workload"])
            for number, (text, group) in enumerate(groups):
                if number % num_parts == part - 1:
                    show(f"{num_measured} kernels measured, {num_failed} failed; {text}")
                    kernels = [(entry, executable) for entry, _, executable in group]
                    for entry, _ in kernels:
                        check_arch(entry, device, path)
                    records = _measure_workload(Problem(tc.parse(text)), kernels, device, log)
                    num_measured += len(records)
                    num_failed += sum(not record.ok for record in records)
    print(f"{num_measured} kernels measured, {num_failed} failed; {args.log}")
    return 0


def _measure_workload(problem: Problem, kernels: Sequence[ArchivedKernel], device: Device, log: Log) -> list[Record]:
    """Measure a workload's kernels and append their records to a log, then time the fastest ones again, in turn."""
    tolerance = problem.workload.tolerance
    with closing(device.create_benchmark(problem.inputs, problem.expected_output)) as benchmark:
        records = measure_kernels(problem.workload, kernels, device, benchmark, log)
        fastest = select_fastest(records, kernels, NUM_FINALISTS)
        rounds = [
            [measure_executable(device, benchmark, executable, None, tolerance) for _, executable in fastest]
            for _ in range(NUM_FINAL_ROUNDS if len(fastest) > 1 else 0)
        ]
    for (entry, _), outcomes in zip(fastest, zip(*rounds, strict=True), strict=False):
        log.append(make_record(problem.workload, device, entry, merge_results(outcomes), is_final=True))
    return records


def measure_kernels(
    workload: Workload, kernels: Sequence[ArchivedKernel], device: Device, benchmark: Benchmark, log: Log
) -> list[Record]:
    """Verify and time a workload's kernels, and append their records to a log."""
    records, best_seconds = list[Record](), math.inf
    for entry, executable in kernels:
        outcome = measure_executable(device, benchmark, executable, best_seconds, workload.tolerance)
        records.append(make_record(workload, device, entry, outcome))
        log.append(records[-1])
        best_seconds = min(best_seconds, records[-1].cost)
    return records


def select_fastest(
    records: Sequence[Record], kernels: Sequence[ArchivedKernel], count: int, max_ratio: float = math.inf
) -> list[ArchivedKernel]:
    """Return the kernels of the `count` fastest valid records whose time is at most `max_ratio` times the shortest, the
    fastest first.
    """
    timed = sorted((record.cost, number) for number, record in enumerate(records) if record.ok)
    return [kernels[number] for cost, number in timed[:count] if cost <= max_ratio * timed[0][0]]


def make_record(
    workload: Workload, device: Device, entry: Entry, outcome: RunnerResult, *, is_final: bool = False
) -> Record:
    """Return the record of a measurement of an archived kernel."""
    return Record.from_measurement(
        MeasureResult(
            workload=workload,
            schedule=entry["schedule"],
            config=get_config(entry),
            device=device.name,
            target=format_target(device),
            runner_result=outcome,
            seconds=entry["seconds"] + outcome.seconds,
            timestamp=time.time(),
            resources=entry["resources"],
            versions=entry["versions"],
            is_final=is_final,
        )
    )
