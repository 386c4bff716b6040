"""Options that several commands and scripts share."""

from __future__ import annotations

import argparse
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tvmconv import baselines, devices
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cost_model import model
from tvmconv.devices import Arch, Device, DeviceNotFoundError
from tvmconv.errors import Error, FallbackWarning, WorkloadError
from tvmconv.experiments.preparation import list_unsupported_schedules
from tvmconv.experiments.sweep import LayerSelection, filter_layers, select_layer_sequence, select_layers
from tvmconv.models.input_spec import InputSpec
from tvmconv.reports.charts import FORMATS
from tvmconv.reports.tables import replace_section
from tvmconv.space import Value, parse_value
from tvmconv.verification import FULL_FLOPS, VERIFICATION_MODES, is_sampled
from tvmconv.workloads import SUITES, Layer, Workload, dtypes, epilogue
from tvmconv.workloads.layout import LAYOUTS
from tvmconv.workloads.suites import SuiteVariant, apply_variant, merge_equal_layers
from tvmconv.workloads.text import quote

EXAMPLE_WORKLOAD = "conv2d:1x64x64x64,64x64x3x3,s1,p1"
MAX_COUNT = 10**9
MAX_SECONDS = 10**7  # about four months
MAX_SEED = (1 << 63) - 1
MAX_PORT = (1 << 16) - 1
WORKERS_PER_CORE = 8
DEFAULT_ARCH = "sm_90"  # the target of the compiler where there is no GPU


def add_renamed_option(parser: argparse.ArgumentParser, name: str, former_name: str, **options: Any) -> None:
    """Add an option that is accepted by its former name, too; help and messages have the current one only."""
    parser.add_argument(name, former_name, **options).option_strings = [name]


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """Add `--set KNOB=VALUE`, which may be repeated; `args.set` lists the pairs, and the last one of a knob counts."""
    parser.add_argument(
        "--set",
        metavar="KNOB=VALUE",
        type=parse_assignment,
        action="append",
        default=[],
        help="Value of a knob of the schedule, such as tile_w=-1,2,16,2; may be given several times.",
    )


def add_suite_options(parser: argparse.ArgumentParser, default: str | None = None, *, epilogues: bool = True) -> None:
    """Add `--suite` and the options that select its layers and their variant, for `parse_layers`.

    Args:
        parser: Parser that gets the options.
        default: Suite that is used if none is named.
        epilogues: Whether `--epilogue` is added.
    """
    help_text = f"Suite whose layers are used: {', '.join(SUITES)}, or a file NAME.json"
    parser.add_argument(
        "--suite", metavar="S", default=default, help=f"{help_text}{f' (default: {default})' if default else ''}."
    )
    add_layer_filters(parser, epilogues=epilogues)


def add_layer_filters(parser: argparse.ArgumentParser, *, epilogues: bool = True) -> None:
    """Add the options that select the layers of a suite and their variant; `--epilogue` only if `epilogues`."""
    parser.add_argument("--only", metavar="TEXT", help="Use only layers whose name contains this text, such as 3x3.")
    parser.add_argument("--skip", metavar="TEXT", help="Leave out layers whose name contains this text.")
    parser.add_argument(
        "--batch", metavar="N", type=parse_count, help="Batch size of all layers (default: 1, or as in the file)."
    )
    parser.add_argument(
        "--dtype", choices=dtypes.DTYPES_BY_TEXT, help="Dtype of all layers (default: f32, or as in the file)."
    )
    parser.add_argument("--layout", choices=LAYOUTS, help="Layout of all layers (default: nchw, or as in the file).")
    if epilogues:
        parser.add_argument(
            "--epilogue",
            metavar="E",
            type=parse_epilogue_names,
            help="Epilogue of all layers, such as bias,relu (default: none, or as in the file).",
        )


def parse_layers(args: argparse.Namespace) -> LayerSelection:
    """Return the layers that the options of `add_suite_options` select; raise the errors of `select_layers`."""
    return select_layers(args.suite, _parse_variant(args), args.only, args.skip)


def parse_layer_sequence(args: argparse.Namespace) -> tuple[str, list[Layer]]:
    """Return a name and all layers that the options of `add_suite_options` select, in the order of the network.

    It raises the errors of `select_layer_sequence`.
    """
    return select_layer_sequence(args.suite, _parse_variant(args), args.only, args.skip)


def filter_model_layers(name: str, layers: Sequence[Layer], args: argparse.Namespace) -> list[Layer]:
    """Return the layers of suite `name` that the options of `add_layer_filters` select, each workload once.

    Raises:
        Error: No layer has a matching name, or a layer does not exist in the selected variant.
    """
    return filter_layers(name, merge_equal_layers(apply_variant(layers, _parse_variant(args))), args.only, args.skip)


def _parse_variant(args: argparse.Namespace) -> SuiteVariant:
    dtype = dtypes.DTYPES_BY_TEXT[args.dtype].name if args.dtype else None
    return SuiteVariant(args.batch, dtype, args.layout, getattr(args, "epilogue", None))


def reject_layer_options(args: argparse.Namespace) -> None:
    """Raise UsageError if an option of `add_suite_options` was given together with the text of a workload."""
    for name in ("only", "skip", "batch", "dtype", "layout", "epilogue"):
        if getattr(args, name) is not None:
            raise UsageError(
                f"--{name} is for the layers of a suite: name a suite, or put the value into the workload's text"
            )


def parse_epilogue_names(text: str) -> tuple[str, ...]:
    """Parse the names of epilogue operations, joined by commas, for argparse."""
    try:
        return epilogue.validate_epilogue(tuple(text.split(",")))
    except WorkloadError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_timing_options(parser: argparse.ArgumentParser) -> None:
    """Add `--device`, `--baseline`, `--cold`, `--seconds`, `--seed`."""
    parser.add_argument(
        "--device",
        metavar="D",
        default="auto",
        help="Device to run on: cuda:N, opencl:N or auto (default: %(default)s).",
    )
    add_baseline_option(parser)
    parser.add_argument("--cold", action="store_true", help="Time with inputs and outputs outside the L2 cache.")
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=parse_positive,
        default=0.5,
        help="Time each kernel for this many seconds (default: %(default)s).",
    )
    parser.add_argument("--seed", metavar="N", type=parse_seed, help="Seed of the random inputs (default: a new one).")


def add_verify_option(parser: argparse.ArgumentParser) -> None:
    """Add `--verify`, which selects the outputs that are compared with float64 results."""
    parser.add_argument(
        "--verify",
        choices=VERIFICATION_MODES,
        default="auto",
        help="Outputs that are compared with float64 results: all (full) or a random sample (sample). auto takes a "
        f"sample for convolutions above {FULL_FLOPS / 1e9:.0f} GFLOP (default: %(default)s).",
    )


def describe_sampled(verified_workloads: Iterable[Workload], mode: str) -> list[str]:
    """Return at most one line, which lists the workloads that were verified on a sample of their outputs."""
    sampled_workloads = [workload.text for workload in verified_workloads if is_sampled(workload, mode)]
    if not sampled_workloads:
        return []
    return [f"verified on a random sample of outputs (--verify full compares all): {', '.join(sampled_workloads)}"]


def add_baseline_option(parser: argparse.ArgumentParser) -> None:
    """Add `--baseline NAME`, which may be repeated; `args.baseline` lists the names."""
    parser.add_argument(
        "--baseline",
        choices=baselines.load_baselines(),
        action="append",
        default=[],
        help="Library that is timed as well; may be given several times.",
    )


def timing_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of `add_timing_options`, without the device, as keyword arguments of `run_schedules`."""
    return {"baselines": args.baseline, "cold": args.cold, "seconds": args.seconds, "seed": args.seed}


def add_page(parser: argparse.ArgumentParser) -> None:
    """Add `--update-page`, and its old name `--into`, for `update_page`."""
    add_renamed_option(
        parser,
        "--update-page",
        "--into",
        dest="page",
        type=Path,
        metavar="FILE",
        help="Markdown page in which the section between the markers of this table is replaced.",
    )


def update_page(page: Path | None, section: str, text: str) -> None:
    """Replace a section of `page` by `text`, if a page was named."""
    if page:
        page.write_text(replace_section(page.read_text(encoding="utf-8"), section, text), encoding="utf-8")


def add_cost_model_option(parser: argparse.ArgumentParser) -> None:
    """Add `--cost-model`, which takes effect when it is parsed."""
    add_renamed_option(
        parser,
        "--cost-model",
        "--knowledge",
        metavar="F",
        type=_use_cost_model,
        help="Cost model that tvmconv train wrote, or none (default: the model that comes with tvmconv).",
    )


def _use_cost_model(text: str) -> str:
    """Set the cost model of this process, for argparse."""
    try:
        model.set_cost_model(None if text == "none" else text)
    except Error as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--arch`, which exclude each other."""
    device_group = parser.add_mutually_exclusive_group()
    device_group.add_argument("--device", metavar="D", help="Device to compile for: cuda:N, opencl:N or auto.")
    device_group.add_argument(
        "--arch",
        metavar="A",
        help=f"Architecture to compile for, such as {DEFAULT_ARCH} (default: that of the GPU, or {DEFAULT_ARCH}).",
    )


def find_target_device(args: argparse.Namespace) -> Device:
    """Return the device or architecture of `add_device_options`: by default the first GPU, else `DEFAULT_ARCH`."""
    if args.arch:
        return Arch(args.arch)
    if args.device:
        return devices.find_device(args.device)
    try:
        return devices.find_device("cuda")
    except DeviceNotFoundError:
        return Arch(DEFAULT_ARCH)


def print_device(args: argparse.Namespace, target_device: Device) -> None:
    """Print on stderr which device `find_target_device` picked by default."""
    if args.device:
        print_auto_device(args.device, target_device)
    elif not args.arch:
        print_note(f"compiled for {target_device.text}; --arch or --device choose another")


def print_skipped_schedules(workload: Workload, device: Device) -> None:
    """Print on stderr which schedules of a workload do not support the device."""
    if unsupported := list_unsupported_schedules(workload, device):
        names = ", ".join(schedule.name for schedule in unsupported)
        print_note(f"left out, as they are not for {device.text}: {names}")


def print_auto_device(device_option: str, *picked_devices: Device) -> None:
    """Print on stderr which device, or which devices of one name, `auto` picked."""
    if device_option == "auto":
        texts = ", ".join(device.text for device in picked_devices)
        print_note(f"auto picked {texts}, {picked_devices[0].name}")


@contextmanager
def report_fallbacks() -> Iterator[None]:
    """Print each `FallbackWarning` of the block on stderr when the block ends."""
    with warnings.catch_warnings(record=True) as fallbacks:
        warnings.simplefilter("always", FallbackWarning)
        yield
    for fallback in fallbacks:
        print_note(f"{fallback.message}")


def parse_assignment(text: str) -> tuple[str, Value]:
    """Parse `KNOB=VALUE` into the knob's name and its value, for argparse."""
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise argparse.ArgumentTypeError(f"expected KNOB=VALUE, such as tile_w=-1,2,16,2, not {text!r}")
    return name, parse_value(value)


def parse_positive(text: str) -> float:
    """Parse a positive number of at most `MAX_SECONDS`, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a positive number, not {quote(text)}")
    if value > MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_SECONDS:,}, not {quote(text)}")
    return value


def parse_seed(text: str) -> int:
    """Parse an integer from 0 to `MAX_SEED`, for argparse."""
    return _parse_integer(text, 0, MAX_SEED)


def parse_count(text: str) -> int:
    """Parse an integer from 1 to `MAX_COUNT`, for argparse."""
    return _parse_integer(text, 1, MAX_COUNT)


def make_count_parser(max_value: int) -> Callable[[str], int]:
    """Return a function that parses an integer from 1 to `max_value`, for argparse."""
    return lambda text: _parse_integer(text, 1, max_value)


def parse_workers(text: str) -> int:
    """Parse a number of processes, at most `WORKERS_PER_CORE` for each core of this process, for argparse."""
    return _parse_integer(text, 1, WORKERS_PER_CORE * len(os.sched_getaffinity(0)), f", {WORKERS_PER_CORE} per core")


def parse_port(text: str) -> int:
    """Parse the number of a TCP port, for argparse."""
    return _parse_integer(text, 1, MAX_PORT)


def _parse_integer(text: str, min_value: int, max_value: int, max_reason: str = "") -> int:
    """Parse an integer from `min_value`, 0 or 1, to `max_value`; the message puts `max_reason` behind the maximum."""
    digits = text.lstrip("0") or "0"
    if not (text.isascii() and text.isdigit()) or (min_value and digits == "0"):
        expected = f"an integer that is at least {min_value}" if min_value else "an integer that is not negative"
        raise argparse.ArgumentTypeError(f"expected {expected}, not {quote(text)}")
    if len(digits) > len(str(max_value)) or int(digits) > max_value:
        raise argparse.ArgumentTypeError(f"expected at most {max_value:,}{max_reason}, not {quote(text)}")
    return int(digits)


def parse_image_path(text: str) -> Path:
    """Parse the path of an image file, for argparse."""
    path = Path(text)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"expected a file named *{', *'.join(FORMATS)}, not {text!r}")
    return path


def add_tracker_option(parser: argparse.ArgumentParser) -> None:
    """Add `--tracker`, the address of TVM's RPC tracker."""
    parser.add_argument(
        "--tracker",
        metavar="HOST:PORT",
        help="Address of the RPC tracker for rpc:KEY (default: TVM_TRACKER_HOST and TVM_TRACKER_PORT).",
    )


def parse_model_input(text: str) -> InputSpec:
    """Parse an input of a model, the value of `--input`, for argparse."""
    try:
        return InputSpec.parse(text)
    except Error as error:
        raise argparse.ArgumentTypeError(str(error)) from error
