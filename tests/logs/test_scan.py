"""A glance at a line tells the same as parsing it."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import records

import tvmconv as tc
from tvmconv.errors import RecordError
from tvmconv.logs.header_scan import HeaderScanner, has_other_workload, parse_medians
from tvmconv.logs.record import MAX_SECONDS, MIN_SECONDS, Record
from tvmconv.workloads import Conv
from tvmconv.workloads.suites import SuiteVariant

LINE = Record(tc.parse("filter1d:9,k3"), "basic", {}, "cpu", "opencl", times=(0.125,)).line()


def respelled(line):
    """Spellings of a line that any reader of JSON takes for the same."""
    row = json.loads(line)
    added = {key: row.pop(key) for key in ("workload", "schedule", "device")}
    whole = row | added
    return st.sampled_from((line, json.dumps(whole), json.dumps(whole, separators=(",", ":")), json.dumps(row)))


@given(records(schedules=("direct",)).flatmap(lambda record: respelled(record.line())))
def test_a_glance_agrees_with_the_parser(line):
    record = parse(line)
    try:
        glance = HeaderScanner(lambda subject: subject).scan_line(line.encode())
    except RecordError:
        assert record is None
    else:
        if glance is not None:
            assert (glance.header, glance.error) == (record.key, record.error)
            assert glance.error or parse_medians([glance.costs]) == record.cost
            assert float(glance.timestamp) == record.timestamp


def parse(line):
    try:
        return Record.parse(line)
    except RecordError:
        return None


@given(records(), records())
def test_lines_as_we_write_them_need_no_parser(first, second):
    glancer = HeaderScanner(lambda subject: subject)
    for record in (first, second, first):
        glance = glancer.scan_line(record.line().encode())
        braces = "}" in json.dumps(record.config)
        assert braces or glance.header == record.key


@given(records(schedules=("direct",)).flatmap(lambda record: respelled(record.line())))
def test_no_line_of_a_workload_is_taken_for_another_ones(line):
    record = parse(line)
    if record is not None:
        workload = record.workload
        assert not has_other_workload(line.encode(), workload)
        if isinstance(workload, Conv):
            assert not has_other_workload(line.encode(), SuiteVariant(epilogue=()).apply_to(workload))


@pytest.mark.parametrize(
    ("written", "other"),
    [
        ("conv2d:1x8x7x6,4x8x3x3,p1", True),
        ("conv2d:1x8x6x6,8x8x1x1", False),  # to be seen by parsing it
        ("conv2d:1x8x06x6,4x8x3x3,p1", False),
        ("conv3d:1x8x6x6x6,4x8x3x3x3", True),
        ("filter2d:6x6x8,3x3", True),
    ],
)
def test_lines_of_another_input_are_of_another_workload(written, other):
    line = f'{{"workload": "{written}", "schedule": "direct"}}'.encode()
    assert has_other_workload(line, tc.parse("conv2d:1x8x6x6,4x8x3x3,p1,bias")) == other


@given(st.lists(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=5), min_size=1, max_size=20))
def test_medians_are_those_of_the_records(times):
    texts = [", ".join(map(repr, row)).encode() for row in times]
    np.testing.assert_array_equal(parse_medians(texts), [np.median(row) for row in times])


@given(st.floats(0, 2e9) | st.floats(0, 2e-12) | st.sampled_from((MIN_SECONDS, MAX_SECONDS, 1e303, 1e-310)))
def test_a_time_that_the_parser_refuses_is_no_median(seconds):
    record = parse(LINE.replace("0.125", repr(seconds)))
    told = math.inf if record is None else record.cost
    assert list(parse_medians([repr(seconds).encode(), b"1.0"])) == [told, 1.0]
