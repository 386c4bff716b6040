"""Command lines in results hold no folders of one machine."""

import gzip
import re
from pathlib import Path

import pytest

from tvmconv.command_text import format_command

ROOT = Path(__file__).parent.parent
FOLDER_OF_A_MACHINE = re.compile(r"(?<![\w.])/(?:root|home|tmp|mnt|work|Users)/")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["tvmconv", "-o", "/data/out/torch"], "tvmconv -o torch"),
        (["tvmconv", "--log=/tmp/a b.jsonl"], "tvmconv '--log=a b.jsonl'"),
        (["tvmconv", "logs/my.jsonl", "--set", "tile=-1,8"], "tvmconv logs/my.jsonl --set tile=-1,8"),
        (["tvmconv", "--only", "/"], "tvmconv --only /"),
    ],
)
def test_absolute_paths_are_their_last_part(words, text):
    assert format_command(words) == text


def read(file):
    return gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text(encoding="utf-8")


def test_results_name_no_folder_of_a_machine():
    results = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("tuning_logs/**/*.md"), *ROOT.glob("tuning_logs/**/*.json*")]
    results = [file for file in results if "jsonl" not in file.name]
    assert len(results) > 300
    assert [file for file in results if FOLDER_OF_A_MACHINE.search(read(file))] == []
