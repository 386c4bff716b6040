"""Control characters and marks of direction in names and contents of files do not reach the terminal."""

import json

import pytest
from instant import made_up

from tvmconv import cli, parse
from tvmconv.errors import escape_unprintable
from tvmconv.reports.tables import Table

NAME = "x\x1b[31mred\u202e"
SHOWN = r"x\x1b[31mred\u202e"
WORKLOAD = "conv2d:1x4x8x8,4x4x1x1,s1,p0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("µs ± ×\n", "µs ± ×\n"), ("\x1b[0m\r\t", r"\x1b[0m\r\t"), ("\u202ea", r"\u202ea"), ("\udcff\x85", r"\udcff\x85")],
)
def test_printable_escapes_what_a_terminal_obeys(text, expected):
    assert escape_unprintable(text) == expected


def test_table_escapes_what_is_not_printable():
    table = Table(("name",), [[NAME], ["a\nb"]])
    assert table.format_text().split() == ["name", SHOWN, r"a\nb"]
    assert SHOWN in table.format_markdown()


@pytest.mark.parametrize(
    "words",
    [
        ("log", "best", "FILE"),
        ("log", "stats", "FILE"),
        ("log", "merge", "FILE", "-o", "OUT.jsonl"),
        ("log", "import", "FILE", "-o", "OUT.jsonl"),
        ("plot", "FILE", "-o", "OUT.svg"),
        ("plot", "MISSING", "-o", "OUT.svg"),
        ("suites", "FILE"),
        ("counters", "--from", "FILE"),
        ("simulate", "FILE"),
        ("log", "best", "MISSING"),
    ],
    ids=" ".join,
)
def test_names_of_files_are_escaped(words, tmp_path, capsys):
    record = made_up(parse(WORKLOAD), "tiling", {}, "a\u202edevice", timestamp=1.0)
    file = tmp_path / f"{NAME}.jsonl"
    file.write_text(f"{record.line()}\nno record\n")
    places = {"FILE": file, "MISSING": tmp_path / f"no{NAME}", "OUT.jsonl": tmp_path / f"o{NAME}.jsonl"}
    cli.main([str(places.get(word, word.replace("OUT", str(tmp_path / f"o{NAME}")))) for word in words])
    told = "".join(capsys.readouterr())
    assert SHOWN in told
    assert all(line.isprintable() for line in told.splitlines())


def test_label_of_a_bad_value_is_escaped(tmp_path, capsys):
    file = tmp_path / "f.json"
    file.write_text('{"name":' + json.dumps({NAME: 1}) + ', "provenance": "", "layers": [{"label": "x"}]}')
    assert cli.main(["plot", str(file), "-o", str(tmp_path / "o.svg")]) == 2
    assert all(line.isprintable() for line in capsys.readouterr().err.splitlines())
