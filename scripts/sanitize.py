"""Run every schedule under compute-sanitizer: illegal accesses (memcheck) and races in shared memory (racecheck).

    python scripts/sanitize.py --device cuda:0 conv2d:1x13x17x19,11x13x3x3,s1,p1
    python scripts/sanitize.py --device cuda:0 --schedule winograd --num-configs 6 conv2d:2x24x13x17,20x24x3x3,s1,p1
    python scripts/sanitize.py --device cuda:0 --archive kernels.zip

With --archive, the kernels of an archive of `tvmconv bench prebuild build` run instead, without TVM and its compilers,
which take most of the time under compute-sanitizer.

It needs compute-sanitizer on the PATH, and prints a line for each tool and workload. The exit status is 1 if a tool
reports an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np

import tvmconv as tc
from tvmconv import devices
from tvmconv.benchmarks.prebuild import read_entries
from tvmconv.cli import options
from tvmconv.cli.errors import CommandParser, run_guarded
from tvmconv.errors import DeviceError
from tvmconv.space import Config
from tvmconv.target import BlockLimits
from tvmconv.workloads import Workload

# Errors of the driver's API are not reported, because cuda-bindings looks up the functions of all driver versions.
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
NUM_PROCESSES = os.cpu_count() or 1  # number of concurrent processes, as the GPU mostly waits for compilers
ERROR_STATUS = 9  # exit status of compute-sanitizer if it reports an error

# All options together, primes, a single pixel, a filter larger than the image, more columns than threads, large tiles.
WORKLOADS = (
    "conv2d:2x8x9x13,12x4x3x5,s2x1,p1x2x0x1,d1x2,g2",
    "conv2d:1x13x17x19,11x13x3x3,s1,p1",
    "conv2d:1x3x5x5,4x3x5x5,s1,p0",
    "conv2d:1x8x3x3,8x8x31x31,s1,p15",
    "conv2d:1x3x4x1025,5x3x3x3,s1,p1",
    "conv2d:1x5x113x127,33x5x3x3,s1,p1",
    "conv2d:2x6x11x11,12x1x3x3,s2,p1,g6",
    "conv2d:1x64x57x58,64x1x3x3,s2,p1,g64",
    "conv2d:1x2x100x700,8x2x3x3,s9,p1",
    "conv2d:1x3x120x113,17x3x3x3,s1,p1",
    "conv2d:1x13x17x19,11x13x3x3,s1,p1,f16,nhwc,bias,add,silu",
    "conv2d:2x8x9x13,12x4x3x5,s2x1,p1x2x0x1,d1x2,g2,bf16,bias,relu",
    "conv2d:1x64x14x14,48x64x3x3,s1,p1,f16,bias,gelu",
    "conv2d:2x6x11x11,12x1x3x3,s2,p1,g6,bf16,nhwc,clamp",
    "conv1d:2x12x517,18x4x9,s3,p4x2,g3,bf16,bias",
    "conv2d:1x64x9x9,40x64x3x3,s1,p1,f16,nhwc,bias,add,relu",  # this one and the next six: tensor cores
    "conv2d:2x24x11x7,72x24x3x3,s2,p0x1x1x2,bf16,nhwc,relu,add",
    "conv2d:1x36x9x9,20x36x3x3,s1,p2,d2,tf32,nhwc,bias",
    "conv2d:1x128x5x5,48x128x3x3,s1,p1,f16,nhwc",
    "conv2d:2x32x9x11,48x16x3x3,s2x1,p1,g2,bf16,nhwc,gelu",
    "conv2d:1x3x37x41,24x3x7x7,s2,p3,f16,nhwc,bias,relu",
    "conv2d:2x24x17x13,24x1x5x5,s1,p2,g24,f16,nhwc,bias,silu",
    "conv3d:1x8x5x9x11,12x8x3x3x3,s1x2x1,p1,f16,nhwc,bias,add,relu",
    "conv2d_dgrad:2x8x9x7,12x8x3x3,s2x1,p1,add,drelu",  # this one and the next eleven: gradients and transposed
    "conv2d_dgrad:2x64x9x11,48x64x3x3,s2,p1,f16,nhwc",
    "conv2d_dgrad:2x64x9x11,48x64x3x3,s1,p1,bf16,nhwc",
    "conv2d_dgrad:2x24x13x11,24x1x5x5,s2,p2,g24,f16,nhwc",
    "conv2d_dgrad:2x48x13x11,48x24x3x3,s1,p1,g2,f16,nhwc",
    "conv2d_wgrad:3x64x9x11,48x64x3x3,s2,p1,f16,nhwc",
    "conv2d_wgrad:3x24x13x11,24x1x3x3,s1,p1,g24,bf16,nhwc",
    "conv2d_wgrad:3x48x13x11,48x24x3x3,s1,p1,g2,f16,nhwc,out-f32,add",
    "conv1d_transpose:2x64x37,64x48x8,s4,p2,f16,nhwc,bias,relu",
    "conv3d_transpose:1x64x3x5x7,64x32x2x2x2,s2,p0,op1x0x1,f16,nhwc",
    "conv2d_wgrad:2x32x9x11,32x32x3x3,s1,p1,tf32,nhwc",
    "conv2d_dgrad:3x24x13x11,72x24x1x1,s1,p0,f16,nhwc",
    "conv2d:2x64x9x16,48x64x3x3,s1,p1,f16,bias,relu",  # this one and the next eight: channels first
    "conv2d:2x64x14x14,72x64x1x1,s1,p0,bf16,bias,add",
    "conv2d:1x32x9x9,40x32x3x3,s2,p1,tf32",
    "conv2d:2x24x13x11,24x1x3x3,s1,p1,g24,f16",
    "conv2d:2x48x13x12,48x24x3x3,s1,p1,g2,bf16",
    "conv3d:1x32x5x6x8,32x32x3x3x3,s1,p1,f16",
    "conv2d:2x64x12x16,64x64x3x3,s1,p1,f16,nchw-nhwc,silu",
    "conv2d:2x64x12x11,64x64x3x3,s1,p1,f16,nhwc-nchw",
    "conv2d_dgrad:2x48x9x11,64x48x3x3,s1,p1,f16",
    "filter1d:1003,k31,clamp",
    "filter1d:5,k31",
    "filter1d:70001,k5",
    "filter2d:3x2x1,17x17",
    "filter2d:37x53x3,5x3,clamp",
    "filter2d:130x260x1,3x3",
    "filter2d:67x45x2,17x17",
    "filter2d:1x1027x4,1x7",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script, and return its exit status."""
    return run_guarded("sanitize", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="sanitize", description="Run every schedule under compute-sanitizer.")
    text = "Workloads to run (default: corner cases)."
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", default=WORKLOADS, help=text)
    options.add_option(parser, "--device", "D", "CUDA device", default="cuda:0")
    options.add_option(parser, "--schedule", "NAME", "Schedule to run (default: all)", repeat=True)
    text, count = "Number of random configs per schedule", options.parse_count
    options.add_option(parser, "--num-configs", "N", text, former="--drawn", type=count, default=1)
    text = "Archive of kernels to run, in place of workloads."
    parser.add_argument("--archive", type=Path, metavar="FILE", help=text)
    parser.add_argument("--launch-only", action="store_true", help="Verify each kernel once, without the sanitizer.")
    args = parser.parse_args(argv)

    if args.launch_only and args.archive:
        return 0 if _verify_archive(args.archive, args.device) else 1
    if args.launch_only:
        return 0 if all(_verify(tc.parse(text), args) for text in args.workloads) else 1
    inputs = [f"--archive={args.archive}"] if args.archive else [tc.parse(text).text for text in args.workloads]
    devices.find_device(args.device)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise DeviceError("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")

    def check(task: tuple[str, str]) -> subprocess.CompletedProcess[str]:
        text, tool = task
        named = [part for name in args.schedule for part in ("--schedule", name)]
        choice = ["--device", args.device, "--num-configs", str(args.num_configs), *named]
        command = [sys.executable, __file__, "--launch-only", *choice, text]
        options = ["--tool", tool, *TOOLS[tool], "--error-exitcode", str(ERROR_STATUS), "--target-processes", "all"]
        return subprocess.run([sanitizer, *options, *command], capture_output=True, text=True, check=False)

    clean = True
    tasks = list(product(inputs, TOOLS))
    with ThreadPoolExecutor(NUM_PROCESSES) as threads:
        for (text, tool), done in zip(tasks, threads.map(check, tasks), strict=True):
            last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
            print(f"{tool:9}  {text}  {last.lstrip('= ')}", flush=True)
            if done.returncode:
                clean = False
                print(done.stdout + done.stderr, file=sys.stderr)
    return 0 if clean else 1


def _verify_archive(path: Path, device_name: str) -> bool:
    """Run each kernel of an archive once, and return whether all results are right."""
    device, problems = devices.find_device(device_name), dict[str, tc.Problem]()
    verifications = []
    for entry, _, executable in read_entries(path):
        problem = problems.setdefault(entry["workload"], tc.Problem(tc.parse(entry["workload"])))
        verifications.append(problem.check(device.load(executable).run(problem.inputs)))
    print(f"{len(verifications)} kernels, {sum(not found.ok for found in verifications)} wrong")
    return all(found.ok for found in verifications)


def _verify(w: Workload, args: argparse.Namespace) -> bool:
    problem, device = tc.Problem(w), devices.find_device(args.device)
    return all(
        tc.build(w, schedule, device=args.device, config=config).verify(problem).ok
        for schedule in tc.schedules(w)
        if schedule.can_run_on(device.kind, device.arch) and schedule.name in (args.schedule or [schedule.name])
        for config in _configs(schedule, w, device.limits, args.num_configs)
    )


def _configs(schedule: tc.Schedule, w: Workload, limits: BlockLimits, drawn: int) -> list[Config]:
    """Return the default config, one with the largest split of the reduction, and random configs."""
    space = schedule.space(w, limits)
    split = space.knobs.get("split_k")
    several = split is not None and split.size > 1 and "tile_rc" in space.knobs
    points = space.sample_legal(drawn, np.random.default_rng(0)) if space.knobs else ()
    return [
        {},
        *([{"split_k": split.options[-1], "tile_rc": (-1, 1)}] if split and several else []),
        *map(space.config_from_point, points),
    ]


if __name__ == "__main__":
    sys.exit(main())
