"""The script that leaves out parts of searches, on a small layer; nothing is measured."""

import json
import runpy
from pathlib import Path

from tvmconv.knowledge import model
from tvmconv.logs.lines import BadLines
from tvmconv.logs.log import read
from tvmconv.searching.tuners.xgb import XGBTuner

SCRIPT = Path(__file__).parents[2] / "scripts/ablate_searches.py"


def test_each_variant_has_a_log_and_a_line_and_leaves_nothing_changed(tmp_path, capsys, instant):
    suite = tmp_path / "layers.json"
    suite.write_text(json.dumps([{"name": "small", "text": "conv2d:1x4x6x6,4x4x1x1"}]))
    script = runpy.run_path(str(SCRIPT))
    words = ["--suite", str(suite), "--seconds", "0.5", "--workers", "1", "--device", "opencl:0", "-o", str(tmp_path)]
    known, whole = model.known_for("sm_90"), XGBTuner.parts
    assert script["main"](words) == 0
    page = (tmp_path / "searches-ablation.md").read_text()
    for variant in script["VARIANTS"]:
        records = list(read(tmp_path / variant.log, BadLines()))
        assert any(record.ok for record in records)
        assert f"| {variant.name} |" in page
    assert {record.schedule for record in records} == {"direct"}  # of the last, the first schedule alone
    assert "1 layers, 0.5 seconds each" in capsys.readouterr().out
    assert model.known_for("sm_90") is known
    assert XGBTuner.parts is whole


def test_layers_that_are_not_there_are_refused_in_one_line(tmp_path, capsys):
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main(["--suite", "nowhere.json", "-o", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
