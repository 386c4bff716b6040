"""The d2l-tvm chapter's sweep: the whole ladder for every channel count, as tables and a chart of GFLOP/s.

    python scripts/d2l_sweep.py --device cuda:0 --baseline cudnn -o tuning_logs/h200
    python scripts/d2l_sweep.py --from tuning_logs/h200/d2l.json -o tuning_logs/h200    # table and chart again

Writes SUITE.json (everything measured, and on what), SUITE.md (the table) and SUITE.png (the chart).
"""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmconv import devices
from tvmconv.cli.errors import Parser, guarded
from tvmconv.cli.options import add_timing, tell_choice
from tvmconv.cli.progress import progress_line
from tvmconv.errors import Error
from tvmconv.experiment import Result, run_ladder
from tvmconv.plot import draw_sweep, sweep_info
from tvmconv.provenance import provenance
from tvmconv.report import result_text, sweep_table
from tvmconv.workloads import Layer, suite

CHANNELS_SUITE = "d2l"  # its layers differ in nothing but their channels


@dataclass(frozen=True)
class Sweep:
    """The results of a suite.

    Attributes:
        suite: its name.
        labels: what tells each workload from the others.
        results: one for each label.
        provenance: on what they were measured, with what, when.
    """

    suite: str
    labels: list[str]
    results: list[Result]
    provenance: str

    @property
    def axis(self) -> str:
        """What the labels are."""
        return "channels" if self.suite == CHANNELS_SUITE else "layer"

    def to_json(self) -> str:
        """The sweep as JSON, one layer a line."""
        layers = [
            json.dumps({"label": label, "result": result.to_json()}, ensure_ascii=False)
            for label, result in zip(self.labels, self.results, strict=True)
        ]
        head = json.dumps({"suite": self.suite, "provenance": self.provenance}, ensure_ascii=False)
        return head.removesuffix("}") + ', "layers": [\n' + ",\n".join(layers) + "\n]}\n"

    @classmethod
    def from_json(cls, data: Any) -> Sweep:
        """The sweep that `to_json` wrote."""
        layers = data["layers"]
        results = [Result.from_json(layer["result"]) for layer in layers]
        if not results:
            raise ValueError("no layers")
        return cls(data["suite"], [layer["label"] for layer in layers], results, data["provenance"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or read, a sweep; print and write it."""
    return guarded("d2l_sweep", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="d2l_sweep", description="The ladder over the channels of the d2l-tvm chapter.")
    parser.add_argument("--suite", default=CHANNELS_SUITE, help="another suite instead (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="images at a time (default: %(default)s)")
    parser.add_argument("--channels", type=_integers, metavar="C,C,...", help="only layers with so many input channels")
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help="do not measure: read this SUITE.json")
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", help="write JSON, Markdown and PNG to this folder")
    add_timing(parser)
    args = parser.parse_args(argv)

    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)  # before measuring: it may not be allowed
    sweep = _read(args.file) if args.file else _measure(args, shlex.join(["python", "scripts/d2l_sweep.py", *argv]))
    table = sweep_table(sweep.axis, sweep.labels, sweep.results)
    print(table.text())
    print(sweep.provenance)
    if args.out:
        _write(sweep, args.out)
    return 0 if all(result.ok for result in sweep.results) else 1


def _integers(text: str) -> set[int]:
    try:
        return {int(part) for part in text.split(",")}
    except ValueError as error:
        raise ArgumentTypeError(f"expected numbers such as 16,32, not {text!r}") from error


def _measure(args: Any, command: str) -> Sweep:
    layers = _layers(args.suite, args.batch, args.channels)
    device = devices.find(args.device)
    results = []
    for number, layer in enumerate(layers, 1):
        with progress_line(f"{device.text}: layer {number} of {len(layers)}, {layer.name}, ") as progress:
            result = run_ladder(
                layer.workload,
                device=device,
                baseline=args.baseline,
                cold=args.cold,
                seconds=args.seconds,
                seed=args.seed,
                progress=progress,
            )
        if number == 1:
            tell_choice(args.device, device)
        print(result_text(result), end="\n\n", flush=True)
        results.append(result)
    library = next((row.library for row in results[0].rows if row.library), None)
    labels = [str(layer.workload.C) if args.suite == CHANNELS_SUITE else layer.name for layer in layers]
    return Sweep(args.suite, labels, results, provenance(device, command, library))


def _layers(name: str, batch: int, channels: set[int] | None) -> list[Layer]:
    layers = suite(name, batch)
    chosen = [layer for layer in layers if channels is None or layer.workload.C in channels]
    if not chosen:
        there = sorted({layer.workload.C for layer in layers})
        raise Error(f"no layer of {name} has those channels; there are {', '.join(map(str, there))}")
    return chosen


def _read(file: Path) -> Sweep:
    try:
        return Sweep.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, LookupError, TypeError) as error:
        raise Error(f"{file}: not a file that this script wrote with -o ({type(error).__name__}: {error})") from error


def _write(sweep: Sweep, folder: Path) -> None:
    base = folder / sweep.suite
    base.with_suffix(".json").write_text(sweep.to_json(), encoding="utf-8")
    table = sweep_table(sweep.axis, sweep.labels, sweep.results)
    caption = "Median times; in parentheses the speed-up over `default`."
    base.with_suffix(".md").write_text(f"{table.markdown()}\n\n{caption}\n{sweep.provenance}\n", encoding="utf-8")
    first = sweep.results[0]
    title = f"Convolutions of suite {sweep.suite}, {first.workload.dtype}, on {first.device_name}"
    draw_sweep(sweep_info(title, sweep.axis, sweep.labels, sweep.results), base.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
