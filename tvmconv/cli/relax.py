"""Compile an ONNX model with TVM and tuned convolutions.

Import an ONNX model into TVM Relax, replace its convolutions by kernels of tvmconv, print a report on each convolution,
and with -o compile the model to a library that TVM's runtime loads.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tvmconv.cli import output
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.options import add_option, parse_count, parse_model_input, parse_positive
from tvmconv.errors import ModelError, describe_error, translate_to_model_error
from tvmconv.models.input_spec import EXAMPLE_TEXT, InputSpec
from tvmconv.optional_packages import format_install_command

LAYOUTS = ("auto", "nchw", "nhwc")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("model", metavar="MODEL.onnx", type=Path, help="ONNX model.")
    text = "Target: an architecture such as sm_90, cuda:N, opencl:N, llvm, or a name of TVM such as nvidia/nvidia-h100"
    parser.add_argument("--target", metavar="T", required=True, help=f"{text}.")
    text = f"Input of the model with dynamic dimensions, such as {EXAMPLE_TEXT}, in order or by name"
    add_option(parser, "--input", "[NAME=]SIZES", text, type=parse_model_input, repeat=True)
    text = "Batch size with kernels of its own, of a model with a dynamic batch that --input does not set"
    add_option(parser, "--batch-size", "N", text, type=parse_count, repeat=True)
    text = "Search for kernels on the GPU of the target, with this time limit in seconds for all layers"
    add_option(parser, "--seconds", "T", text, type=parse_positive)
    text = "Compute in float16; inputs and outputs keep their dtypes"
    parser.add_argument("--float16", action="store_true", help=f"{text}.")
    text = "Round the operands of float32 convolutions to TF32"
    parser.add_argument("--tf32", action="store_true", help=f"{text}.")
    parser.add_argument("--log", metavar="F", type=Path, help="Log to take kernels from and to append trials to.")
    text = "Launch each kernel from the host, instead of a CUDA graph that the first call captures"
    parser.add_argument("--no-cuda-graph", action="store_true", help=f"{text}.")
    add_option(parser, "--layout", None, "Layout of chains of convolutions", choices=LAYOUTS, default="auto")
    parser.add_argument("-o", dest="out", metavar="F.so", type=Path, help="Library to write.")
    output.add_table_options(parser, json_help="Print the report as JSON.")


def run(args: argparse.Namespace) -> int:
    """Optimize a model, print the report, and write the library."""
    mod = _import_model(args.model, args.input or ())
    from tvmconv.relax.optimize import optimize_with_report
    from tvmconv.relax.precision import to_float16

    if args.float16:
        mod = to_float16(mod)
    how = {"layout": args.layout, "batch_sizes": args.batch_size, "tf32": args.tf32}
    optimized = optimize_with_report(mod, args.target, log=args.log, seconds=args.seconds, **how)
    report = optimized.report
    if args.json or args.csv:
        output.print_table(report.table, args, asdict(report))
    else:
        print(report.format_text(output.make_table_formatter(args)))
    if args.out:
        with translate_to_model_error(f"TVM cannot compile {args.model}"):
            executable = optimized.compile(cuda_graph=not args.no_cuda_graph)
        try:
            executable.export_library(str(args.out))
        except (OSError, RuntimeError) as error:
            raise UsageError(f"cannot write {args.out}: {describe_error(error)}") from error
        print_note(f"tvm.runtime.load_module({str(args.out)!r}) loads the model")
    return 0


def _import_model(path: Path, inputs: Sequence[InputSpec]) -> Any:
    """Return an ONNX model as a module of Relax.

    Raises:
        ModelError: The package onnx is missing, or the file is not a model that TVM imports.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ModelError(f"ONNX models need the package onnx: {format_install_command('onnx')}")
    from onnx.external_data_helper import load_external_data_for_model

    from tvmconv.models.onnx_graph import read_model
    from tvmconv.relax.frontends import from_onnx

    model = read_model(path, inputs)
    printed = contextlib.redirect_stdout(io.StringIO())  # TVM prints the operands of an operator that it refuses
    with translate_to_model_error(f"TVM cannot import {path}"), printed, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names of inputs that TVM changes
        load_external_data_for_model(model, str(path.parent))
        return from_onnx(model)
