"""Names are the field's: no private words as identifiers, and no class name twice."""

import ast
import functools
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

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


@functools.cache
def identifiers(file):
    with tokenize.open(file) as text:
        tokens = tokenize.generate_tokens(text.readline)
        return [(token.start[0], token.string) for token in tokens if token.type == tokenize.NAME]


@pytest.mark.sample(3)
@pytest.mark.parametrize("word", PRIVATE_WORDS)
def test_no_identifier_has_a_private_word(word):
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}, use {PRIVATE_WORDS[word]}"
        for file in FILES
        if not (word in PERSISTED and file.name == "compat.py")
        for line, name in identifiers(file)
        if word in name.lower().split("_")
    ]
    assert found == []


def test_class_names_are_unique():
    places = defaultdict(list)
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: own for name, own in places.items() if len(own) > 1} == {}


def test_a_private_word_is_found(tmp_path):
    file = tmp_path / "file.py"
    file.write_text("def tell(told_once):\n    return told_once\n", encoding="utf-8")
    assert [name for _, name in identifiers(file) if "told" in name.split("_")] == ["told_once"] * 2
