"""Times that a page calls certain are not undercut by what was measured, with and without machine code."""

import json
import os
import random
import re
import subprocess
from pathlib import Path

import pytest
from venvs import without_nvdisasm

import tvmconv as tc
from tvmconv.analysis.speed_of_light import ARITHMETIC, L1, LAUNCH, SHARED, compute_unit_times
from tvmconv.cli import main
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.packaged import packaged_logs
from tvmconv.target import Target

H200 = Target("NVIDIA H200", "sm_90", 132, 66.9e12, 4.8e12)
CHECKED = ("resnet50", "d2l", "resnet50-f16-nhwc", "convnext_tiny-f16-nhwc", "layers")
SAMPLE = 3  # of all best records, in a run of all tests; TVMCONV_ALL_RECORDS=1 checks each of them
TILING = "conv2d:1x64x56x56,64x64x3x3,s1,p1"


def best_records():
    """The fastest record of each workload in some of the shipped logs."""
    found = {}
    for log in packaged_logs():
        if log.stem in CHECKED:
            for record in read_records(log, InvalidLines()):
                order = (not record.final, record.cost)
                if record.ok and (record.workload not in found or order < found[record.workload][0]):
                    found[record.workload] = order, record
    return [record for _, record in found.values()]


def sample():
    records = best_records()
    return records if os.environ.get("TVMCONV_ALL_RECORDS") else random.Random(0).sample(records, SAMPLE)


@pytest.mark.parametrize("record", sample(), ids=lambda record: f"{record.schedule}-{record.workload}")
def test_no_certain_time_exceeds_the_measured_one(record):
    kernel = tc.build(record.workload, record.schedule, arch="sm_90", config=record.config)
    found = compute_unit_times(kernel, H200)
    certain = {bound.unit: bound.min_seconds for bound in found if bound.min_seconds is not None}
    assert {ARITHMETIC, SHARED, L1} <= set(certain)
    assert LAUNCH not in certain
    assert max(certain.values()) <= record.cost
    assert all(bound.min_seconds is None or bound.min_seconds <= bound.seconds * (1 + 1e-9) for bound in found)


COUNT_BY_TEXT = """
import json, sys
import tvmconv as tc
from tvmconv.analysis.speed_of_light import compute_unit_times, explain_text_counts
from tvmconv.cost_model.model import cost_model_for
from tvmconv.reports.explanation import explain_kernel
machine = cost_model_for("sm_90").device_spec
for workload, schedule, config in json.load(sys.stdin):
    config = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
    kernel = tc.build(tc.parse(workload), schedule, arch="sm_90", config=config)
    told = {"certain": [bound.min_seconds for bound in compute_unit_times(kernel, machine) if bound.unit != "memory"]}
    told |= {"reason": explain_text_counts(kernel), "page": explain_kernel(kernel, machine)}
    print(json.dumps(told), flush=True)
"""


def test_without_nvdisasm_no_time_is_called_certain(tmp_path):
    """In an environment without the package, and with nothing on PATH."""
    records = best_records() if os.environ.get("TVMCONV_ALL_RECORDS") else sample()[:1]
    asked = json.dumps([(each.workload.text, each.schedule, each.config) for each in records])
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(Path(tc.__file__).parents[1])}
    command = [without_nvdisasm(tmp_path / "venv"), "-c", COUNT_BY_TEXT]
    done = subprocess.run(command, input=asked, env=environment, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(records)
    for told in lines:
        assert set(told["certain"]) == {None}
        assert "nvidia-cuda-nvdisasm" in told["reason"]
        assert re.search(r"On NVIDIA H200, bound by .+, by an estimate from the TIR:", told["page"])
        assert re.search(r"No time is predicted: nvdisasm is neither installed", told["page"])
        table = told["page"].partition("estimate [µs]\n")[2].partition("\n\n")[0].splitlines()
        assert all(line.split()[-2] == "—" for line in table if not line.startswith("memory"))


REASONS = {
    "conv2d:1x64x16x16,128x64x1x1,s1,p0,f16,nhwc hopper": "the time that TMA copies and wgmma instructions take is not",
    "conv2d:1x8x8x8,8x8x3x3,s1,p1 tiling": "the machine code takes more than 10 steps to execute",
}


@pytest.mark.parametrize("kernel", REASONS)
def test_why_no_time_is_predicted_is_told(kernel, capsys, monkeypatch):
    monkeypatch.setattr("tvmconv.analysis.block_accesses.MAX_BLOCK_INSTRUCTIONS", 10)  # which TMA is refused before
    assert main(["explain", *kernel.split(), "--arch", "sm_90"]) == 0
    page = capsys.readouterr().out
    assert re.search(rf"^No time is predicted: {REASONS[kernel]}", page, re.MULTILINE)


def test_the_headline_names_the_largest_part_of_the_prediction(capsys):
    """Arithmetic has the longest certain time here, and latency adds most to the predicted one."""
    assert main(["explain", TILING, "tiling", "--arch", "sm_90"]) == 0
    page = capsys.readouterr().out
    assert "On NVIDIA H200, bound by latency:" in page
    parts = re.findall(r"^(\S.*?) +[\d.]+ +([\d.]+)  \w", page.partition("adds [µs]")[2], re.MULTILINE)
    assert parts[0][0] == "latency"
    assert [float(adds) for _, adds in parts] == sorted((float(adds) for _, adds in parts), reverse=True)
