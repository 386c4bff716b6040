"""Options that several commands and scripts share."""

from __future__ import annotations

import argparse
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tvmconv import baselines, devices, workloads
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cost_model import model
from tvmconv.devices import Arch, Device, DeviceNotFoundError
from tvmconv.errors import Error, FallbackWarning
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
MAX_SECONDS = 10**7  # about four months
WORKERS_PER_CORE = 8
DEFAULT_ARCH = "sm_90"  # the target of the compiler where there is no GPU
LAYER_OPTIONS = ("only", "skip", "batch", "dtype", "layout", "epilogue", "training")

T = TypeVar("T")
OptionGroup = argparse._ActionsContainer  # a parser, or a group of its options


def add_option(
    parser: OptionGroup,
    name: str,
    metavar: str | None,
    text: str,
    *,
    former: str = "",
    repeat: bool = False,
    **how: Any,
) -> None:
    """Add an option, whose help is the text, its default value and a full stop. `former` is a former name that is still
    accepted. With `repeat`, the option may be given several times, and its value is a list.
    """
    if repeat:
        how = {"action": "append", "default": []} | how
        text += "; may be given several times"
    if how.get("default") not in (None, []):
        text += " (default: %(default)s)"
    if metavar:
        how["metavar"] = metavar
    names = [name, former] if former else [name]
    parser.add_argument(*names, help=f"{text}.", **how).option_strings = [name]


def add_workload_argument(parser: OptionGroup, **how: Any) -> None:
    """Add the argument WORKLOAD."""
    parser.add_argument("workload", metavar="WORKLOAD", help=f"Workload, such as {EXAMPLE_WORKLOAD}.", **how)


def name_option_in_errors(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return the parser of an option's value from one that raises `Error`, so that the message names the option."""

    @functools.wraps(parse)
    def parse_value_of_option(text: str) -> T:
        try:
            return parse(text)
        except Error as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_value_of_option


def add_set_option(parser: OptionGroup) -> None:
    """Add `--set KNOB=VALUE`; `args.set` lists the pairs, and the last one of a knob counts."""
    text = "Value of a knob of the schedule, such as tile_w=-1,2,16,2"
    add_option(parser, "--set", "KNOB=VALUE", text, type=name_option_in_errors(parse_assignment), repeat=True)


def add_suite_options(
    parser: OptionGroup, default: str | None = None, *, epilogues: bool = True, training: bool = True
) -> None:
    """Add `--suite` and the options of `add_layer_filters`, for `parse_layers`."""
    text = f"Suite whose layers are used: {', '.join(SUITES)}, or a file NAME.json"
    add_option(parser, "--suite", "S", text, default=default)
    add_layer_filters(parser, epilogues=epilogues, training=training)


def add_layer_filters(parser: OptionGroup, *, epilogues: bool = True, training: bool = True) -> None:
    """Add the options that select the layers of a suite and their variant.

    `--epilogue` is added only if `epilogues`, and `--training` only if `training`.
    """
    add_option(parser, "--only", "TEXT", "Use only layers whose name contains this text, such as 3x3")
    add_option(parser, "--skip", "TEXT", "Leave out layers whose name contains this text")
    text = "Batch size of all layers (default: 1, or as in the file)"
    add_option(parser, "--batch", "N", text, type=parse_count)
    text = "Dtype of all layers (default: f32, or as in the file)"
    add_option(parser, "--dtype", None, text, choices=dtypes.DTYPES_BY_TEXT)
    add_option(
        parser,
        "--layout",
        None,
        "Layout of all layers, or that of inputs and then of outputs (default: nchw, or as in the file)",
        choices=LAYOUTS,
    )
    if epilogues:
        text = "Epilogue of all layers, such as bias,relu (default: none, or as in the file)"
        add_option(parser, "--epilogue", "E", text, type=parse_epilogue_names)
    if training:
        text = "Add the gradients of each layer's input (dgrad) and weight (wgrad); the first layer has no dgrad."
        parser.add_argument("--training", action="store_true", default=None, help=text)


def parse_layers(args: argparse.Namespace) -> LayerSelection:
    """Return the layers that the options of `add_suite_options` select; raise the errors of `select_layers`."""
    training = bool(getattr(args, "training", None))
    return select_layers(args.suite, _parse_variant(args), args.only, args.skip, training=training)


def parse_selection(args: argparse.Namespace, command: str) -> LayerSelection:
    """Return the layers of `--suite`, or the workload as the only layer; raise UsageError unless one is given."""
    if (args.workload is None) == (args.suite is None):
        raise UsageError(f"expected a workload or --suite; see tvmconv {command} --help")
    if args.suite is not None:
        return parse_layers(args)
    reject_layer_options(args)
    workload = workloads.parse(args.workload)
    return LayerSelection(workload.text, {workload.text: Layer(workload.text, workload, 1)})


def parse_layer_sequence(args: argparse.Namespace) -> tuple[str, list[Layer]]:
    """Return a name and all layers that the options select, in the order of the network, as `select_layer_sequence`."""
    return select_layer_sequence(args.suite, _parse_variant(args), args.only, args.skip)


def filter_model_layers(name: str, layers: Sequence[Layer], args: argparse.Namespace) -> list[Layer]:
    """Return the layers of suite `name` that the options of `add_layer_filters` select, each workload once."""
    return filter_layers(name, merge_equal_layers(apply_variant(layers, _parse_variant(args))), args.only, args.skip)


def _parse_variant(args: argparse.Namespace) -> SuiteVariant:
    dtype = dtypes.DTYPES_BY_TEXT[args.dtype].name if args.dtype else None
    return SuiteVariant(args.batch, dtype, args.layout, getattr(args, "epilogue", None))


def reject_layer_options(args: argparse.Namespace) -> None:
    """Raise UsageError if an option of `add_suite_options` was given together with the text of a workload."""
    for name in LAYER_OPTIONS:
        if getattr(args, name) is not None:
            hint = "" if name == "training" else ", or put the value into the workload's text"
            raise UsageError(f"--{name} is for the layers of a suite: name a suite{hint}")


@name_option_in_errors
def parse_epilogue_names(text: str) -> tuple[str, ...]:
    """Parse the names of epilogue operations, joined by commas, for argparse."""
    return epilogue.validate_epilogue(tuple(text.split(",")))


def add_device_option(parser: OptionGroup, text: str = "Device to run on: cuda:N, opencl:N or auto") -> None:
    """Add `--device`, which is `auto` by default."""
    add_option(parser, "--device", "D", text, default="auto")


def add_timing_options(parser: OptionGroup) -> None:
    """Add `--device`, `--baseline`, `--cold`, `--seconds`, `--seed`."""
    add_device_option(parser)
    add_baseline_option(parser)
    parser.add_argument("--cold", action="store_true", help="Time with inputs and outputs outside the L2 cache.")
    add_option(parser, "--seconds", "S", "Time each kernel for this many seconds", type=parse_positive, default=0.5)
    add_option(parser, "--seed", "N", "Seed of the random inputs (default: a new one)", type=parse_seed)


def add_verify_option(parser: OptionGroup) -> None:
    """Add `--verify`, which selects the outputs that are compared with float64 results."""
    text = (
        "Outputs that are compared with float64 results: all (full) or a random sample (sample). auto takes a "
        f"sample for convolutions above {FULL_FLOPS / 1e9:.0f} GFLOP"
    )
    add_option(parser, "--verify", None, text, choices=VERIFICATION_MODES, default="auto")


def describe_sampled(verified_workloads: Iterable[Workload], mode: str) -> list[str]:
    """Return at most one line, which lists the workloads that were verified on a sample of their outputs."""
    sampled = ", ".join(workload.text for workload in verified_workloads if is_sampled(workload, mode))
    return [f"verified on a random sample of outputs (--verify full compares all): {sampled}"] if sampled else []


def add_baseline_option(parser: OptionGroup) -> None:
    """Add `--baseline NAME`; `args.baseline` lists the names."""
    text = "Library that is timed as well"
    add_option(parser, "--baseline", None, text, choices=baselines.load_baselines(), repeat=True)


def timing_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of `add_timing_options`, without the device, as keyword arguments of `run_schedules`."""
    return {"baselines": args.baseline, "cold": args.cold, "seconds": args.seconds, "seed": args.seed}


def add_page(parser: OptionGroup) -> None:
    """Add `--update-page`, for `update_page`."""
    text = "Markdown page in which the section between the markers of this table is replaced"
    add_option(parser, "--update-page", "FILE", text, former="--into", dest="page", type=Path)


def update_page(page: Path | None, section: str, text: str) -> None:
    """Replace a section of `page` by `text`, if a page was named."""
    if page:
        page.write_text(replace_section(page.read_text(encoding="utf-8"), section, text), encoding="utf-8")


def add_cost_model_option(parser: OptionGroup) -> None:
    """Add `--cost-model`, which takes effect when it is parsed."""
    text = "Cost model that tvmconv train wrote, or none (default: the model that comes with tvmconv)"
    add_option(parser, "--cost-model", "F", text, former="--knowledge", type=_use_cost_model)


@name_option_in_errors
def _use_cost_model(text: str) -> str:
    """Set the cost model of this process, for argparse."""
    model.set_cost_model(None if text == "none" else text)
    return text


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--arch`, which exclude each other."""
    group = parser.add_mutually_exclusive_group()
    add_option(group, "--device", "D", "Device to compile for: cuda:N, opencl:N or auto")
    text = f"Architecture to compile for, such as {DEFAULT_ARCH} (default: that of the GPU, or {DEFAULT_ARCH})"
    add_option(group, "--arch", "A", text)


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
    """Parse `KNOB=VALUE` into the knob's name and its value; raise Error for other texts."""
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise Error(f"expected KNOB=VALUE, such as tile_w=-1,2,16,2, not {text!r}")
    return name, parse_value(value)


def parse_names(text: str) -> list[str]:
    """Parse names that are joined by commas, for argparse."""
    names = text.split(",")
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names of schedules joined by commas, not {text!r}")
    return names


def parse_positive(text: str) -> float:
    """Parse a positive number of at most `MAX_SECONDS`, for argparse."""
    value = math.nan
    with suppress(ValueError):
        value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a positive number, not {quote(text)}")
    if value > MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_SECONDS:,}, not {quote(text)}")
    return value


def make_integer_parser(min_value: int, max_value: int, max_reason: str = "") -> Callable[[str], int]:
    """Return a function for argparse that parses an integer from `min_value`, 0 or 1, to `max_value`. The message for
    larger integers has `max_reason` behind the maximum.
    """

    def parse_integer(text: str) -> int:
        digits = text.lstrip("0") or "0"
        if not (text.isascii() and text.isdigit()) or (min_value and digits == "0"):
            expected = f"an integer that is at least {min_value}" if min_value else "an integer that is not negative"
            raise argparse.ArgumentTypeError(f"expected {expected}, not {quote(text)}")
        if len(digits) > len(str(max_value)) or int(digits) > max_value:
            raise argparse.ArgumentTypeError(f"expected at most {max_value:,}{max_reason}, not {quote(text)}")
        return int(digits)

    return parse_integer


parse_seed = make_integer_parser(0, (1 << 63) - 1)
parse_count = make_integer_parser(1, 10**9)
parse_port = make_integer_parser(1, (1 << 16) - 1)
parse_workers = make_integer_parser(
    1, WORKERS_PER_CORE * len(os.sched_getaffinity(0)), f", {WORKERS_PER_CORE} per core"
)
parse_model_input = name_option_in_errors(InputSpec.parse)


def parse_image_path(text: str) -> Path:
    """Parse the path of an image file, for argparse."""
    path = Path(text)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"expected a file named *{', *'.join(FORMATS)}, not {text!r}")
    return path


def add_tracker_option(parser: OptionGroup) -> None:
    """Add `--tracker`, the address of TVM's RPC tracker."""
    text = "Address of the RPC tracker for rpc:KEY (default: TVM_TRACKER_HOST and TVM_TRACKER_PORT)"
    add_option(parser, "--tracker", "HOST:PORT", text)
