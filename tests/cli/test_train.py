"""`tvmconv train` makes a model of logs, which other commands take; what it cannot use is said in one line."""

import gzip
import json
import lzma
import shlex
import tracemalloc
from dataclasses import replace

import pytest
from learnt import MACHINE, NEW, knowledge, records

from tvmconv import training as train
from tvmconv.cli import main
from tvmconv.cost_model import model
from tvmconv.cost_model.model import CostModel


@pytest.fixture(autouse=True)
def in_use(monkeypatch):
    """A model that has the numbers of the made-up GPU, as no such GPU is here; few trees."""
    monkeypatch.setattr(model, "_active_models", [])
    monkeypatch.setattr(train, "BOOSTING_ROUNDS", 20)
    model.set_cost_model(replace(knowledge(), schedule_models={}))


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("".join(f"{record.line()}\n" for record in records()))
    return path


def test_it_prints_what_it_learnt_and_the_model_predicts(log, tmp_path, capsys):
    assert main(["train", str(log), "--no-shipped", "-o", str(tmp_path / "k.npz")]) == 0
    table = capsys.readouterr().out
    assert [line.split() for line in table.splitlines()][1] == ["conv2d", "direct", "5", "600", "yes"]
    made = CostModel.load(tmp_path / "k.npz")
    assert made.device_spec == MACHINE
    assert "600 records of Some GPU" in made.provenance
    assert (
        main(["build", str(NEW), "--arch", "sm_90", "--cost-model", str(tmp_path / "k.npz"), "-o", str(tmp_path)]) == 0
    )
    assert model.cost_model_for("sm_90").provenance == made.provenance


@pytest.mark.parametrize("module", [gzip, lzma])
def test_packed_logs_count_and_layers_of_a_suite_may_be_left_out(log, tmp_path, capsys, module):
    packed = tmp_path / "packed" / f"some.jsonl.{'gz' if module is gzip else 'xz'}"
    packed.parent.mkdir()
    packed.write_bytes(module.compress(log.read_bytes() + b"no record\n"))
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps([{"name": "a", "text": records()[0].workload.text.replace("1x16", "8x16")}]))
    assert main(["train", str(packed), "--no-shipped", "--hold-out", str(suite), "-o", str(tmp_path / "k.npz")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[2:4] == ["4", "480"]


@pytest.mark.parametrize("options", [["--no-shipped"], ["--device=Some GPU", "--hold-out=d2l", "--no-shipped"]])
def test_the_model_tells_the_command_that_made_it(log, tmp_path, options):
    assert main(["train", str(log), *options, "-o", str(tmp_path / "k.npz")]) == 0
    told = CostModel.load(tmp_path / "k.npz").provenance
    assert shlex.split(told.split("`")[1]) == ["tvmconv", "train", str(log), *options]


def test_a_line_of_a_packed_log_takes_limited_memory(log, tmp_path):
    packed = tmp_path / "zeros.jsonl.gz"
    with gzip.open(packed, "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
        file.write(b"\n" + log.read_bytes())
    tracemalloc.start()
    try:
        assert list(train.read_valid_records(packed)) == list(train.read_valid_records(log))
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        ([], "no logs to learn from"),
        (["LOG", "--device", "Other GPU"], "no records of Other GPU; there are Some GPU"),
        (["EMPTY"], "no valid records"),
        (["CUT"], "cut.jsonl.gz: the data are damaged"),
        (["CUT XZ"], "cut.jsonl.xz: the data are damaged"),
        (["NO XZ"], "no.jsonl.xz: the data are damaged"),
        (["LOG", "--hold-out", "no_such"], "unknown suite"),
    ],
)
def test_what_it_cannot_learn_from_is_one_line(words, said, log, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(log.read_bytes())[:-400])
    (tmp_path / "cut.jsonl.xz").write_bytes(lzma.compress(log.read_bytes())[:-400])
    (tmp_path / "no.jsonl.xz").write_bytes(log.read_bytes())
    names = {"LOG": str(log), "EMPTY": str(tmp_path / "empty.jsonl"), "CUT": str(tmp_path / "cut.jsonl.gz")}
    names |= {"CUT XZ": str(tmp_path / "cut.jsonl.xz"), "NO XZ": str(tmp_path / "no.jsonl.xz")}
    words = [names.get(word, word) for word in words]
    assert main(["train", *words, "--no-shipped", "-o", str(tmp_path / "k.npz")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "k.npz").exists()


@pytest.mark.parametrize(("out", "said"), [("some.jsonl", "is also read"), ("", "Is a directory")])
def test_a_log_that_is_read_is_never_written(out, said, log, tmp_path, capsys):
    before = log.read_bytes()
    assert main(["train", str(log), "--no-shipped", "-o", str(tmp_path / out)]) == 2
    assert said in capsys.readouterr().err
    assert log.read_bytes() == before


def test_a_device_whose_peaks_nobody_knows_is_refused(log, tmp_path, capsys):
    model.set_cost_model(None)
    assert main(["train", str(log), "--no-shipped", "-o", str(tmp_path / "k.npz")]) == 2
    assert "the peak rates of Some GPU are unknown" in capsys.readouterr().err


def test_an_unreadable_model_is_one_line(tmp_path, capsys):
    (tmp_path / "k.npz").write_text("no model")
    words = ["build", str(NEW), "--arch", "sm_90", "-o", str(tmp_path / "out"), "--cost-model"]
    assert main([*words, str(tmp_path / "k.npz")]) == 2
    assert "k.npz" in capsys.readouterr().err
    assert main([*words, "none"]) == 0
    assert model.cost_model_for("sm_90") is None
