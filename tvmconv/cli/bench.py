"""Measure suites, networks and searches, and make tables of the results.

Run a benchmark. Each prints a table and writes its results, with their provenance, to files.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from tvmconv.cli import output, prestart_search
from tvmconv.cli.errors import CommandParser, run_guarded
from tvmconv.command_text import format_command

BENCHMARKS = {
    "tune-suite": "tune every layer of a suite, then compare the suite with libraries",
    "sweep": "time the optimization steps of the schedules on the layers of a suite",
    "bandwidth": "time every schedule of a filter over array sizes",
    "throughput": "compare trials per second of tvmconv's search and of TVM's MetaSchedule",
    "startup": "time how soon a search measures its first config and reaches its full rate",
    "prebuild": "compile the kernels of a search on one host, and measure them on another",
    "chain": "time a network's convolutions in one CUDA graph",
    "epilogue-cost": "time the fastest kernels of logs with and without epilogues",
    "torch-models": "time whole PyTorch models with PyTorch's kernels and with tvmconv's",
    "relax-models": "time whole networks that TVM compiles, with TVM's kernels and with tvmconv's",
    "metaschedule-candidates": "build MetaSchedule's random candidates of networks for relax-models, without a GPU",
    "torch-training": "time a training step of PyTorch models with PyTorch's kernels and with tvmconv's",
    "torch-overhead": "time what one call of the PyTorch operator costs the host",
    "layouts": "compare convolutions channels first with channels last, ours and cuDNN's",
    "eight-bits": "compare convolutions of 8-bit operands with float16 ones, cuDNN's and cuBLAS's",
    "nvbench": "compare times of kernels by NVBench with tvmconv's own times",
    "prediction-safety": "compare predicted kernels with the best untuned ones on unseen layers",
    "estimates": "compare the schedules' latency estimates with measured records",
    "bounds": "compare predicted times and lower bounds with measured records",
    "networks": "make a table of tuned networks from the results of tune-suite",
    "layer-table": "make a table of tuned layers from the results of tune-suite",
    "limits-chart": "draw the share of the physical limit of each layer of networks",
    "winners": "make tables and a chart of the schedules that win by channels, image and batch",
    "time-to-target": "make a table of how soon searches are as fast as a library, from their logs",
    "torch-table": "make a table of the results of torch-models",
    "torch-training-table": "make a table of the results of torch-training",
    "relax-table": "make a table of the results of relax-models",
}

_WITHOUT_TABLE = {f"tvmconv.benchmarks.{name}" for name in ("prebuild", "metaschedule_candidates", "limits_chart")}


class BenchmarkParser(CommandParser):
    """An argument parser that adds the options of a benchmark's module when it parses a command line."""

    benchmark = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Import the benchmark, add its options and parse."""
        words = sys.argv[1:] if args is None else args
        name = self.benchmark or self.prog.rpartition(" ")[2]
        module = importlib.import_module(f"tvmconv.benchmarks.{name.replace('-', '_')}")
        given = dict(self._defaults)  # a script's own defaults replace those of the options
        self.description = module.__doc__
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_options(self)
        if module.__name__ not in _WITHOUT_TABLE:
            output.add_table_options(
                self, json_help="Print JSON: what the benchmark writes as NAME.json, or the table."
            )
        self.set_defaults(**{"run": module.run, "command": format_command([*self.prog.split(), *words])} | given)
        return super().parse_known_args(words, namespace)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    names = parser.add_subparsers(metavar="NAME", required=True, parser_class=BenchmarkParser)
    for name, text in BENCHMARKS.items():
        names.add_parser(name, help=text)


def run_script(name: str, script: str, argv: Sequence[str] | None = None, **defaults: object) -> int:
    """Run the benchmark `name` as the script `scripts/SCRIPT.py`, with these default values of options."""

    def command() -> int:
        parser = BenchmarkParser(prog=f"python scripts/{script}.py")
        parser.benchmark = name
        parser.set_defaults(**defaults)
        with prestart_search(["bench", name, *(sys.argv[1:] if argv is None else argv)]):
            args = parser.parse_args(argv)
            return args.run(args)

    return run_guarded(script, command)
