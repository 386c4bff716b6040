"""Verification, resources and times of the kernels of docs/kernels.md, for `kernels_steps.py`."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import tvmconv as tc
from tvmconv import baselines, devices
from tvmconv.cli.options import update_page
from tvmconv.errors import Error
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.experiments.run import exceeds_cache
from tvmconv.reports.tables import EMPTY_CELL, Table, format_micros, format_significant
from tvmconv.workloads import Conv2d

if TYPE_CHECKING:
    from tvmconv.devices import Device

SMALL_LAYER = "conv2d:2x64x20x20,32x64x3x3,s1,p1,f16,nhwc"  # 7 tiles of 128 rows, of which the last one overhangs
LAYERS = {
    "32×56×56, 64 → 64 channels": "conv2d:32x64x56x56,64x64x3x3,s1,p1,f16,nhwc",
    "4×64×64, 320 → 320 channels": "conv2d:4x320x64x64,320x320x3x3,s1,p1,f16,nhwc",
}
PEAK_FLOPS = 989.4e12  # dense float16 of the H100 SXM, by NVIDIA's data sheet
PINGPONG = {"kernel_schedule": "pingpong"}  # config of `hopper`, where it has this knob
NUM_ROUNDS, ROUND_SECONDS = 5, 0.03
SECTION = "kernel-steps"  # of the page

Measurement = Mapping[str, float]  # seconds by label, of one layer


def list_problems(step: str) -> list[str]:
    """Return the small layers that a step is verified with: without an epilogue, and with one if the step has it."""
    workload = tc.parse(f"{SMALL_LAYER},bias,relu")
    has_epilogue = any(schedule.name == step for schedule in tc.schedules(workload))
    return [SMALL_LAYER, workload.text] if has_epilogue else [SMALL_LAYER]


def emulate(kernel: tc.Kernel, problem: tc.Problem) -> tc.Verification:
    """Execute a kernel in the emulator, which also finds races and deadlocks, and compare it with a reference."""
    from tvmconv.emulator.execution import bind_arguments, execute
    from tvmconv.emulator.memory.arrays import GlobalArray

    lowered = kernel.lowered_module
    *input_types, output_type = lowered.arrays
    arrays = [
        GlobalArray.from_values(f"input {i}", np.asarray(values, array_type.dtype).reshape(array_type.shape))
        for i, (values, array_type) in enumerate(zip(problem.inputs, input_types, strict=True))
    ]
    output = GlobalArray.allocate_unwritten("Y", np.dtype(output_type.dtype), int(np.prod(output_type.shape)))
    for step in lowered.kernels:
        execute(step.function, step.launch, bind_arguments(step, [*arrays, output]))
    return problem.check(output.values.reshape(output_type.shape))


def verify_small(steps: Sequence[str]) -> None:
    """Verify steps in the emulator, with few CTAs so that each computes several tiles; raise Error if one is wrong."""
    for step in steps:
        for text in list_problems(step):
            kernel = tc.build(text, step, arch="sm_90", config={"ctas": 2})
            verification = emulate(kernel, tc.Problem(kernel.workload, seed=0))
            print(f"{step}: {kernel.launch}, relative error {verification.error:.1e}")
            if not verification.ok:
                raise Error(f"{step} computes {text} wrong")


def print_resources(steps: Sequence[str]) -> None:
    """Print what the kernels of both layers use, compiled for sm_90a."""
    headers = ["layer", "step", "CTAs", "threads", "registers", "spilled bytes", "shared memory"]
    rows = []
    for layer, text in LAYERS.items():
        for step in steps:
            kernel = tc.build(text, step, arch="sm_90")
            grid, block, used = kernel.launch.grid, kernel.launch.block, kernel.resources
            numbers = (grid[0], block[0], used.registers, used.spills + used.stack_bytes, kernel.dynamic_shared_bytes)
            rows.append([layer, step, *(f"{number:,}" for number in numbers)])
    print(Table(headers, rows, {"layer", "step"}).format_text())


def time_layer(text: str, steps: Mapping[str, str], device: Device) -> dict[str, float]:
    """Verify the kernels of a layer, time them and cuDNN in turn, and return medians in seconds by label."""
    workload = tc.parse(text)
    assert isinstance(workload, Conv2d)
    problem, cold = tc.Problem(workload), exceeds_cache(workload, device)
    kernels = {label: tc.build(workload, step, device=device) for step, label in steps.items()}
    default = tc.build(workload, "hopper", device=device)
    if PINGPONG.keys() <= default.config.keys():
        config = choose_pingpong_config(workload, default.config)
        kernels["8: `hopper`, ping-pong"] = tc.build(workload, "hopper", device=device, config=config)
    kernels["`hopper`, default config"] = default
    for label, kernel in kernels.items():
        if not kernel.verify(problem).ok:
            raise Error(f"{label}: {text} is computed wrong")

    def time_kernel(kernel: tc.Kernel) -> float:
        return kernel.time(problem, cold=cold, seconds=ROUND_SECONDS).median

    timers: dict[str, Callable[[], float]] = {
        label: functools.partial(time_kernel, kernel) for label, kernel in kernels.items()
    }
    close_library: Callable[[], None] = lambda: None  # noqa: E731
    try:
        library = baselines.load_baselines()["cudnn"](workload, problem.inputs, device=device, cold=cold, seconds=0.1)
    except Error as error:
        print(f"cuDNN is not timed: {error}", file=sys.stderr)
    else:
        time_again, close_library = library.time_again, library.close
        if time_again is not None:
            timers["cuDNN, fastest algorithm"] = lambda: time_again(ROUND_SECONDS).median
    rounds = [{label: measure() for label, measure in timers.items()} for _ in range(NUM_ROUNDS)]
    close_library()
    return {label: statistics.median(times[label] for times in rounds) for label in timers}


def choose_pingpong_config(w: Conv2d, default: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of `hopper` in which two warpgroups compute tiles of their own, as large as those of step 6."""
    n = next(width for width in (160, 128, 64) if w.O % width == 0)
    tile = {"warpgroups": 2, "wgmma_m_tiles": 2, "block_n": n, "block_k_bytes": 128, "stages": 4}
    chosen = {**tile, "split_k": 1, "cluster_m": 1, "cluster_n": 1, "taps_per_copy": 1, **PINGPONG}
    return {name: chosen.get(name, value) for name, value in default.items()}


def make_table(measured: Mapping[str, Measurement]) -> Table:
    """Return the table of the page: a row for each step, and time, rate and share of the peak for each layer."""
    headers, labels = ["step"], list(dict.fromkeys(label for times in measured.values() for label in times))
    rows = [[label] for label in labels]
    for layer, times in measured.items():
        flops = tc.parse(LAYERS[layer]).flops
        headers += [f"{layer} [µs]", "TFLOP/s", "of peak"]
        for row, seconds in zip(rows, map(times.get, labels), strict=True):
            rate = None if seconds is None else flops / seconds
            row.append(format_micros(seconds))
            row.append(EMPTY_CELL if rate is None else format_significant(rate / 1e12))
            row.append(EMPTY_CELL if rate is None else f"{rate / PEAK_FLOPS:.0%}")
    return Table(headers, rows, {"step"})


def main(labels: Mapping[str, str]) -> int:
    """Run the command line; `labels` has the label of each step in the table."""
    parser = argparse.ArgumentParser(description="Verify, compile or time the kernels of docs/kernels.md.")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"All by default: {', '.join(labels)}.")
    parser.add_argument("--resources", action="store_true", help="Compile for sm_90a, and print registers and spills.")
    parser.add_argument("--device", help="GPU to verify and time on, such as cuda:0; without it, emulate small layers.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the times to FILE.")
    parser.add_argument("--update-page", type=Path, metavar="PAGE", help=f"Write the table into section {SECTION}.")
    args = parser.parse_args()
    steps = args.steps or list(labels)
    if unknown := [step for step in steps if step not in labels]:
        parser.error(f"expected steps among {', '.join(labels)}, not {', '.join(unknown)}")
    if args.resources:
        print_resources(steps)
        return 0
    if args.device is None:
        verify_small(steps)
        return 0
    device = devices.find_device(args.device)
    measured = {
        layer: time_layer(text, {step: labels[step] for step in steps}, device) for layer, text in LAYERS.items()
    }
    table, provenance = make_table(measured), describe_provenance(device, "python docs/kernels_steps.py")
    print(f"{table.format_text()}\n\n{provenance}")
    if args.json:
        result = {"provenance": provenance, "seconds": measured}
        args.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    update_page(args.update_page, SECTION, f"{table.format_markdown()}\n\n{provenance}.")
    return 0
