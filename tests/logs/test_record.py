"""A record is a line of a log and back, exactly; what is no record is refused in one line, whatever it is."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import records

import tvmconv as tc
from tvmconv.logs.record import ErrorKind, Record

RECORD = Record(
    tc.parse("conv2d:1x8x6x6,4x8x3x3,p1"),
    "direct",
    {"tile_f": (-1, 1, 2, 1), "unroll_explicit": 1},
    "NVIDIA H200",
    "cuda -arch=sm_90",
    times=(3e-6, 1e-6, 2e-6),
)
LINE = RECORD.line()

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def refusal(line):
    """The message with which a line is refused."""
    with pytest.raises(tc.RecordError) as refused:
        Record.parse(line)
    return str(refused.value)


@given(records())
def test_a_record_survives_its_line_exactly(record):
    assert Record.parse(record.line()) == record


@given(records())
def test_a_line_is_one_line_of_strict_ascii_json(record):
    line = record.line()
    assert line.isascii()
    assert len(line.splitlines()) == 1
    json.loads(line, parse_constant=pytest.fail)


def test_the_cost_is_the_median_and_infinite_for_an_error():
    assert RECORD.cost == 2e-6
    assert RECORD.gflops == pytest.approx(RECORD.workload.flops / 2e-6 / 1e9)
    failed = replace(RECORD, times=(), error=ErrorKind.RUNTIME)
    assert (failed.ok, failed.cost, failed.gflops) == (False, math.inf, 0)


def test_two_measurements_of_a_config_have_one_identity():
    again = replace(RECORD, times=(5e-6,), timestamp=7.0)
    other = replace(RECORD, config={"tile_f": (-1, 1, 1, 2)})
    assert again.identity == RECORD.identity != other.identity


@given(st.binary() | st.text() | json_values.map(json.dumps))
def test_what_is_no_record_is_refused_in_one_line(line):
    assert len(refusal(line).splitlines()) == 1


@given(st.data(), json_values)
def test_record_with_any_part_replaced_parses_or_is_refused(data, value):
    row = json.loads(LINE)
    *path, last = data.draw(st.sampled_from(list(places(row))))
    parent = row
    for step in path:
        parent = parent[step]
    parent[last] = value
    message = "a record"
    try:
        Record.parse(Record.parse(json.dumps(row)).line())
    except tc.RecordError as refused:
        message = str(refused)
    assert len(message.splitlines()) == 1


def places(value, path=()):
    """The path of every part of a JSON value but the whole."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield (*path, step)
        yield from places(inner, (*path, step))


HOSTILE = {
    "deep nesting": "[" * 100_000,
    "a deep target": LINE.replace('"cuda -arch=sm_90"', "[" * 900 + "]" * 900),
    "an integer of ten thousand digits": LINE.replace("3e-06", "9" * 10_000),
    "a factor past 63 bits": LINE.replace("[-1, 1, 2, 1]", f"[-1, 1, 2, {2**63}]"),
    "factors whose product is past 63 bits": LINE.replace("[-1, 1, 2, 1]", f"[-1, 1, {2**32}, {2**32}]"),
    "a choice past 63 bits": LINE.replace('"ot", 1', f'"ot", {2**63}'),
    "a choice past all floats": LINE.replace('"ot", 1', '"ot", 1e999'),
    "an index past 63 bits": LINE.replace('"index": 0', f'"index": {2**63}'),
    "NaN": LINE.replace("3e-06", "NaN"),
    "a float past all floats": LINE.replace("3e-06", "1e999"),
    "a time of zero": LINE.replace("3e-06", "0"),
    "no times and no error": LINE.replace("[3e-06, 1e-06, 2e-06]", "[]"),
    "an unknown error": LINE.replace("2e-06], 0", "2e-06], 9"),
    "a list": "[1, 2]",
    "a torn line": LINE[:-7],
    "UTF-16": LINE.encode("utf-16"),
    "a knob twice": LINE.replace("unroll_explicit", "tile_f"),
    "a knob that is an order": LINE.replace('"tile_f", "sp"', '"tile_f", "re"'),
    "keyword arguments": LINE.replace("{}", '{"layout": "NCHW"}'),
    "half a character for a device": LINE.replace("NVIDIA H200", "\\ud800"),
    "half a character for a choice": LINE.replace('"ot", 1', '"ot", "\\ud800"'),
    "a terminal's command for a device": LINE.replace("NVIDIA H200", "\\u001b[2J"),
    "half a character among the resources": LINE[:-1] + ', "resources": {"\\ud800": 1}}',
    "half a character in a message of AutoTVM's": LINE.replace("3e-06, 1e-06, 2e-06], 0", '"\\ud800"], 4'),
    "seconds of tuning past all calendars": LINE[:-1] + ', "elapsed": 1e308}',
    "negative seconds of tuning": LINE[:-1] + ', "elapsed": -1}',
    "another version": LINE.replace('"version": 0.2', '"version": 0.3'),
    "no config": LINE.replace('"config"', '"gifnoc"'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_lines_are_refused_in_one_short_line(name):
    assert HOSTILE[name] not in (LINE, LINE.encode())
    message = refusal(HOSTILE[name])
    assert len(message.splitlines()) == 1
    assert len(message) < 300


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"workload": "conv2d:1x8x6x6', '"workload": "conv2d:1x8x6x7'),
        ('"schedule": "direct"', '"schedule": "depthwise"'),
        ('"direct"', '"vthread"'),
    ],
)
def test_a_line_whose_keys_contradict_its_task_is_refused(old, new):
    assert "contradict" in refusal(LINE.replace(old, new))
