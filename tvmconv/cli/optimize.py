"""Replace convolutions of a PyTorch model by faster kernels of tvmconv.

Find kernels for the convolutions of a PyTorch model and the operations that follow them, use those that are faster than
PyTorch's, and print a report on each layer. With -o, write the report and the model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tvmconv.cli import output
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.options import add_option, parse_model_input, parse_positive
from tvmconv.cli.progress import progress_line
from tvmconv.errors import translate_to_model_error
from tvmconv.models.input_spec import EXAMPLE_TEXT, InputSpec
from tvmconv.workloads import dtypes
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST, UNIFORM_LAYOUTS

REPORT, MODEL = "report.txt", "model.tvmconv"
QUANTIZED_DTYPES = (dtypes.FLOAT8_E4M3.text, dtypes.INT8.text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    text = "PyTorch module, or a function that returns one."
    parser.add_argument("model", metavar="PACKAGE.MODULE:CALLABLE", help=text)
    text = f"Input of the model, such as {EXAMPLE_TEXT}, in order"
    add_option(parser, "--input", "SIZES", text, type=_parse_input, repeat=True, required=True)
    text = "Dtype of the model and its inputs; tf32 is float32 with TF32 allowed"
    add_option(parser, "--dtype", None, text, choices=dtypes.MODEL_DTYPES_BY_TEXT, default="f32")
    text = (
        f"Memory layout of the model and its inputs; {CHANNELS_LAST} is channels_last (default: {CHANNELS_FIRST} for "
    )
    add_option(parser, "--layout", None, f"{text}f32, else {CHANNELS_LAST})", choices=UNIFORM_LAYOUTS)
    text = (
        "Tune the kernels, with this time limit in seconds for all layers from the start of the command; writing the "
        "model takes further time"
    )
    add_option(parser, "--seconds", "T", text, type=parse_positive)
    parser.add_argument("--log", metavar="F", type=Path, help="Log to take kernels from and to append trials to.")
    parser.add_argument("--device", metavar="D", help="Device to run on: cuda:N or opencl:N (default: auto).")
    text = "Use tvmconv's kernels for all layers, even where PyTorch's are faster."
    parser.add_argument("--all", action="store_true", help=text)
    parser.add_argument("-o", dest="out", metavar="DIR", type=Path, help=f"Folder to write {REPORT} and {MODEL} to.")
    _add_quantization_options(parser)
    output.add_table_options(parser, json_help="Print the report as JSON.")


def _add_quantization_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("quantization to 8 bits")
    text = "Dtype of the operands of convolutions that are faster and accurate enough in 8 bits"
    add_option(group, "--quantize", None, text, choices=QUANTIZED_DTYPES)
    text = (
        "File of torch.save with a list of typical inputs of the model, each a tensor or a tuple of all inputs "
        "(default: the random input that is timed, with which errors say little about the model)"
    )
    add_option(group, "--calibrate", "F", text, type=Path)
    text = "Largest relative L2 error of a quantized layer; others keep the model's dtype (default: 0.1)"
    add_option(group, "--max-layer-error", "E", text, type=parse_positive)


def _parse_input(text: str) -> InputSpec:
    parsed_input = parse_model_input(text)
    if parsed_input.name:
        raise argparse.ArgumentTypeError(f"expected sizes without a name, as inputs are given in order, not {text!r}")
    return parsed_input


def run(args: argparse.Namespace) -> int:
    """Optimize a model, print the report, and write the report and the model."""
    for name in ("calibrate", "max_layer_error"):
        if getattr(args, name) is not None and args.quantize is None:
            raise UsageError(f"--{name.replace('_', '-')} is for --quantize")
    if args.out:
        with _translate_write_errors(args.out):
            args.out.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the code of the model may print
            optimized = _optimize(args)
    except KeyboardInterrupt:
        if args.seconds is not None:
            print_note("interrupted; the log has what was measured")
        raise
    report = optimized.report()
    if args.json or args.csv:
        output.print_table(report.table, args, asdict(report))
    else:
        print(report.format_text(output.make_table_formatter(args)))
    if args.out:
        with _translate_write_errors(args.out):
            (args.out / REPORT).write_text(f"{report}\n", encoding="utf-8")
        optimized.save(args.out / MODEL)
        print_note(f"tvmconv.torch.load({str(args.out / MODEL)!r}) loads the model")
    return 0


@contextlib.contextmanager
def _translate_write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {os.fspath(folder)}: {error.strerror}") from error


def _make_tensor(model_input: InputSpec, dtype: Any, torch_device: Any) -> Any:
    """Return zeros for an input with a dtype of its own, else random numbers in the dtype of the model."""
    import torch

    if model_input.dtype:
        return torch.zeros(model_input.shape, dtype=getattr(torch, model_input.dtype), device=torch_device)
    return torch.randn(model_input.shape, dtype=torch.float32, device=torch_device).to(dtype)


def _read_batches(file: Path, dtype: Any, torch_device: Any) -> list[Any]:
    """Return the inputs for calibration of a file, on a device, with floats in the model's dtype."""
    import torch
    from torch.utils._pytree import tree_map

    try:
        batches = torch.load(file, map_location=torch_device, weights_only=True)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except Exception as error:  # of pickle, zipfile or torch
        raise UsageError(f"cannot read {file}: expected a list of tensors, written by torch.save") from error
    if not isinstance(batches, list):
        raise UsageError(f"{file}: expected a list of inputs of the model, not {type(batches).__name__}")

    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    converted: list[Any] = tree_map(convert, batches)
    return converted


def _make_quantization(args: argparse.Namespace, example: tuple[Any, ...], dtype: Any, torch_device: Any) -> Any:
    """Return the options of the quantization; None for none."""
    from tvmconv.torch.quantization_options import DEFAULT_MAX_ERROR, make_quantization_options

    if args.quantize is None:
        return None
    batches: list[Any] = [example]
    if args.calibrate:
        batches = _read_batches(args.calibrate, dtype, torch_device)
    else:
        print_note("calibrated with random inputs: time this model, but do not use it; --calibrate takes typical ones")
    return make_quantization_options(args.quantize, batches, "mse", args.max_layer_error or DEFAULT_MAX_ERROR)


def _optimize(args: argparse.Namespace) -> Any:
    # The first import raises an error that names missing packages.
    from tvmconv.torch.optimize import CPU_MODEL_WARNING, optimize_within  # noqa: I001
    import torch

    from tvmconv import devices
    from tvmconv.deadline import Deadline, get_process_start
    from tvmconv.models.torch_module import make_module
    from tvmconv.torch.tensor_layout import MEMORY_FORMATS
    from tvmconv.torch.model import convert_weight_memory_format

    device = devices.find_device(args.device or "auto")
    if isinstance(device, devices.Arch):
        raise UsageError(f"{device.text} can only be compiled for: expected cuda:N or opencl:N to run the model on")
    torch_device = torch.device(device.text if device.kind == "cuda" else "cpu")
    torch.backends.cudnn.allow_tf32 = args.dtype == "tf32"
    torch.backends.cudnn.benchmark = True
    dtype = getattr(torch, dtypes.DTYPES_BY_TEXT[args.dtype].storage)
    layout = args.layout or (CHANNELS_FIRST if args.dtype == "f32" else CHANNELS_LAST)
    formats = MEMORY_FORMATS if layout == CHANNELS_LAST else {}
    model = make_module(args.model)
    with translate_to_model_error(f"{args.model} on {torch_device}"):  # the device may have too little memory
        model = model.to(torch_device, dtype)
        convert_weight_memory_format(model, formats)
        inputs = [_make_tensor(input_tensor, dtype, torch_device) for input_tensor in args.input]
        inputs = [
            input_tensor.contiguous(memory_format=formats.get(input_tensor.dim() - 2, torch.contiguous_format))
            for input_tensor in inputs
        ]
    quantization = _make_quantization(args, tuple(inputs), dtype, torch_device)
    choose: Any = "tuned" if args.all else "fastest"
    if device.kind != "cuda" and args.seconds is not None and not args.all:
        print_note(CPU_MODEL_WARNING)
    with progress_line(f"{args.model}: ") as show:
        return optimize_within(
            None if args.seconds is None else Deadline.after(args.seconds, get_process_start()),
            model,
            tuple(inputs),
            log=args.log,
            device=device.text,
            choose=choose,
            quantization=quantization,
            progress=show,
        )
