"""What each value of each knob is worth, from tuning logs: how fast kernels can be that have it.

    python scripts/knobs.py results/d2l.jsonl -o results
    python scripts/knobs.py results --device "NVIDIA H200"

The logs have to be whole: of the fastest records alone nothing can be told about what is not among them. Writes
NAME-knobs.md, after the first log's name.
"""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tvmconv.cli.errors import Parser, guarded
from tvmconv.errors import Error
from tvmconv.knobs import format_value
from tvmconv.logs.best import log_files
from tvmconv.logs.lines import BadLines
from tvmconv.logs.log import read
from tvmconv.logs.subject import Subject
from tvmconv.reports.knob_values import Found, find_all, worths
from tvmconv.reports.tables import Table, with_section

LEGEND = (
    "Speed: of the best kernel with the value, as a share of the best kernel of its search; the geometric mean of the "
    "searches that tried it and another. Best in: how many of these have it in their best kernel."
)
SOFTWARE = {"tvmconv": "tvmconv", "tvm": "TVM", "nvrtc": "NVRTC"}


def main(argv: Sequence[str] | None = None) -> int:
    """Read logs; print and write the table."""
    return guarded("knobs", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="knobs", description="What each value of each knob is worth, from tuning logs.")
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="a log, or a folder of logs (*.jsonl)")
    parser.add_argument("--device", metavar="D", help='only of the device of this name, such as "NVIDIA H200"')
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", help="write Markdown to this folder")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table between this file's markers for NAME")
    args = parser.parse_args(argv)

    files = log_files(args.files)
    found = _of_one_device(_search(files), args.device)
    table = knob_table(found)
    source = provenance(found, shlex.join(["python", "scripts/knobs.py", *argv]))
    print(table.text())
    print(source)
    name, page = f"{files[0].stem}-knobs", f"{table.markdown()}\n\n{LEGEND} {source}\n"
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{name}.md").write_text(page, encoding="utf-8")
    if args.into:
        text = args.into.read_text(encoding="utf-8")
        args.into.write_text(with_section(text, name, page), encoding="utf-8")
    return 0


def _search(files: Sequence[Path]) -> dict[Subject, Found]:
    """What the searches in logs found; tells of lines that are no records."""
    bad = {file: BadLines() for file in files}
    found = find_all(record for file, lines in bad.items() for record in read(file, lines))
    for file, lines in bad.items():
        if lines.count:
            print(f"knobs: {file}: {lines}", file=sys.stderr)
    return found


def _of_one_device(found: Mapping[Subject, Found], device: str | None) -> dict[Subject, Found]:
    """The searches of more than one config on a device, which must be named where there are several."""
    devices = sorted({subject.device for subject in found})
    if device is None and len(devices) > 1:
        raise Error(f"the logs are of several devices: name one of {', '.join(devices)} with --device")
    chosen = {
        subject: search for subject, search in found.items() if search.seconds and device in (None, subject.device)
    }
    if not chosen:
        raise Error(f"no search of {device or 'any device'} timed a kernel; there are: {', '.join(devices) or 'none'}")
    return chosen


def knob_table(found: dict[Subject, Found]) -> Table:
    """One line a value."""
    headers = ("schedule", "knob", "value", "speed", "searches", "best in")
    rows = [
        (w.schedule, w.knob, format_value(w.value), f"{w.speed:.3f}", str(w.tried), str(w.best)) for w in worths(found)
    ]
    return Table(headers, rows, left=frozenset(headers[:3]))


def provenance(found: Mapping[Subject, Found], command: str) -> str:
    """The device, the versions that ran last, the last record's date, how much was measured, and the command."""
    newest = max((search.newest for search in found.values()), key=lambda record: record.timestamp)
    versions = [f"{name} {newest.versions[key]}" for key, name in SOFTWARE.items() if key in newest.versions]
    date = datetime.datetime.fromtimestamp(newest.timestamp, datetime.timezone.utc).date().isoformat()
    measured = f"{sum(search.timed for search in found.values()):,} kernels of {len(found)} searches"
    return "; ".join([newest.device, ", ".join(versions), date, measured, f"`{command}`"])


if __name__ == "__main__":
    sys.exit(main())
