"""`tvmconv run --log`: what a log has, beside the schedules."""

import json

import pytest

from tvmconv import devices, naive_cost, registry
from tvmconv.cli import main
from tvmconv.errors import DeviceError
from tvmconv.logs.record import Record
from tvmconv.workloads import parse

SMALL = "conv2d:1x4x6x6,8x4x3x3,p1"


def write_log(path, device):
    """A log of one record of `tiling` on a device."""
    config = {"tile_c": (-1, 2, 2)}
    path.write_text(Record(parse(SMALL), "tiling", config, device.name, "opencl", times=(1e-6,)).line() + "\n")
    return str(path)


def rows(capsys, *words):
    """Name and config of the rows that `tvmconv run` gave, and what it said on stderr."""
    assert main(["run", SMALL, "default", "--device", "opencl:0", "--seconds", "0.01", "--json", *words]) == 0
    out, err = capsys.readouterr()
    return [(row["name"], row["config"]) for row in json.loads(out)["rows"]], err


def test_the_fastest_record_of_a_log_is_the_row_tuned(capsys, tmp_path):
    log = write_log(tmp_path / "log.jsonl", devices.find_device("opencl:0"))
    (default, tuned), err = rows(capsys, "--log", log)
    assert (default[0], tuned[0]) == ("default", "tuned")
    assert tuned[1]["tile_c"] == [-1, 2, 2]
    assert err == ""


def test_a_log_without_a_record_is_told_in_one_line(capsys, tmp_path):
    (tmp_path / "log.jsonl").touch()
    (_, tuned), err = rows(capsys, "--log", str(tmp_path / "log.jsonl"))
    assert tuned[0] == "tuned"
    assert err.startswith(f"tvmconv: no record of {parse(SMALL)} for ")
    assert err.count("\n") == 1


def shuffle(s, w, k):
    """Never built here."""


def test_schedules_not_for_the_device_are_named_in_one_line(capsys, schedule_registry):
    for key in [key for key in schedule_registry if key[1] != "default"]:
        del schedule_registry[key]
    registry.schedule("conv2d", device_kinds=("cuda",))(shuffle)
    assert main(["run", SMALL, "--device", "opencl:0", "--seconds", "0.01"]) == 0
    assert capsys.readouterr().err == "tvmconv: left out, as they are not for opencl:0: shuffle\n"


def test_several_baselines_may_be_given(capsys, monkeypatch):
    def failing(w, inputs, **how):
        raise DeviceError("not installed")

    monkeypatch.setattr("tvmconv.baselines.load_baselines", lambda: {"cudnn": failing, "other": failing})
    words = ["run", SMALL, "default", "--device", "opencl:0", "--seconds", "0.01", "--json"]
    assert main([*words, "--baseline", "other", "--baseline", "cudnn"]) == 1
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["default", "other", "cudnn"]


@pytest.mark.parametrize("log", ["nowhere.jsonl", "."])
def test_an_unreadable_log_is_refused_before_measuring(capsys, tmp_path, monkeypatch, log):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tvmconv.cli.run.run_schedules", lambda *args, **kwargs: pytest.fail("measured"))
    assert main(["run", SMALL, "--log", log]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert log in err


@pytest.mark.parametrize(("verify", "told"), [("sample", True), ("auto", False)])
def test_a_verification_of_a_sample_is_told(capsys, verify, told):
    words = ["conv2d:1x4x64x64,8x4x3x3,p1", "default", "--device", "opencl:0", "--seconds", "0.01", "--verify", verify]
    assert main(["run", *words]) == 0
    said = capsys.readouterr().out
    assert (" of 32,768 outputs; --verify full compares all" in said) == told


def test_a_long_naive_schedule_is_told_and_its_speed_up_absent(capsys, monkeypatch):
    monkeypatch.setattr(naive_cost, "FALLBACK_FLOPS", 1000.0)
    how = ["--device", "opencl:0", "--seconds", "0.01"]
    assert main(["run", SMALL, "tiling", *how, "--json"]) == 0
    said = capsys.readouterr()
    (row,) = json.loads(said.out)["rows"]
    assert (row["name"], row.get("speedup")) == ("tiling", None)
    seconds = naive_cost.estimate_seconds(parse(SMALL), devices.find_device("opencl:0"))
    assert f"tvmconv: default left out: about {seconds:.0f} s a launch; name it to run it\n" in said.err
    assert main(["run", SMALL, "default", "tiling", *how]) == 0
    said = capsys.readouterr()
    assert "× default" in said.out
    assert "left out" not in said.err


@pytest.mark.parametrize("name", ["tuned", "predicted", "tiling:tuned", "tiling:tile_c=-1,2,2"])
def test_names_of_kernels_that_only_explain_takes_are_one_line(name, capsys):
    assert main(["run", SMALL, name]) == 2
    assert f"run takes names of schedules, not {name!r}: --log adds the row tuned" in capsys.readouterr().err
