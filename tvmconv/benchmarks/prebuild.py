"""Compile the kernels of a search on one host, and measure them on another, which has a GPU.

    tvmconv bench prebuild build --suite resnet50 --dtype f16 --layout nhwc --configs 24 --arch sm_90 -o kernels.zip
    tvmconv bench prebuild measure kernels.zip --log results/resnet50-f16-nhwc.jsonl --device cuda:0
    tvmconv bench prebuild build --suite resnet50 --dtype f16 --layout nhwc --best LOG -o best.zip

A search spends most of its time on compilers. `build` takes the configs that a search would propose first, or continues
a search with the measurements of --log, and compiles them on all processors. The same command continues after an
interruption. `measure` verifies and times each kernel, and appends its record to a log; it needs no TVM. Then
`tvmconv bench tune-suite --compare-only` compares the fastest kernels with libraries. With --best, `build` compiles the
fastest config of each layer in logs, for `tvmconv bench chain --kernel-archive`: without a record of its epilogue that
of the bare layer, without any record a default. The archive has plain data in it: JSON and machine code.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
import zipfile
import zlib
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import metadata
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import tvmconv as tc
from tvmconv import devices, library
from tvmconv.benchmarks.common import add_device, find_device
from tvmconv.cli.errors import Parser, UsageError, note
from tvmconv.cli.options import add_suite, chosen_layers, count, workers
from tvmconv.compiler import nvrtc
from tvmconv.compiler.program import Program
from tvmconv.devices import Device
from tvmconv.devices.base import Bench
from tvmconv.errors import Error
from tvmconv.knobs import Config
from tvmconv.knobs.space import Space, distinct
from tvmconv.logs.best import log_files
from tvmconv.logs.lines import BadLines
from tvmconv.logs.log import Log, read
from tvmconv.logs.record import Record
from tvmconv.logs.shipped import shipped_logs
from tvmconv.measuring.bench_process import measure
from tvmconv.measuring.outcome import FINAL_ROUNDS, FINALISTS, Measurement, Outcome, together
from tvmconv.measuring.pipeline import target_text
from tvmconv.measuring.wire import decode_program, encode_program
from tvmconv.verify import Problem
from tvmconv.version import VERSION
from tvmconv.workloads import Workload

NEAREST, MOST_CHANGES = 8, 3  # similar layers whose best config is changed, and the knobs changed in it
ArchivedKernel = tuple[dict[str, Any], Program]  # entry of an archive, and its program


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parts = parser.add_subparsers(metavar="build|measure", required=True, parser_class=Parser)
    build = parts.add_parser("build", help="compile the configs that a search would try first")
    add_suite(build, "d2l")
    build.add_argument("--schedule", action="append", metavar="S", help="schedule (default: those that a search tries)")
    build.add_argument(
        "--configs", type=count, default=24, metavar="N", help="configs per schedule (default: %(default)s)"
    )
    source = build.add_mutually_exclusive_group()
    source.add_argument("--log", type=Path, metavar="FILE", help="earlier measurements for the tuner to learn from")
    source.add_argument(
        "--best", nargs="+", type=Path, metavar="LOG", help="compile the fastest config of each layer in these logs"
    )
    source.add_argument(
        "--spread",
        nargs="*",
        type=Path,
        metavar="LOG",
        help="compile configs for a model to learn from: a third at random, the others like the best of these logs and "
        "of the shipped ones for similar layers",
    )
    build.add_argument("--arch", default="sm_90", help="CUDA architecture (default: %(default)s)")
    build.add_argument(
        "--workers", type=workers, default=len(os.sched_getaffinity(0)), help="processes (default: all processors)"
    )
    build.add_argument(
        "-o", "--output", dest="out", type=Path, required=True, metavar="FILE", help="add the kernels to this .zip"
    )
    build.set_defaults(do=_build)
    measuring = parts.add_parser("measure", help="verify and time the kernels of archives")
    measuring.add_argument("archives", nargs="+", type=Path, metavar="FILE", help="a .zip of build")
    add_device(measuring)
    measuring.add_argument(
        "--share",
        type=_share,
        default=(1, 1),
        metavar="I/N",
        help="measure the I-th of N parts, for N GPUs side by side",
    )
    measuring.add_argument("--log", type=Path, required=True, metavar="FILE", help="append records to this log")
    measuring.set_defaults(do=_measure)


def run(args: Namespace) -> int:
    """Build or measure."""
    return args.do(args)


def _share(text: str) -> tuple[int, int]:
    """Read which part of how many, for argparse."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ArgumentTypeError(f"{text!r}: expected I/N, such as 1/2")
    return int(match[1]), int(match[2])


def _build(args: Namespace) -> int:
    if args.best and args.schedule:
        raise UsageError("--schedule selects what is searched; --best takes the fastest record of any schedule")
    jobs = list(_best(args) if args.best else _jobs(args))
    known = {_identity(entry) for entry, _, _ in entries(args.out)} if args.out.exists() else set()
    jobs = [job for job in jobs if _identity(job) not in known]
    failed, start = 0, time.monotonic()
    with (
        zipfile.ZipFile(args.out, "a", zipfile.ZIP_LZMA) as archive,
        ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool,
    ):
        begun = [pool.submit(_built, job) for job in jobs]
        for number, done in enumerate(as_completed(begun), 1):
            entry, code = done.result()
            if code is None:
                failed += 1
                print(f"\n{entry['workload']} {entry['schedule']}: {entry['error']}", file=sys.stderr)
            else:
                name = f"{len(known) + number}"
                archive.writestr(f"{name}.bin", code)
                archive.writestr(f"{name}.json", json.dumps(entry))
            rate = number / (time.monotonic() - start)
            left = (len(jobs) - number) / rate
            print(
                f"\r{number} of {len(jobs)}, {rate:.1f}/s, {failed} failed, {left:.0f} s left ", end="", file=sys.stderr
            )
    print(f"{len(jobs) - failed} kernels in {args.out}, {len(known)} were there")
    return 0


def _jobs(args: Namespace) -> Iterator[dict[str, Any]]:
    from tvmconv.searching.tuners import make  # not where kernels are measured, which needs no xgboost

    limits = devices.find(args.arch).limits
    for workload in dict.fromkeys(layer.workload for layer in chosen_layers(args).layers.values()):
        chosen = [library.find(workload, name) for name in args.schedule or ()]
        for schedule in chosen or library.to_tune(workload, "cuda", args.arch):
            space = schedule.space(workload, limits)
            if args.spread is not None:
                proposed = _spread(space, workload, schedule.name, log_files(args.spread), args.configs)
            else:
                tuner = make("xgb", space, seed=0)
                if args.log:
                    tuner.learn(
                        r for r in read(args.log, BadLines()) if (r.workload, r.schedule) == (workload, schedule.name)
                    )
                proposed = tuner.propose(args.configs)
            for config in proposed:
                job = {"workload": str(workload), "schedule": schedule.name, "config": config, "arch": args.arch}
                yield json.loads(json.dumps(job))  # as it will be read


def _spread(space: Space, workload: Workload, schedule: str, logs: Sequence[Path], number: int) -> list[Config]:
    """Return configs of a schedule, fast ones and slow ones, for a model to learn from."""
    from tvmconv.knobs.moves import Moves
    from tvmconv.searching.known import nearest

    rng = np.random.default_rng(zlib.crc32(f"{workload} {schedule}".encode()))
    known = nearest([*logs, *shipped_logs()], workload, [schedule], "cuda", NEAREST)
    good = np.stack([space.nearest(config) for config in (space.default, *(config for _, config in known))])
    moves, tried = Moves(space), [good]
    for changes in range(1, 1 + MOST_CHANGES):
        tried.append(np.repeat(good, math.ceil(number / len(good)), axis=0))
        for _ in range(changes):
            tried[-1] = moves.mutate(tried[-1], rng)
    first, others = tried[0], rng.permutation(np.concatenate(tried[1:]))
    like = distinct(np.concatenate([first, others]))
    like = like[space.legal(like)][: number - number // 3]
    points = distinct(np.concatenate([like, space.sample(number, rng)]))[:number]
    return [space.config(point) for point in points]


def _best(args: Namespace) -> Iterator[dict[str, Any]]:
    """Yield the best candidate of each layer, and its origin."""
    from tvmconv.logs.candidates import PREDICTED, UNTUNED, candidates

    place = devices.find(args.arch)
    for workload in dict.fromkeys(layer.workload for layer in chosen_layers(args).layers.values()):
        found = next(candidates(args.best, workload, place))
        if found.origin in (PREDICTED, UNTUNED):
            note(f"no record of {workload}: {found.schedule.name}, {found.origin} knobs")
        job = {"workload": str(workload), "schedule": found.schedule.name, "config": found.config, "arch": args.arch}
        yield json.loads(json.dumps({**job, "origin": found.origin}))


def _identity(job: Mapping[str, Any]) -> str:
    return json.dumps([job[name] for name in ("workload", "schedule", "config", "arch")])


def _built(job: dict[str, Any]) -> tuple[dict[str, Any], bytes | None]:
    """Return a job with its resources and versions, and its code; None for a failure."""
    begun = time.monotonic()
    config = {name: tuple(value) if isinstance(value, list) else value for name, value in job["config"].items()}
    try:
        kernel = tc.build(tc.parse(job["workload"]), job["schedule"], arch=job["arch"], config=config)
        program, resources = kernel.program, kernel.resources
    except Error as error:
        return {**job, "error": str(error)}, None
    header, code = encode_program(program, math.inf)
    versions = {"tvmconv": VERSION, "tvm": metadata.version("apache-tvm"), "nvrtc": nvrtc.version()}
    taken = {
        "registers": resources.registers,
        "spills": resources.spills,
        "dynamic_shared_bytes": max(step.dynamic_shared_bytes for step in program.steps),
        "shared_bytes": max(step.shared_bytes for step in program.steps),
        "threads": max(step.launch.threads for step in program.steps),
        "blocks": max(step.launch.blocks for step in program.steps),
    }
    seconds = time.monotonic() - begun
    return {**job, "header": header, "resources": taken, "versions": versions, "seconds": seconds}, code


def entries(path: Path) -> Iterator[tuple[dict[str, Any], bytes, Program]]:
    """Yield the entry of each kernel of an archive, its code and its program; kernels of a workload are adjacent.

    Raises:
        Error: the file cannot be read, or is no such archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".json")]
            found = [{**json.loads(archive.read(name)), "code": name[: -len("json")] + "bin"} for name in names]
            first: dict[str, int] = {}
            for place, entry in enumerate(found):
                first.setdefault(entry["workload"], place)
            for entry in sorted(found, key=lambda entry: first[entry["workload"]]):
                code = archive.read(entry["code"])
                yield entry, code, decode_program(entry["header"], code)[0]
    except (OSError, zipfile.BadZipFile, ValueError, KeyError) as error:
        raise Error(f"cannot read {path}: {error}") from error


def _measure(args: Namespace) -> int:
    device = find_device(args)
    log, shown = Log(args.log), _MeasureProgress()
    for path in args.archives:
        for number, (workload, of_workload) in enumerate(groupby(entries(path), lambda entry: entry[0]["workload"])):
            if number % args.share[1] != args.share[0] - 1:
                continue
            problem = Problem(tc.parse(workload))
            bench = device.bench(problem.inputs, problem.expected)
            fastest: list[tuple[float, ArchivedKernel]] = []
            for entry, _, program in of_workload:
                if entry["arch"] != device.arch:
                    raise Error(f"{path} is for {entry['arch']}, and {device.text} is {device.arch or device.kind}")
                best = fastest[0][0] if fastest else math.inf
                outcome = measure(device, bench, program, best, problem.workload.tolerance)
                record = _record(problem.workload, device, entry, outcome)
                log.append(record)
                if record.ok:
                    fastest = sorted([*fastest, (record.cost, (entry, program))], key=lambda each: each[0])[:FINALISTS]
                shown.count(record)
            for entry, outcome in _race(device, bench, problem, [kernel for _, kernel in fastest]):
                log.append(_record(problem.workload, device, entry, outcome, final=True))
            bench.close()
    print(f"{shown.measured} kernels measured, {shown.failed} failed; {args.log}")
    return 0


def _race(
    device: Device, bench: Bench, problem: Problem, kernels: Sequence[ArchivedKernel]
) -> Iterator[tuple[dict[str, Any], Outcome]]:
    """Time the fastest kernels once more, in turn and for longer; yield the outcomes."""
    rounds = [
        [measure(device, bench, program, None, problem.workload.tolerance) for _, program in kernels]
        for _ in range(FINAL_ROUNDS if len(kernels) > 1 else 0)
    ]
    for (entry, _), outcomes in zip(kernels, zip(*rounds, strict=True), strict=False):
        yield entry, together(outcomes)


def _record(
    workload: Workload, device: Device, entry: Mapping[str, Any], outcome: Outcome, *, final: bool = False
) -> Record:
    """Return the record of a kernel of an archive."""
    found = Measurement(
        workload=workload,
        schedule=entry["schedule"],
        config={n: tuple(v) if isinstance(v, list) else v for n, v in entry["config"].items()},
        device=device.name,
        target=target_text(device),
        outcome=outcome,
        seconds=entry["seconds"] + outcome.seconds,
        timestamp=time.time(),
        resources=entry["resources"],
        versions=entry["versions"],
        final=final,
    )
    return Record.of(found)


class _MeasureProgress:
    """Counts kernels, and shows the progress of measuring."""

    def __init__(self) -> None:
        self.measured = self.failed = 0
        self._start = time.monotonic()

    def count(self, record: Record) -> None:
        """Count one more kernel."""
        self.measured, self.failed = self.measured + 1, self.failed + (not record.ok)
        rate = self.measured / (time.monotonic() - self._start)
        done = f"{self.measured} kernels, {rate:.1f}/s, {self.failed} failed"
        print(f"\r{done}: {record.workload.text[:60]} ", end="", file=sys.stderr)
