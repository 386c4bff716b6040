"""README and docs have short sentences, and code has no undeclared names of one or two letters."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))
readability = importlib.import_module("readability")

MAX_MEAN_WORDS = 18
MAX_PAGE_WORDS = 3500  # of prose, read in some fifteen minutes


@pytest.mark.parametrize("page", readability.list_pages(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page):
    assert 0 < readability.compute_mean_length(page) <= MAX_MEAN_WORDS


@pytest.mark.parametrize("page", readability.list_pages(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_page_is_read_in_fifteen_minutes(page):
    sentences = readability.split_sentences(page.read_text(encoding="utf-8"))
    assert sum(map(readability.count_words, sentences)) <= MAX_PAGE_WORDS


def test_only_prose_is_counted():
    page = "# A heading of words\n\n| a | table |\n\n```sh\nsome code\n```\n\n"
    page += "It has [two words](link). `x = 1` is a word:\n"
    assert readability.split_sentences(page) == ["It has two words.", "CODE is a word:"]


def test_short_names_are_declared():
    assert readability.count_short_identifiers(ROOT) == {}
