"""Compare predicted kernels with the best untuned ones, on layers that the model was not trained on.

    tvmconv bench prediction-safety --device cuda:0
    tvmconv bench prediction-safety --suite mine.json --device cuda:0 -o safety.md

For each layer, the kernel of `tvmconv.build(workload)` and the default configs of all schedules except the naive one
are timed in rounds on the same inputs. By default, the layers are those of networks that were not used for development
(tuning_logs/unseen-layers.json): RepLKNet-31B, SLaK, ConvNeXt V2, NFNet, Swin V2, Conformer, X3D, HRNet, MobileViT,
GhostNet, DenseNet-169, PANNs, WaveNet, DeepLab, 3-D U-Net, C3D, ResNeXt-101, RegNetY, QuartzNet, EDSR and MixNet, with
the sizes of their papers and reference implementations. The exit status is 1 if a layer exceeds --limit.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tvmconv import devices, workloads
from tvmconv.benchmarks.common import add_device, add_output, find_device, make_table, micros
from tvmconv.cli.errors import UsageError
from tvmconv.cli.options import parse_positive
from tvmconv.cli.progress import progress_line
from tvmconv.cost_model.model import cost_model_for
from tvmconv.errors import Error
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.predicted_kernel import SECONDS_PER_CHECK, build_contenders
from tvmconv.reports.tables import EMPTY_CELL, format_significant
from tvmconv.verification import Problem

if TYPE_CHECKING:
    from tvmconv.compiler.executable import Executable
    from tvmconv.devices import Device
    from tvmconv.devices.device import LoadedKernel

_HERE = Path(__file__)
_FOLDERS = (_HERE.parents[1] / "shipped", _HERE.parents[2] / "tuning_logs")  # an installation; a checkout
LAYERS = next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[0]) / "unseen-layers.json"
ROUNDS, ROUND_SECONDS = 3, 0.01  # number of rounds, and time of each kernel in a round
LEFT = ("layer", "built", "best untuned")
CLOSE = 2.0  # kernels that take at most this multiple of the fastest one are timed again


@dataclass(frozen=True)
class BuiltContender:
    """A kernel that a builder process compiled.

    Attributes:
        schedule: Name of the schedule.
        expected_seconds: Seconds that the cost model predicts; None for a default config.
        program: Compiled kernels.
    """

    schedule: str
    expected_seconds: float | None
    program: Executable


@dataclass(frozen=True)
class LayerSafety:
    """The times of a layer.

    Attributes:
        text: Text of the workload.
        chosen: Schedule that is built, followed by "predicted" if it is the prediction.
        seconds: Seconds of the chosen kernel.
        predicted: Seconds of the prediction in the check on the device; None if there is none.
        untuned: Schedule that is the fastest without tuning.
        untuned_seconds: Seconds of that schedule.
        failure: Reason why the layer has no times; empty if it has times.
    """

    text: str
    chosen: str = EMPTY_CELL
    seconds: float = math.nan
    predicted: float | None = None
    untuned: str = EMPTY_CELL
    untuned_seconds: float = math.nan
    failure: str = ""

    @property
    def ratio(self) -> float:
        """Seconds of the chosen kernel divided by those of the best schedule without tuning."""
        return self.seconds / self.untuned_seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    names = ("--suite", "--layers")
    parser.add_argument(
        *names, default=str(LAYERS), metavar="S", help="Suite of layers (default: tuning_logs/unseen-layers.json)."
    )
    add_device(parser)
    parser.add_argument(
        "--limit",
        type=parse_positive,
        default=1.3,
        metavar="X",
        help="Largest accepted ratio of times, built over best untuned (default: %(default)g).",
    )
    add_output(parser, None, "FILE")


def run(args: argparse.Namespace) -> int:
    """Build and time the kernels, then print and write the table."""
    device = find_device(args)
    cost_model = cost_model_for(device.arch)
    if cost_model is None:
        raise UsageError(f"there is no cost model for {device.text} ({device.arch or device.kind})")
    layers = {layer.workload.text: layer.workload for layer in workloads.suite(args.suite)}
    texts = [text for text, w in layers.items() if not cost_model.count_training_layers([w])]
    with progress_line() as show:
        outcomes = []
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=context) as pool:
            built = [pool.submit(build, text, str(device.arch)) for text in texts]
            for number, (text, future) in enumerate(zip(texts, built, strict=True), 1):
                show(f"{number} of {len(texts)}: {text}")
                outcomes.append(_measured(text, future.result(), device))
    table, note = make_table(outcomes, COLUMNS, LEFT), _note(outcomes, len(layers) - len(texts), device, args.limit)
    print(f"{table.format_text()}\n\n{note}")
    if args.out:
        source = describe_provenance(device, args.command)
        args.out.write_text(f"{table.format_markdown()}\n\n{note}\n\n{source}\n", encoding="utf-8")
    return 0 if all(outcome.ratio <= args.limit for outcome in outcomes) else 1


def build(text: str, arch: str) -> list[BuiltContender] | str:
    """Build the kernels of a layer that are compared on a device; return the message of an error if that fails."""
    try:
        kernels = list(build_contenders(workloads.parse(text), devices.find_device(arch)))
        predictions = [kernel.prediction.seconds if kernel.prediction else None for kernel in kernels]
        return [
            BuiltContender(kernel.schedule.name, seconds, kernel.executable)
            for kernel, seconds in zip(kernels, predictions, strict=True)
        ]
    except Error as error:
        return str(error)


def _measured(text: str, built: list[BuiltContender] | str, device: Device) -> LayerSafety:
    """Choose a kernel as `tvmconv.build` does, verify it, and time it in rounds."""
    if isinstance(built, str):
        return LayerSafety(text, failure=built)
    problem = Problem(workloads.parse(text), 0)
    loaded: dict[int, LoadedKernel] = {}
    checked: dict[int, float] = {}
    for index, each in enumerate(built):
        with contextlib.suppress(Error):
            loaded[index] = device.load(each.program)
            checked[index] = loaded[index].time(problem.inputs, seconds=SECONDS_PER_CHECK).median
    defaults = [index for index in checked if built[index].expected_seconds is None]
    if not defaults:
        return LayerSafety(text, failure="no default config runs")
    chosen = min(checked, key=lambda index: checked[index])
    close = [index for index in checked if index == chosen or checked[index] <= CLOSE * checked[chosen]]
    close += [] if set(close) & set(defaults) else [min(defaults, key=lambda index: checked[index])]
    rounds: dict[int, list[float]] = {index: [] for index in close}
    for _ in range(ROUNDS):
        for index in close:
            rounds[index].append(loaded[index].time(problem.inputs, seconds=ROUND_SECONDS).median)
    seconds = {index: statistics.median(times) for index, times in rounds.items()}
    untuned = min((index for index in seconds if index in defaults), key=lambda index: seconds[index])
    predicted = next((checked[index] for index in checked if built[index].expected_seconds is not None), None)
    for index in {chosen, untuned}:
        if not problem.check(loaded[index].run(problem.inputs)).ok:
            return LayerSafety(text, failure=f"{built[index].schedule} computes a wrong result")
    name = built[chosen].schedule + (", predicted" if chosen not in defaults else "")
    return LayerSafety(text, name, seconds[chosen], predicted, built[untuned].schedule, seconds[untuned])


COLUMNS: dict[str, Callable[[LayerSafety], str]] = {
    "layer": lambda each: each.text,
    "built": lambda each: each.failure or each.chosen,
    "built [µs]": lambda each: EMPTY_CELL if each.failure else micros(each.seconds),
    "prediction alone [µs]": lambda each: micros(each.predicted),
    "best untuned": lambda each: each.untuned,
    "untuned [µs]": lambda each: EMPTY_CELL if each.failure else micros(each.untuned_seconds),
    "built / untuned": lambda each: EMPTY_CELL if each.failure else format_significant(each.ratio),
}


def _note(outcomes: Sequence[LayerSafety], trained: int, device: Device, limit: float) -> str:
    timed = [each for each in outcomes if not each.failure]
    failed = len(outcomes) - len(timed)
    if not timed:
        return f"None of {len(outcomes)} layers could be timed on {device.name}."
    worst = max(timed, key=lambda each: each.ratio)
    alone = [each.predicted / each.untuned_seconds for each in timed if each.predicted]
    lines = [
        f"{len(timed)} layers on {device.name}, {failed} failed; {trained} that the model was trained on are left out.",
        f"Built over best untuned: worst {worst.ratio:.3g} ({worst.text}), geometric mean "
        f"{statistics.geometric_mean(each.ratio for each in timed):.3g}; "
        f"{sum(each.ratio > limit for each in timed)} above {limit:g}.",
    ]
    if alone:
        above = sum(each > limit for each in alone)
        lines.append(f"Without the timing on the device: worst {max(alone):.3g}, {above} above {limit:g}.")
    return " ".join(lines)
