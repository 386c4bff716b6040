"""`scripts/pack_logs.py`: logs to learn from, packed."""

import gzip
import json
import lzma
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from learnt import records

from tvmconv.logs.record import Record

PACK_LOGS = runpy.run_path(str(Path(__file__).parents[2] / "scripts/pack_logs.py"))["main"]


@pytest.mark.parametrize("module", [gzip, lzma])
def test_packed_logs_have_the_valid_records_in_the_same_bytes(tmp_path, module):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f"{record.line()}\n" for record in [*records()[:9], records()[0]]) + "no record\n")
    packed = [tmp_path / f"{name}.jsonl.{'gz' if module is gzip else 'xz'}" for name in "ab"]
    for file in packed:
        assert PACK_LOGS([str(log), "-o", str(file)]) == 0
    assert packed[0].read_bytes() == packed[1].read_bytes()
    lines = module.decompress(packed[0].read_bytes()).decode().splitlines()
    assert len(lines) == 9
    assert json.loads(lines[0])["result"][0][0] == pytest.approx(records()[0].cost, rel=1e-4)


def test_a_thinned_search_keeps_bests_finals_and_every_nth_trial(tmp_path):
    costs = [9, 8, 9, 9, 7, 9, 9, 9, 9, 9]
    trials = [replace(record, times=(float(cost),)) for record, cost in zip(records(), costs, strict=False)]
    other = replace(trials[5], workload=records()[-1].workload)  # of another search: the first trial of it
    log, packed = tmp_path / "log.jsonl", tmp_path / "log.jsonl.gz"
    searched = [*trials[:6], other, *trials[6:], replace(trials[2], times=(8.5,), final=True)]
    log.write_text("".join(f"{record.line()}\n" for record in searched))
    assert PACK_LOGS([str(log), "--every", "3", "-o", str(packed)]) == 0
    kept = [Record.parse(line) for line in gzip.decompress(packed.read_bytes()).splitlines()]
    assert [searched.index(record) for record in kept] == [0, 1, 3, 4, 6, 7, 10, 11]
