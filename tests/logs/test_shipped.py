"""The measured logs that come with the package are found, wherever it lies, and can do without."""

from pathlib import Path

from tvmconv.logs import shipped
from tvmconv.logs.lines import BadLines
from tvmconv.logs.log import read

ROOT = Path(__file__).parents[2]


def test_in_a_checkout_they_are_those_of_its_folder():
    assert shipped.shipped_logs() == sorted((ROOT / "tuning_logs").rglob("*.jsonl"))
    assert shipped.shipped_logs()


def test_each_line_of_them_is_a_record():
    for log in shipped.shipped_logs():
        bad = BadLines()
        assert sum(1 for _ in read(log, bad)) > 0
        assert bad.count == 0


def test_installed_ones_come_before_those_of_a_checkout(tmp_path, monkeypatch):
    places = tmp_path / "installed", tmp_path / "checkout"
    monkeypatch.setattr(shipped, "_PLACES", places)
    assert shipped.shipped_logs() == []
    for place in reversed(places):
        log = place / "a-device" / "log.jsonl"
        log.parent.mkdir(parents=True)
        log.touch()
        assert shipped.shipped_logs() == [log]
