"""The whole ladder over the layers of a suite (by default the d2l-tvm chapter's), as tables and a chart of GFLOP/s.

    python scripts/sweep.py --device cuda:0 --baseline cudnn -o results
    python scripts/sweep.py --suite resnet50 --only 3x3 --device cuda:0 -o results
    python scripts/sweep.py --from results/d2l.json -o results      # the table and the chart again

Writes NAME.json (everything measured, and on what), NAME.md (the table) and NAME.png (the chart).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmconv import devices
from tvmconv.cli.errors import Parser, guarded
from tvmconv.cli.options import add_timing, how_to_time, tell_choice
from tvmconv.cli.progress import progress_line
from tvmconv.errors import Error
from tvmconv.experiment import Result, run_ladder
from tvmconv.plot import draw_sweep, sweep_info
from tvmconv.provenance import provenance
from tvmconv.report import result_text, sweep_table, with_section
from tvmconv.workloads import Layer, suite

CHANNELS_SUITE = "d2l"  # its layers differ in nothing but their channels


@dataclass(frozen=True)
class Sweep:
    """The results of a suite.

    Attributes:
        name: the suite's name, and which of its layers.
        labels: what tells each workload from the others.
        results: one for each label.
        provenance: on what they were measured, with what, when.
    """

    name: str
    labels: list[str]
    results: list[Result]
    provenance: str

    @property
    def axis(self) -> str:
        """What the labels are."""
        return "channels" if all(label.isdigit() for label in self.labels) else "layer"

    def to_json(self) -> str:
        """The sweep as JSON, one layer a line."""
        layers = [
            json.dumps({"label": label, "result": result.to_json()}, ensure_ascii=False)
            for label, result in zip(self.labels, self.results, strict=True)
        ]
        head = json.dumps({"name": self.name, "provenance": self.provenance}, ensure_ascii=False)
        return head.removesuffix("}") + ', "layers": [\n' + ",\n".join(layers) + "\n]}\n"

    @classmethod
    def from_json(cls, data: Any) -> Sweep:
        """The sweep that `to_json` wrote."""
        layers = data["layers"]
        results = [Result.from_json(layer["result"]) for layer in layers]
        if not results:
            raise ValueError("no layers")
        return cls(data["name"], [layer["label"] for layer in layers], results, data["provenance"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or read, a sweep; print and write it."""
    return guarded("sweep", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="sweep", description="The ladder of schedules over the layers of a suite.")
    parser.add_argument("--suite", default=CHANNELS_SUITE, help="whose layers (default: %(default)s)")
    parser.add_argument("--only", metavar="TEXT", help="only layers whose name contains this, such as 3x3")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="images at a time (default: %(default)s)")
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help="do not measure: read this NAME.json")
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", help="write JSON, Markdown and PNG to this folder")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table between this file's markers for NAME")
    add_timing(parser)
    args = parser.parse_args(argv)

    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)  # before measuring: it may not be allowed
    sweep = _read(args.file) if args.file else _measure(args, shlex.join(["python", "scripts/sweep.py", *argv]))
    table = sweep_table(sweep.axis, sweep.labels, sweep.results)
    print(table.text())
    print(sweep.provenance)
    if args.out:
        _write(sweep, args.out)
    if args.into:
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(with_section(page, sweep.name, _markdown(sweep)), encoding="utf-8")
    return 0 if all(result.ok for result in sweep.results) else 1


def _measure(args: Any, command: str) -> Sweep:
    layers = _layers(args.suite, args.batch, args.only)
    device = devices.find(args.device)
    results = []
    for number, layer in enumerate(layers, 1):
        with progress_line(f"{device.text}: layer {number} of {len(layers)}, {layer.name}, ") as progress:
            result = run_ladder(layer.workload, device=device, progress=progress, **how_to_time(args))
        if number == 1:
            tell_choice(args.device, device)
        print(result_text(result), end="\n\n", flush=True)
        results.append(result)
    library = next((row.library for row in results[0].rows if row.library), None)
    labels = [str(layer.workload.C) if args.suite == CHANNELS_SUITE else layer.name for layer in layers]
    name = f"{args.suite}-{args.only}" if args.only else args.suite
    return Sweep(name, labels, results, provenance(device, command, library))


def _layers(name: str, batch: int, only: str | None) -> list[Layer]:
    layers = suite(name, batch)
    chosen = [layer for layer in layers if (only or "") in layer.name]
    if not chosen:
        raise Error(f"no layer of {name} is named like {only!r}; there are {', '.join(layer.name for layer in layers)}")
    return chosen


def _read(file: Path) -> Sweep:
    try:
        return Sweep.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, LookupError, TypeError) as error:
        raise Error(f"{file}: not a file that this script wrote with -o ({type(error).__name__}: {error})") from error


def _write(sweep: Sweep, folder: Path) -> None:
    (folder / f"{sweep.name}.json").write_text(sweep.to_json(), encoding="utf-8")
    (folder / f"{sweep.name}.md").write_text(_markdown(sweep), encoding="utf-8")
    first = sweep.results[0]
    title = f"Convolutions of suite {sweep.name}, {first.workload.dtype}, on {first.device_name}"
    draw_sweep(sweep_info(title, sweep.axis, sweep.labels, sweep.results), folder / f"{sweep.name}.png")


def _markdown(sweep: Sweep) -> str:
    table = sweep_table(sweep.axis, sweep.labels, sweep.results)
    caption = "Median times; in parentheses the speed-up over `default`."
    return f"{table.markdown()}\n\n{caption} {sweep.provenance}\n"


if __name__ == "__main__":
    sys.exit(main())
