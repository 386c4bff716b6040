"""JSON is read by types, and what is wrong is told with its place."""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypedDict

import pytest

from tvmconv import cli, jsonfile
from tvmconv.errors import AnalysisError
from tvmconv.jsonfile import JsonError


class Kind(IntEnum):
    A = 0
    B = 3


class Counts(TypedDict):
    loads: float


@dataclass(frozen=True)
class Inner:
    extents: tuple[int, int]

    def __post_init__(self):
        if min(self.extents) < 1:
            raise AnalysisError("extents of at least 1")


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner | None = None
    kind: Kind = Kind.A
    counts: Counts | None = None
    value: bool | int | float | str | tuple[int, ...] = 0
    times: tuple[float, ...] = ()


def decode(text):
    return jsonfile.parse_json(text)["rows"].elements()[0].decode(Outer)


def test_dataclass_is_read_by_its_annotations():
    row = '{"name": "a", "inner": {"extents": [1, 2]}, "kind": 3, "counts": {"loads": 1, "more": []}, "value": [1]}'
    expected = Outer("a", Inner((1, 2)), Kind.B, {"loads": 1, "more": []}, (1,))
    assert decode(f'{{"rows": [{row}]}}') == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("null", "rows[0]: expected an object, got null"),
        ("{}", 'rows[0]: expected an object with "name", got {}'),
        ('{"name": null}', "rows[0].name: expected a text, got null"),
        ('{"name": "\\ud800"}', "rows[0].name: expected a text of whole characters"),
        ('{"name": "a", "other": 1}', 'rows[0]: expected an object without "other"'),
        ('{"name": "a", "inner": []}', "rows[0].inner: expected an object or null, got []"),
        ('{"name": "a", "inner": {"extents": [1]}}', "rows[0].inner.extents: expected a list of 2, got a list of 1"),
        ('{"name": "a", "inner": {"extents": [0, 1]}}', "rows[0].inner: extents of at least 1"),
        ('{"name": "a", "inner": {"extents": [1, 1.5]}}', "rows[0].inner.extents[1]: expected an integer, got 1.5"),
        ('{"name": "a", "inner": {"extents": [1, true]}}', "rows[0].inner.extents[1]: expected an integer, got true"),
        ('{"name": "a", "kind": 1}', "rows[0].kind: expected one of 0, 3, got 1"),
        ('{"name": "a", "kind": true}', "rows[0].kind: expected one of 0, 3, got true"),
        ('{"name": "a", "counts": {}}', 'rows[0].counts: expected an object with "loads"'),
        ('{"name": "a", "counts": {"loads": "x"}}', 'rows[0].counts.loads: expected a number, got "x"'),
        ('{"name": "a", "times": [1e999]}', "rows[0].times[0]: expected a finite number"),
        ('{"name": "a", "times": [%s]}' % ("9" * 400), "rows[0].times[0]: expected a finite number, got 999"),
        ('{"name": "a", "value": %s}' % ("9" * 400), "rows[0].value: expected an integer of at most 63 bits"),
        ('{"name": "a", "value": {}}', "rows[0].value: expected true or false or an integer"),
        ('{"name": "a", "times": [NaN]}', "expected JSON: NaN is not a number"),
        ('{"name": "a", "times": [%s]}' % ("9" * 5000), "expected JSON"),
        ('{"name": %s}' % ("[" * 100_000), "nested too deeply"),
        ('{"name": %s}' % ("[" * 100 + "]" * 100), "at most 64 levels"),
        ('{"a\\u001b[0m": 1, "name": 2}', "rows[0].name: expected a text, got 2"),
    ],
)
def test_what_is_wrong_is_told_with_its_path(row, message):
    with pytest.raises(JsonError) as caught:
        decode(f'{{"rows": [{row}]}}')
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("data", [b"\xff\xfe[]", "[]".encode("utf-16"), b"", b"[1,"])
def test_bytes_that_are_no_json_are_refused(data):
    with pytest.raises(JsonError, match=r"expected JSON|expected UTF-8"):
        jsonfile.parse_json(data)


SWEEP = '{"name": "n", "provenance": "p", "layers": [{"label": LABEL, "result": RESULT}]}'
RESULT = '{"workload": WORKLOAD, "device": "d", "device_name": "g", "seed": 1, "rows": ROWS}'
ROW = '[{"name": NAME, "timing": TIMING, "launch": LAUNCH, "config": CONFIG, "gflops": GFLOPS}]'
GOOD = {
    "RESULT": RESULT,
    "ROWS": ROW,
    "LABEL": '"a"',
    "WORKLOAD": '"conv2d:1x4x6x6,8x4x3x3,s1,p1"',
    "NAME": '"default"',
    "TIMING": '{"seconds": [1e-6], "method": "m", "cold": false}',
    "LAUNCH": '{"grid": [1, 1, 1], "block": [1, 1, 1]}',
    "CONFIG": "{}",
    "GFLOPS": "1.5",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"LABEL": "null"}, "layers[0].label: expected a text, got null"),
        ({"WORKLOAD": '"conv2d:1"'}, "layers[0].result.workload: "),
        ({"TIMING": '{"seconds": [], "method": "m", "cold": false}'}, "timing.seconds: expected at least one time"),
        ({"ROWS": "[]"}, "layers[0].result.rows: expected at least one row, got []"),
        ({"GFLOPS": "-1"}, "layers[0].result.rows[0].gflops: expected a number of at least 0, got -1"),
        ({"LABEL": "[" * 100_000}, "nested too deeply"),
    ],
)
def test_malformed_sweep_is_one_line_with_its_path(change, message, tmp_path, capsys):
    text = SWEEP
    for name, value in {**GOOD, **change}.items():
        text = text.replace(name, value)
    file = tmp_path / "f.json"
    file.write_text(text)
    assert cli.main(["plot", str(file), "-o", str(tmp_path / "f.svg")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tvmconv: {file}: no results of a sweep (")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [("counters", "--from", "F"), ("plot", "F", "-o", "o.svg"), ("suites", "F")])
def test_deep_nesting_is_one_line(words, tmp_path, capsys):
    file = tmp_path / "f.json"
    file.write_text('{"name":' + "[" * 100_000)
    assert cli.main([str(file) if word == "F" else word for word in words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
