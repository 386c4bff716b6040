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
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvmconv import devices, workloads
from tvmconv.benchmarks.builder_pool import start_builders
from tvmconv.benchmarks.common import add_device, add_output, find_device
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError
from tvmconv.cli.progress import progress_line
from tvmconv.compiler.executable import Executable
from tvmconv.cost_model.model import cost_model_for
from tvmconv.devices import Device, LoadedKernel
from tvmconv.errors import Error
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.predicted_kernel import SECONDS_PER_CHECK, build_contenders
from tvmconv.reports.tables import EMPTY_CELL, format_micros, format_significant, make_table
from tvmconv.verification import Problem

_HERE = Path(__file__)
_FOLDERS = (_HERE.parents[1] / "shipped", _HERE.parents[2] / "tuning_logs")  # an installation; a checkout
LAYERS = next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[0]) / "unseen-layers.json"
NUM_ROUNDS, ROUND_SECONDS = 3, 0.01  # number of rounds, and time of each kernel in a round
CLOSE_RATIO = 2.0  # kernels that take at most this multiple of the fastest one are timed again


@dataclass(frozen=True)
class BuiltContender:
    """A kernel that a builder process compiled: a prediction of the cost model, or a default config."""

    schedule: str
    is_predicted: bool
    executable: Executable


@dataclass(frozen=True)
class LayerSafety:
    """The times of a layer in seconds, or the reason why it has none."""

    text: str
    chosen: str = EMPTY_CELL  # schedule that is built, followed by "predicted" if it is the prediction
    seconds: float = math.nan
    predicted_seconds: float | None = None  # of the prediction in the check on the device
    untuned: str = EMPTY_CELL  # schedule that is the fastest without tuning
    untuned_seconds: float = math.nan
    failure: str = ""

    @property
    def ratio(self) -> float:
        """Seconds of the chosen kernel divided by those of the best schedule without tuning."""
        return self.seconds / self.untuned_seconds


COLUMNS: dict[str, Callable[[LayerSafety], str]] = {
    "layer": lambda layer: layer.text,
    "built": lambda layer: layer.failure or layer.chosen,
    "built [µs]": lambda layer: EMPTY_CELL if layer.failure else format_micros(layer.seconds),
    "prediction alone [µs]": lambda layer: format_micros(layer.predicted_seconds),
    "best untuned": lambda layer: layer.untuned,
    "untuned [µs]": lambda layer: EMPTY_CELL if layer.failure else format_micros(layer.untuned_seconds),
    "built / untuned": lambda layer: EMPTY_CELL if layer.failure else format_significant(layer.ratio),
}
LEFT_ALIGNED = ("layer", "built", "best untuned")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    text = "Suite of layers (default: tuning_logs/unseen-layers.json)."
    parser.add_argument("--suite", "--layers", default=str(LAYERS), metavar="S", help=text)
    add_device(parser)
    text = "Largest accepted ratio of times, built over best untuned"
    options.add_option(parser, "--limit", "X", text, type=options.parse_positive, default=1.3)
    add_output(parser, None, "FILE")


def run(args: argparse.Namespace) -> int:
    """Build and time the kernels, then print and write the table."""
    device = find_device(args)
    cost_model = cost_model_for(device.arch)
    if cost_model is None:
        raise UsageError(f"there is no cost model for {device.text} ({device.arch or device.kind})")
    layers = {layer.workload.text: layer.workload for layer in workloads.suite(args.suite)}
    texts = [text for text, w in layers.items() if not cost_model.count_training_layers([w])]
    outcomes = []
    with progress_line() as show, start_builders(max(1, (os.cpu_count() or 2) - 1)) as pool:
        futures = [pool.submit(build, text, str(device.arch)) for text in texts]
        for number, (text, future) in enumerate(zip(texts, futures, strict=True), 1):
            show(f"{number} of {len(texts)}: {text}")
            outcomes.append(measure(text, future.result(), device))
    table = make_table(outcomes, COLUMNS, LEFT_ALIGNED)
    note = _summarize(outcomes, len(layers) - len(texts), device, args.limit)
    output.print_report(args, [table], [note])
    if args.out:
        source = describe_provenance(device, args.command)
        args.out.write_text(f"{table.format_markdown()}\n\n{note}\n\n{source}\n", encoding="utf-8")
    return 0 if all(outcome.ratio <= args.limit for outcome in outcomes) else 1


def build(text: str, arch: str) -> list[BuiltContender] | str:
    """Build the kernels of a layer that are compared on a device; return the message of an error if that fails."""
    try:
        kernels = list(build_contenders(workloads.parse(text), devices.find_device(arch)))
        return [BuiltContender(each.schedule.name, each.prediction is not None, each.executable) for each in kernels]
    except Error as error:
        return str(error)


def measure(text: str, built: list[BuiltContender] | str, device: Device) -> LayerSafety:
    """Choose a kernel as `tvmconv.build` does, verify it, and time it in rounds."""
    if isinstance(built, str):
        return LayerSafety(text, failure=built)
    problem = Problem(workloads.parse(text), 0)
    loaded: dict[int, LoadedKernel] = {}  # by the index of the contender, like all times
    check_seconds: dict[int, float] = {}
    for index, contender in enumerate(built):
        with contextlib.suppress(Error):
            loaded[index] = device.load(contender.executable)
            check_seconds[index] = loaded[index].time(problem.inputs, seconds=SECONDS_PER_CHECK).median
    default_seconds = {index: seconds for index, seconds in check_seconds.items() if not built[index].is_predicted}
    if not default_seconds:
        return LayerSafety(text, failure="no default config runs")
    chosen = min(check_seconds, key=check_seconds.__getitem__)
    limit = CLOSE_RATIO * check_seconds[chosen]
    close = {index for index, seconds in check_seconds.items() if seconds <= limit}
    close.add(min(default_seconds, key=default_seconds.__getitem__))
    rounds = [
        {index: loaded[index].time(problem.inputs, seconds=ROUND_SECONDS).median for index in sorted(close)}
        for _ in range(NUM_ROUNDS)
    ]
    seconds = {index: statistics.median(times[index] for times in rounds) for index in close}
    untuned = min(close & {*default_seconds}, key=seconds.__getitem__)
    for index in {chosen, untuned}:
        if not problem.check(loaded[index].run(problem.inputs)).ok:
            return LayerSafety(text, failure=f"{built[index].schedule} computes a wrong result")
    predicted_seconds = next((check_seconds[index] for index in check_seconds if built[index].is_predicted), None)
    name = built[chosen].schedule + (", predicted" if built[chosen].is_predicted else "")
    return LayerSafety(text, name, seconds[chosen], predicted_seconds, built[untuned].schedule, seconds[untuned])


def _summarize(outcomes: Sequence[LayerSafety], num_trained: int, device: Device, limit: float) -> str:
    timed = [outcome for outcome in outcomes if not outcome.failure]
    if not timed:
        return f"None of {len(outcomes)} layers could be timed on {device.name}."
    worst = max(timed, key=lambda outcome: outcome.ratio)
    mean = statistics.geometric_mean(outcome.ratio for outcome in timed)
    lines = [
        f"{len(timed)} layers on {device.name}, {len(outcomes) - len(timed)} failed; {num_trained} that the model was "
        "trained on are left out.",
        f"Built over best untuned: worst {worst.ratio:.3g} ({worst.text}), geometric mean {mean:.3g}; "
        f"{sum(outcome.ratio > limit for outcome in timed)} above {limit:g}.",
    ]
    if alone := [each.predicted_seconds / each.untuned_seconds for each in timed if each.predicted_seconds]:
        num_above = sum(ratio > limit for ratio in alone)
        lines.append(f"Without the timing on the device: worst {max(alone):.3g}, {num_above} above {limit:g}.")
    return " ".join(lines)
