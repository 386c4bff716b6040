"""How soon a search is under way: from the command to its first record and to its full rate, and from layer to layer.

    python scripts/startup.py --device cuda:0 -o results
    python scripts/startup.py --device cuda:0 --workers 15 --name one-gpu
    python scripts/startup.py --device cuda --name two-gpus

Runs `tvmconv tune --suite` on three layers as a user would, and reads the times of the records from its log: the first
layer's begin with the command, the others' with the last record of the layer before. Full rate is reached in the second
that brings four fifths of what the layer's seconds bring in the median. Then it times, each in a process of its own,
what a search has to do before its first trial. Writes DIR/NAME.md and NAME.json.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tvmconv import devices, workloads
from tvmconv.cli.errors import Parser, guarded
from tvmconv.cli.options import positive, workers
from tvmconv.errors import Error
from tvmconv.experiments.provenance import provenance
from tvmconv.logs.lines import BadLines
from tvmconv.logs.log import read
from tvmconv.logs.record import Record
from tvmconv.reports.tables import NOTHING, Table, significant

LAYERS = ("conv2d:1x128x40x40,128x128x3x3,s1,p1", "conv2d:1x64x56x56,64x64x3x3,s1,p1", "conv2d:1x384x40x40,256x384x1x1")
FULL = 0.8  # of the median rate
PARTS = {  # what is timed on its own, in a fresh process; a line ends what does not count
    "Python": "",
    "the command line's modules": "import tvmconv.cli.tune",
    "TVM": "import tvm",
    "TVM and all schedules": "from tvmconv import library; library.schedules()",
    "the devices": "from tvmconv import devices; devices.find({device!r})",
    "xgboost": "import xgboost",
}


@dataclass(frozen=True)
class Layer:
    """When the records of a layer came in.

    Attributes:
        workload: its text.
        first: seconds until its first record.
        full: seconds until the full rate; None where it never was.
        rate: records a second then.
        trials: verified ones.
        last: seconds until its last record, last timings included.
    """

    workload: str
    first: float
    full: float | None
    rate: float
    trials: int
    last: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and write."""
    return guarded("startup", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="startup", description="How soon a search is under way.")
    parser.add_argument("workloads", metavar="WORKLOAD", nargs="*", default=LAYERS, help="(default: three layers)")
    parser.add_argument("--device", metavar="D", default="auto", help="as for tvmconv tune (default: %(default)s)")
    parser.add_argument("--seconds", metavar="T", type=positive, default=10.0, help="a layer (default: %(default)g)")
    parser.add_argument("--workers", metavar="N", type=workers, help="processes that build (default: cores - 1)")
    parser.add_argument("--no-parts", action="store_true", help="leave out what is timed on its own")
    parser.add_argument("--name", default="startup", help="of what is written (default: %(default)s)")
    parser.add_argument("-o", dest="out", type=Path, default=Path("results"), metavar="DIR", help="where results go")
    args = parser.parse_args(argv)
    texts = [workloads.parse(text).text for text in args.workloads]
    device = devices.find("cuda:0" if args.device == "cuda" else args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    layers = tuned(texts, args.device, args.seconds, args.workers)
    wanted = {} if args.no_parts else PARTS
    parts = {name: seconds_of(code.format(device=device.text)) for name, code in wanted.items()}
    title = f"A search from its command on, {args.device}, {device.name}"
    tables = [layers_table(layers), *([parts_table(parts)] if parts else [])]
    note = provenance(device, shlex.join(["python", "scripts/startup.py", *argv]))
    print("\n\n".join([title, *(table.text() for table in tables), note]))
    page = "\n\n".join([f"# {title}", *(table.markdown() for table in tables), note])
    (args.out / f"{args.name}.md").write_text(page + "\n", encoding="utf-8")
    data = {"device_name": device.name, "layers": [asdict(layer) for layer in layers], "seconds": parts, "note": note}
    (args.out / f"{args.name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


def tuned(texts: Sequence[str], device: str, seconds: float, workers: int | None) -> list[Layer]:
    """Tune the workloads by one command; when what came in of each."""
    with tempfile.TemporaryDirectory() as folder:
        suite, log = Path(folder) / "suite.json", Path(folder) / "log.jsonl"
        suite.write_text(json.dumps([{"name": text, "text": text} for text in texts]))
        command = [sys.executable, "-m", "tvmconv", "tune", "--suite", str(suite), "--seconds", f"{seconds:g}"]
        command += ["--device", device, "--log", str(log)] + (["--workers", str(workers)] if workers else [])
        begun = time.time()
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            raise Error(f"{shlex.join(command)} ended with {ended.returncode}: {ended.stderr.strip()}")
        records = list(read(log, BadLines()))
    layers = []
    for text in texts:
        own = [record for record in records if record.workload.text == text]
        layers.append(layer_of(text, own, begun))
        begun = max(record.timestamp for record in own)
    return layers


def layer_of(text: str, records: Sequence[Record], begun: float) -> Layer:
    """When the records of a layer came in, after `begun`, in seconds since 1970."""
    trials = sorted(record.timestamp - begun for record in records if not record.final)
    by_second = [sum(second <= moment < second + 1 for moment in trials) for second in range(int(trials[-1]))]
    rate = statistics.median([number for number in by_second if number] or [0])
    full = next((float(second) for second, number in enumerate(by_second) if number >= FULL * rate > 0), None)
    verified = sum(record.ok for record in records if not record.final)
    return Layer(text, trials[0], full, rate, verified, max(record.timestamp for record in records) - begun)


def seconds_of(code: str) -> float:
    """How long Python takes for some code, its own start included: the best of two."""
    took = []
    for _ in range(2):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        took.append(time.perf_counter() - start)
    return min(took)


def layers_table(layers: Sequence[Layer]) -> Table:
    """One line a layer."""
    headers = ("layer", "first record [s]", "full rate [s]", "records/s", "verified", "last [s]")
    rows = [
        (
            layer.workload,
            f"{layer.first:.1f}",
            NOTHING if layer.full is None else f"{layer.full:.0f}",
            significant(layer.rate),
            f"{layer.trials:,}",
            f"{layer.last:.1f}",
        )
        for layer in layers
    ]
    return Table(headers, rows, left=frozenset({"layer"}))


def parts_table(parts: dict[str, float]) -> Table:
    """What a search has to load, each in a process of its own."""
    header = "to start"
    return Table((header, "s"), [(name, f"{took:.2f}") for name, took in parts.items()], left=frozenset({header}))


if __name__ == "__main__":
    sys.exit(main())
