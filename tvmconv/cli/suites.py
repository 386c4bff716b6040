"""List the suites, the layers of a suite, or the convolutions of a model.

List the suites, the layers of a suite, or the convolutions of a model with their epilogues. Each distinct layer is
listed once, with the number of its occurrences. With -o, write a file for --suite.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.errors import ModelError
from tvmconv.models.input_spec import DTYPES as INPUT_DTYPES
from tvmconv.models.input_spec import EXAMPLE_TEXT
from tvmconv.models.model_layers import derive_layers
from tvmconv.reports.tables import Table
from tvmconv.workloads import Layer, suite
from tvmconv.workloads.dtypes import DTYPES
from tvmconv.workloads.layout import CHANNELS_LAST
from tvmconv.workloads.suites import SUITES, write_suite

USAGE = "%(prog)s [NAME | --from MODEL [--input SHAPE]] [options] [-o FILE]"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    text = f"Suite to list: one of {', '.join(SUITES)}, or a file NAME.json."
    parser.add_argument("suite", metavar="NAME", nargs="?", help=text)
    text = (
        "Model: an ONNX file, or package.module:callable, which is imported and has to be a PyTorch module or a "
        "function that returns one"
    )
    options.add_option(parser, "--from", "MODEL", text, dest="model")
    text = (
        f"Input of the model, such as {EXAMPLE_TEXT}, in order or by name. ONNX models need it for dynamic dimensions "
        f"only. PyTorch models need all inputs, each with an optional dtype: {', '.join(INPUT_DTYPES)} (default: f32)"
    )
    options.add_option(parser, "--input", "[NAME=]SIZES[,DTYPE]", text, type=options.parse_model_input, repeat=True)
    parser.add_argument("-o", dest="out", metavar="FILE", type=Path, help="JSON file to write the layers to.")
    options.add_layer_filters(parser)
    output.add_table_options(parser, json_help="Print JSON, as -o writes it.")


def run(args: argparse.Namespace) -> int:
    """Print the suites, or print or write the layers of a suite or of a model."""
    if args.model is None and args.input:
        raise UsageError("--input is for a model: name a model by --from")
    if args.suite is None and args.model is None:
        return _list_suites(args)
    if args.suite is not None and args.model is not None:
        raise UsageError(f"expected {args.suite} or --from {args.model}, not both")
    layers = options.parse_layers(args).layers.values() if args.model is None else _derive_model_layers(args)
    if args.out:
        write_suite(layers, args.out)
    else:
        rows = [[layer.name, str(layer.count), layer.workload.text] for layer in layers]
        headers = ("layer", "times", "workload")
        json_data = [{"name": layer.name, "text": layer.workload.text, "count": layer.count} for layer in layers]
        output.print_table(Table(headers, rows, frozenset({"layer", "workload"})), args, json_data)
    return 0


def _list_suites(args: argparse.Namespace) -> int:
    options.reject_layer_options(args)
    if args.out:
        raise UsageError("-o is for the layers of a suite: name a suite, or a model by --from")
    rows = [[name, str(len(suite(name)))] for name in SUITES]
    json_data = [{"suite": name, "workloads": int(count)} for name, count in rows]
    output.print_table(Table(("suite", "workloads"), rows, left_aligned=frozenset({"suite"})), args, json_data)
    return 0


def _derive_model_layers(args: argparse.Namespace) -> list[Layer]:
    """Return the selected layers of a model, and print on stderr which convolutions are left out."""
    derived = derive_layers(args.model, args.input, training=bool(args.training))
    for line in derived.skipped_layers:
        print_note(f"left out: {line}")
    if not derived.layers:
        other_text = " that is a workload" if derived.skipped_layers else ""
        raise ModelError(f"{args.model} has no convolution{other_text}")
    layers = options.filter_model_layers(args.model, derived.layers, args)
    convolutions: list[Any] = [layer.workload for layer in layers]
    if any(DTYPES[w.dtype].has_8_bits and w.layout != CHANNELS_LAST for w in convolutions):
        print_note(f"tensor cores compute convolutions of 8 bits channels last: choose --layout {CHANNELS_LAST}")
    return layers
