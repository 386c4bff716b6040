"""The measured logs that come with the package are found, wherever it lies, and can do without."""

import importlib
import re
import sys
from pathlib import Path

from tvmconv.logs import packaged
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records

ROOT = Path(__file__).parents[2]


def test_in_a_checkout_they_are_those_of_its_folder():
    assert packaged.packaged_logs() == sorted((ROOT / "tuning_logs").rglob("*.jsonl"))
    assert packaged.packaged_logs()


def test_each_line_of_them_is_a_record():
    for log in packaged.packaged_logs():
        bad = InvalidLines()
        assert sum(1 for _ in read_records(log, bad)) > 0
        assert bad.count == 0


def test_installed_ones_come_before_those_of_a_checkout(tmp_path, monkeypatch):
    places = tmp_path / "installed", tmp_path / "checkout"
    monkeypatch.setattr(packaged, "_FOLDERS", places)
    assert packaged.packaged_logs() == []
    for place in reversed(places):
        log = place / "a-device" / "log.jsonl"
        log.parent.mkdir(parents=True)
        log.touch()
        assert packaged.packaged_logs() == [log]


def test_index_names_files_that_are_there():
    sys.path.append(str(ROOT / "scripts"))
    index_logs = importlib.import_module("index_logs")
    page = index_logs.make_index()
    assert len(page.splitlines()) > len(packaged.packaged_logs())
    for text in (page, (ROOT / "tuning_logs/INDEX.md").read_text(encoding="utf-8")):
        links = re.findall(r"\]\(([^)]+)\)", text)
        assert [link for link in links if not (ROOT / "tuning_logs" / link).exists()] == []
