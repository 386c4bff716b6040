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
from tvmconv.experiments.run import list_unsupported_schedules
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
MAX_SECONDS = 10**7  # some four months
MAX_SEED = (1 << 63) - 1
MAX_PORT = (1 << 16) - 1
WORKERS_PER_CORE = 8
DEFAULT_ARCH = "sm_90"  # to compile for where no GPU says otherwise


def add_renamed_option(parser: argparse.ArgumentParser, name: str, former_name: str, **options: Any) -> None:
    """Add an option that is accepted by its former name, too; help and messages have the current one only."""
    parser.add_argument(name, former_name, **options).option_strings = [name]


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """Add `--set KNOB=VALUE`, any number of times, as pairs in `args.set`; of several for one knob the last counts."""
    parser.add_argument(
        "--set",
        metavar="KNOB=VALUE",
        type=parse_assignment,
        action="append",
        default=[],
        help="set a knob of the schedule, such as tile_w=-1,2,16,2; may be given several times",
    )


def add_suite_options(parser: argparse.ArgumentParser, default: str | None = None, *, epilogues: bool = True) -> None:
    """Add `--suite`, and what selects its layers and their variant, for `parse_layers`.

    Args:
        parser: gets the options.
        default: the suite, if none is named.
        epilogues: whether the epilogue may be chosen, too.
    """
    help_text = f"whose layers: {', '.join(SUITES)}, or a file NAME.json"
    parser.add_argument(
        "--suite", metavar="S", default=default, help=help_text + f" (default: {default})" * bool(default)
    )
    add_layer_filters(parser, epilogues=epilogues)


def add_layer_filters(parser: argparse.ArgumentParser, *, epilogues: bool = True) -> None:
    """Add what selects the layers of a suite and their variant."""
    parser.add_argument("--only", metavar="TEXT", help="only layers whose name contains this, such as 3x3")
    parser.add_argument("--skip", metavar="TEXT", help="no layers whose name contains this")
    parser.add_argument(
        "--batch", metavar="N", type=parse_count, help="images at a time (default: 1, or as in the file)"
    )
    parser.add_argument(
        "--dtype", choices=dtypes.DTYPES_BY_TEXT, help="of all layers (default: f32, or as in the file)"
    )
    parser.add_argument("--layout", choices=LAYOUTS, help="of all layers (default: nchw, or as in the file)")
    if epilogues:
        parser.add_argument(
            "--epilogue",
            metavar="E",
            type=parse_epilogue_names,
            help="of all layers, such as bias,relu (default: none, or as in the file)",
        )


def parse_layers(args: argparse.Namespace) -> LayerSelection:
    """The layers that the options of `add_suite_options` select; errors as of `select_layers`."""
    return select_layers(args.suite, _parse_variant(args), args.only, args.skip)


def parse_layer_sequence(args: argparse.Namespace) -> tuple[str, list[Layer]]:
    """A name, and all layers that the options of `add_suite_options` select, one after another; errors as of
    `select_layer_sequence`.
    """
    return select_layer_sequence(args.suite, _parse_variant(args), args.only, args.skip)


def filter_model_layers(name: str, layers: Sequence[Layer], args: argparse.Namespace) -> list[Layer]:
    """Those of the layers, of a suite of this name, that the options of `add_layer_filters` select, each workload once.

    Raises:
        Error: no layer is named like that, or one has no such variant.
    """
    return filter_layers(name, merge_equal_layers(apply_variant(layers, _parse_variant(args))), args.only, args.skip)


def _parse_variant(args: argparse.Namespace) -> SuiteVariant:
    dtype = dtypes.DTYPES_BY_TEXT[args.dtype].name if args.dtype else None
    return SuiteVariant(args.batch, dtype, args.layout, getattr(args, "epilogue", None))


def reject_layer_options(args: argparse.Namespace) -> None:
    """Raise UsageError if an option of `add_suite_options` was given to a workload, whose text has all of that."""
    for name in ("only", "skip", "batch", "dtype", "layout", "epilogue"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is for the layers of a suite: name one, or say it in the workload's text")


def parse_epilogue_names(text: str) -> tuple[str, ...]:
    """The operations of an epilogue, joined by commas, for argparse."""
    try:
        return epilogue.validate_epilogue(tuple(text.split(",")))
    except WorkloadError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_timing_options(parser: argparse.ArgumentParser) -> None:
    """Add `--device`, `--baseline`, `--cold`, `--seconds`, `--seed`."""
    parser.add_argument("--device", metavar="D", default="auto", help="cuda:N, opencl:N or auto (default: %(default)s)")
    add_baseline_option(parser)
    parser.add_argument("--cold", action="store_true", help="time with inputs and outputs outside the L2 cache")
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=parse_positive,
        default=0.5,
        help="how long to time each kernel (default: %(default)s)",
    )
    parser.add_argument("--seed", metavar="N", type=parse_seed, help="of the random inputs (default: a fresh one)")


def add_verify_option(parser: argparse.ArgumentParser) -> None:
    """Add `--verify`: whether all outputs are compared with float64."""
    parser.add_argument(
        "--verify",
        choices=VERIFICATION_MODES,
        default="auto",
        help="compare all outputs with float64 (full), or a random sample of them (sample); auto takes a sample of "
        f"convolutions above {FULL_FLOPS / 1e9:.0f} GFLOP (default: %(default)s)",
    )


def describe_sampled(verified_workloads: Iterable[Workload], mode: str) -> list[str]:
    """A line that says which workloads were verified on a sample of their outputs; none if none was."""
    sampled_workloads = [workload.text for workload in verified_workloads if is_sampled(workload, mode)]
    if not sampled_workloads:
        return []
    return [f"verified on a random sample of outputs (--verify full compares all): {', '.join(sampled_workloads)}"]


def add_baseline_option(parser: argparse.ArgumentParser) -> None:
    """Add `--baseline NAME`, any number of times, in `args.baseline`."""
    parser.add_argument(
        "--baseline",
        choices=baselines.load_baselines(),
        action="append",
        default=[],
        help="time this library as well; may be given several times",
    )


def timing_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """What `add_timing_options` read, but for the device, as arguments of `run_ladder`."""
    return {"baselines": args.baseline, "cold": args.cold, "seconds": args.seconds, "seed": args.seed}


def add_page(parser: argparse.ArgumentParser) -> None:
    """Add `--update-page`, for `update_page`; `--into` is its old name."""
    add_renamed_option(
        parser,
        "--update-page",
        "--into",
        dest="page",
        type=Path,
        metavar="FILE",
        help="Markdown page whose section between the markers of this table is replaced",
    )


def update_page(page: Path | None, section: str, text: str) -> None:
    """Replace the section of a page by a text, if a page was named."""
    if page:
        page.write_text(replace_section(page.read_text(encoding="utf-8"), section, text), encoding="utf-8")


def add_cost_model_option(parser: argparse.ArgumentParser) -> None:
    """Add `--cost-model`, which takes effect as it is read."""
    add_renamed_option(
        parser,
        "--cost-model",
        "--knowledge",
        metavar="F",
        type=_use_cost_model,
        help="a model that tvmconv train made; none for no predictions (default: the one that comes with tvmconv)",
    )


def _use_cost_model(text: str) -> str:
    """Use a model for what this process predicts; for argparse."""
    try:
        model.set_cost_model(None if text == "none" else text)
    except Error as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--arch`, of which one may be given."""
    device_group = parser.add_mutually_exclusive_group()
    device_group.add_argument("--device", metavar="D", help="for this device: cuda:N, opencl:N or auto")
    device_group.add_argument(
        "--arch",
        metavar="A",
        help=f"for this architecture: {DEFAULT_ARCH}, say (default: the GPU's, or {DEFAULT_ARCH})",
    )


def find_target_device(args: argparse.Namespace) -> Device:
    """The device or architecture that `add_device_options` read; by default the first GPU, or `DEFAULT_ARCH` where
    there is none.
    """
    if args.arch:
        return Arch(args.arch)
    if args.device:
        return devices.find_device(args.device)
    try:
        return devices.find_device("cuda")
    except DeviceNotFoundError:
        return Arch(DEFAULT_ARCH)


def print_device(args: argparse.Namespace, target_device: Device) -> None:
    """Say on stderr what `find_target_device` picked by itself."""
    if args.device:
        print_auto_device(args.device, target_device)
    elif not args.arch:
        print_note(f"compiled for {target_device.text}; --arch or --device choose another")


def print_skipped_schedules(workload: Workload, device: Device) -> None:
    """Say on stderr which schedules of a workload do not run, as they are not for the device."""
    if unsupported := list_unsupported_schedules(workload, device):
        names = ", ".join(schedule.name for schedule in unsupported)
        print_note(f"left out, as they are not for {device.text}: {names}")


def print_auto_device(device_option: str, *picked_devices: Device) -> None:
    """Say on stderr which device, or which devices of one name, `auto` picked."""
    if device_option == "auto":
        texts = ", ".join(device.text for device in picked_devices)
        print_note(f"auto picked {texts}, {picked_devices[0].name}")


@contextmanager
def report_fallbacks() -> Iterator[None]:
    """Say in a line on stderr, at the end of the block, what was built in it for want of a record."""
    with warnings.catch_warnings(record=True) as fallbacks:
        warnings.simplefilter("always", FallbackWarning)
        yield
    for fallback in fallbacks:
        print_note(f"{fallback.message}")


def parse_assignment(text: str) -> tuple[str, Value]:
    """A knob and its value, for argparse."""
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise argparse.ArgumentTypeError(f"expected KNOB=VALUE, such as tile_w=-1,2,16,2, not {text!r}")
    return name, parse_value(value)


def parse_positive(text: str) -> float:
    """Read a positive number, of seconds mostly, for argparse."""
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
    """Read an integer from 0 to `MAX_SEED`, for argparse."""
    return _parse_integer(text, 0, MAX_SEED)


def parse_count(text: str) -> int:
    """Read an integer from 1 to `MAX_COUNT`, for argparse."""
    return _parse_integer(text, 1, MAX_COUNT)


def make_count_parser(max_value: int) -> Callable[[str], int]:
    """Return what reads an integer from 1 to `max_value`, for argparse."""
    return lambda text: _parse_integer(text, 1, max_value)


def parse_workers(text: str) -> int:
    """Read a number of processes, at most `WORKERS_PER_CORE` for each core that may be used here, for argparse."""
    return _parse_integer(text, 1, WORKERS_PER_CORE * len(os.sched_getaffinity(0)), f", {WORKERS_PER_CORE} per core")


def parse_port(text: str) -> int:
    """Read a port of TCP, for argparse."""
    return _parse_integer(text, 1, MAX_PORT)


def _parse_integer(text: str, min_value: int, max_value: int, max_reason: str = "") -> int:
    """Read an integer from `min_value`, 0 or 1, to `max_value`; `max_reason` goes behind that in the message."""
    digits = text.lstrip("0") or "0"
    if not (text.isascii() and text.isdigit()) or (min_value and digits == "0"):
        expected = f"an integer that is at least {min_value}" if min_value else "an integer that is not negative"
        raise argparse.ArgumentTypeError(f"expected {expected}, not {quote(text)}")
    if len(digits) > len(str(max_value)) or int(digits) > max_value:
        raise argparse.ArgumentTypeError(f"expected at most {max_value:,}{max_reason}, not {quote(text)}")
    return int(digits)


def parse_image_path(text: str) -> Path:
    """The path of a chart, for argparse."""
    path = Path(text)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"expected a file named *{', *'.join(FORMATS)}, not {text!r}")
    return path


def add_tracker_option(parser: argparse.ArgumentParser) -> None:
    """Add `--tracker`, the address that `rpc:KEY` asks."""
    parser.add_argument(
        "--tracker", metavar="HOST:PORT", help="for rpc:KEY (default: TVM_TRACKER_HOST and TVM_TRACKER_PORT)"
    )


def parse_model_input(text: str) -> InputSpec:
    """An input of a model, as `--input` has it."""
    try:
        return InputSpec.parse(text)
    except Error as error:
        raise argparse.ArgumentTypeError(str(error)) from error
