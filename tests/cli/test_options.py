"""Numbers on the command line have limits, which the message names."""

import argparse
import os

import pytest

from tvmconv import cli
from tvmconv.cli import options

DIGITS = "9" * 400
SMALL = "conv2d:1x4x6x6,8x4x3x3,s1,p1"
CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune", SMALL, "--trials", DIGITS], "--trials: expected at most 1,000,000,000"),
        (["tune", SMALL, "--trials", "9" * 5000], "--trials: expected at most 1,000,000,000"),
        (["tune", SMALL, "--patience", DIGITS], "--patience: expected at most 1,000,000,000"),
        (["tune", SMALL, "--workers", DIGITS], f"--workers: expected at most {8 * CORES:,}, 8 per core"),
        (["tune", SMALL, "--workers", str(8 * CORES + 1)], f"--workers: expected at most {8 * CORES:,}, 8 per core"),
        (["tune", SMALL, "--seconds", DIGITS], "--seconds: expected at most 10,000,000"),
        (["tune", SMALL, "--seconds", "inf"], "--seconds: expected at most 10,000,000"),
        (["tune", SMALL, "--seed", DIGITS], "--seed: expected at most 9,223,372,036,854,775,807"),
        (["tune", "--suite", "d2l", "--batch", DIGITS], "--batch: expected at most 1,000,000,000"),
        (["log", "best", "x.jsonl", "--top", DIGITS], "--top: expected at most 1,000,000,000"),
        (["simulate", "x.json", "--trials", DIGITS], "--trials: expected at most 100,000"),
        (["simulate", "x.json", "--seeds", DIGITS], "--seeds: expected at most 10,000"),
        (["simulate", "x.json", "--min-configs", DIGITS], "--min-configs: expected at most 1,000,000,000"),
        (["worker", "--key", "k", "--port", "65536"], "--port: expected at most 65,535"),
        (["worker", "--key", "k", "--port", "-1"], "--port: expected an integer that is at least 1"),
    ],
)
def test_number_beyond_its_limit_is_refused(words, message, capsys):
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert len(error) < 400


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "٣", "1e3"])
def test_count_that_is_no_integer_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected an integer"):
        options.parse_count(text)
