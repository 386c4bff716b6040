"""Names are the field's: no private words as identifiers, and no class name twice."""

from collections import defaultdict
from pathlib import Path

import pytest
from source_names import parse_names, read_names

ROOT = Path(__file__).parent.parent
FILES = [file for folder in ("tvmconv", "schedules", "scripts") for file in sorted((ROOT / folder).rglob("*.py"))]

# Words that stood for several things each, and the terms that replaced them.
PRIVATE_WORDS = {
    "told": "on_progress, tensor_map, data, contents",
    "together": "ctas_per_sm, merge_results, TimingGroup",
    "rung": "optimization step",
    "zygote": "fork server",
    "strand": "fiber",
    "contest": "PortfolioSearch",
    "entrant": "PortfolioMember",
    "taught": "training_layers",
    "whose": "the noun that is meant",
}
PERSISTED = {"taught"}  # keys of files that are read, in compat.py alone


@pytest.mark.sample(3)
@pytest.mark.parametrize("word", PRIVATE_WORDS)
def test_no_identifier_has_a_private_word(word):
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}, use {PRIVATE_WORDS[word]}"
        for file in FILES
        if not (word in PERSISTED and file.name == "compat.py")
        for line, name in read_names(file).identifiers
        if word in name.lower().split("_")
    ]
    assert found == []


def test_class_names_are_unique():
    places = defaultdict(list)
    for file in FILES:
        for node in read_names(file).classes:
            places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: own for name, own in places.items() if len(own) > 1} == {}


def test_every_kind_of_identifier_is_found():
    text = """
import told_module.part as told_alias
from told_package import name

@told_decorator
class ToldClass(Base, told_keyword=1):
    def told_method(self, told_argument: "told in a text" = 0, *, told_option=told_default):
        global told_global
        try:
            told_variable = self.told_attribute[f"{told_formatted}"]
        except Error as told_error:
            print("told in a text")  # told in a comment
"""
    found = [(line, name) for line, name in parse_names(text).identifiers if "told" in name.lower()]
    words = "module alias package decorator keyword method argument option default global variable attribute formatted"
    assert {name for _, name in found} == {"ToldClass", *(f"told_{word}" for word in words.split()), "told_error"}
    assert (2, "told_alias") in found
