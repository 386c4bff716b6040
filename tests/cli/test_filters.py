"""Every command takes a filter's text as it takes a convolution's."""

import json

import pytest

from tvmconv.kernel import IR_LEVELS
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.record import Record

SIGNAL, IMAGE = "filter1d:300,k5,clamp", "filter2d:9x11x3,3x5"
BOTH = pytest.mark.parametrize("text", [SIGNAL, IMAGE])


@pytest.mark.sample(6)
@pytest.mark.parametrize("stage", IR_LEVELS)
def test_show_has_every_stage(run, stage):
    status, out, err = run("show", IMAGE, "constant", "--stage", stage, "--arch", "sm_90")
    assert (status, err) == (0, "")
    assert out.strip()


@pytest.mark.usefixtures("shared_processes")
@pytest.mark.usefixtures("shared_processes")
@BOTH
def test_what_is_tuned_is_found_again_and_built(run, log, tmp_path, text):
    how = ["--schedule", "constant", "--tuner", "grid", "--trials", "2", "--device", "opencl:0"]
    status, out, _ = run("tune", text, *how, "--log", log, "--json")
    best = Record.parse(out)
    assert (status, best.workload.text, best.schedule) == (0, text, "constant")
    records = list(read_records(log, InvalidLines()))
    assert [record.schedule for record in records if not record.final] == ["basic", "constant", "constant"]
    assert best in [record for record in records if record.final]

    _, out, _ = run("log", "best", log, "--workload", text, "--json")
    assert Record.parse(out).workload == best.workload

    status, _, _ = run("build", text, "constant", "--log", log, "--device", "opencl:0", "-o", tmp_path)
    assert status == 0
    assert json.loads((tmp_path / "kernel.json").read_text(encoding="utf-8"))["config"] == best.config


REFUSALS = {
    "an even mask": ("filter1d:300,k4", "mask '4': expected odd sizes"),
    "no mask": ("filter2d:9x11x3", "expected filter2d:SIGNAL,MASK[,clamp]"),
    "no channels": ("filter2d:9x11,3x5", "'9x11': expected the image's HxWxC"),
    "an unknown option": ("filter1d:300,k5,p1", "'p1': expected nothing or 'clamp'"),
    "no samples": ("filter1d:0,k5", "n=0: expected at least 1"),
}


@pytest.mark.parametrize("command", ["show", "tune"])
@pytest.mark.parametrize(("text", "said"), REFUSALS.values(), ids=REFUSALS)
def test_a_bad_text_is_one_line_and_status_2(run, command, text, said):
    status, out, err = run(command, text, *(["basic"] if command == "show" else []))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err
