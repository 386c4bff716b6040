"""Build the kernels of a search where there is no GPU, and measure them where there is one.

    python scripts/prebuild.py build --suite resnet50 --dtype f16 --layout nhwc --configs 24 --arch sm_90 -o kernels.zip
    python scripts/prebuild.py measure kernels.zip --log results/resnet50-f16-nhwc.jsonl --device cuda:0
    python scripts/prebuild.py build --suite resnet50 --dtype f16 --layout nhwc --best LOG -o best.zip

A search spends most of its time on compilers. `build` has the tuner propose those configs that promise most, as a
search does before it knows anything, and compiles them, on all processors; the same command goes on where it was
interrupted. With a --log of what was measured of them, it goes on as a search does. `measure` verifies and times each,
and appends a record of it to a log; it needs no TVM. Then `scripts/tune_suite.py --compare-only` compares the best with
libraries. With --best, `build` compiles for each layer the fastest config of logs alone (without a record of its
epilogue, that of the bare layer; without any, a default), for scripts that take an --archive. The archive has plain
data in it: JSON and machine code.
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
from argparse import ArgumentTypeError, Namespace
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
from tvmconv.cli.errors import Parser, UsageError, guarded
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

NEAREST, MOST_CHANGES = 8, 3  # layers whose best config is changed, and knobs that are changed of it
Kernel = tuple[dict[str, Any], Program]  # what an archive says of it, and what runs


def main(argv: Sequence[str] | None = None) -> int:
    """Build or measure."""
    return guarded("prebuild", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="prebuild", description="Build kernels here, and measure them on another host.")
    parts = parser.add_subparsers(required=True)
    build = parts.add_parser("build", help="compile what a search would try first")
    add_suite(build, "d2l")
    build.add_argument("--schedule", action="append", metavar="S", help="(default: what a search tries)")
    build.add_argument("--configs", type=count, default=24, metavar="N", help="of each schedule (default: %(default)s)")
    source = build.add_mutually_exclusive_group()
    source.add_argument(
        "--log", type=Path, metavar="FILE", help="what was measured before, for the tuner to learn from"
    )
    source.add_argument(
        "--best", nargs="+", type=Path, metavar="LOG", help="instead: the fastest config of each layer in these logs"
    )
    source.add_argument(
        "--spread",
        nargs="*",
        type=Path,
        metavar="LOG",
        help="instead: to learn from, a third of the configs at random, the others like the best of these logs and of "
        "those that come with tvmconv for similar layers",
    )
    build.add_argument("--arch", default="sm_90", help="to compile for (default: %(default)s)")
    build.add_argument(
        "--workers", type=workers, default=len(os.sched_getaffinity(0)), help="processes (default: all processors)"
    )
    build.add_argument("-o", dest="out", type=Path, required=True, metavar="FILE", help="a .zip, which is added to")
    build.set_defaults(do=_build)
    measuring = parts.add_parser("measure", help="verify and time what was built")
    measuring.add_argument("archives", nargs="+", type=Path, metavar="FILE")
    measuring.add_argument("--device", default="cuda:0", help="(default: %(default)s)")
    measuring.add_argument(
        "--share", type=_share, default=(1, 1), metavar="I/N", help="only the I-th of N parts, for N GPUs side by side"
    )
    measuring.add_argument("--log", type=Path, required=True, metavar="FILE", help="append records to it")
    measuring.set_defaults(do=_measure)
    args = parser.parse_args(argv)
    return args.do(args)


def _share(text: str) -> tuple[int, int]:
    """Which part of how many, for argparse."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ArgumentTypeError(f"{text!r}: expected I/N, such as 1/2")
    return int(match[1]), int(match[2])


def _build(args: Namespace) -> int:
    if args.best and args.schedule:
        raise UsageError("--schedule is for configs that are searched, and --best takes those of any schedule")
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
    """Configs of a schedule, good ones and bad ones, for a model to learn which are which."""
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
    """The best candidate of each layer, and where it is from."""
    from tvmconv.logs.candidates import PREDICTED, UNTUNED, candidates

    place = devices.find(args.arch)
    for workload in dict.fromkeys(layer.workload for layer in chosen_layers(args).layers.values()):
        found = next(candidates(args.best, workload, place))
        if found.origin in (PREDICTED, UNTUNED):
            print(f"prebuild: no record of {workload}: {found.schedule.name}, {found.origin} knobs", file=sys.stderr)
        job = {"workload": str(workload), "schedule": found.schedule.name, "config": found.config, "arch": args.arch}
        yield json.loads(json.dumps({**job, "origin": found.origin}))


def _identity(job: Mapping[str, Any]) -> str:
    return json.dumps([job[name] for name in ("workload", "schedule", "config", "arch")])


def _built(job: dict[str, Any]) -> tuple[dict[str, Any], bytes | None]:
    """A job with what else there is to say of it, and its code; None for a failure."""
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
    """What an archive says of each kernel, its code and its program, by workload in the order of their first kernels.

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
    device = devices.find(args.device)
    log, shown = Log(args.log), _Shown()
    for path in args.archives:
        for number, (workload, of_workload) in enumerate(groupby(entries(path), lambda entry: entry[0]["workload"])):
            if number % args.share[1] != args.share[0] - 1:
                continue
            problem = Problem(tc.parse(workload))
            bench = device.bench(problem.inputs, problem.expected)
            fastest: list[tuple[float, Kernel]] = []
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
    device: Device, bench: Bench, problem: Problem, kernels: Sequence[Kernel]
) -> Iterator[tuple[dict[str, Any], Outcome]]:
    """Time the fastest kernels once more, in turn and for longer; what came of each."""
    rounds = [
        [measure(device, bench, program, None, problem.workload.tolerance) for _, program in kernels]
        for _ in range(FINAL_ROUNDS if len(kernels) > 1 else 0)
    ]
    for (entry, _), outcomes in zip(kernels, zip(*rounds, strict=True), strict=False):
        yield entry, together(outcomes)


def _record(
    workload: Workload, device: Device, entry: Mapping[str, Any], outcome: Outcome, *, final: bool = False
) -> Record:
    """The record of a kernel of an archive."""
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


class _Shown:
    """Counts kernels, and shows how far the measuring is."""

    def __init__(self) -> None:
        self.measured = self.failed = 0
        self._start = time.monotonic()

    def count(self, record: Record) -> None:
        """One kernel more."""
        self.measured, self.failed = self.measured + 1, self.failed + (not record.ok)
        rate = self.measured / (time.monotonic() - self._start)
        done = f"{self.measured} kernels, {rate:.1f}/s, {self.failed} failed"
        print(f"\r{done}: {record.workload.text[:60]} ", end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
