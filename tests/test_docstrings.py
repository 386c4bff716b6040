"""Public docstrings are complete, and the examples of all docstrings print what they say."""

import doctest
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))
readability = importlib.import_module("readability")

PACKAGES = {"schedules": "tvmconv.builtin", "tvmconv": "tvmconv"}


def modules_with_examples():
    for folder, package in PACKAGES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            if ">>> " in file.read_text(encoding="utf-8"):
                parts = file.relative_to(ROOT / folder).with_suffix("").parts
                yield ".".join([package, *parts]).removesuffix(".__init__")


def test_public_docstrings_are_complete():
    faults = {name: readability.find_docstring_faults(obj, doc) for name, obj, doc in readability.list_public_objects()}
    assert {name: found for name, found in faults.items() if found} == {}


def test_a_docstring_that_lacks_parts_is_found():
    def function(size: int) -> int:
        """Double a size."""

    assert readability.find_docstring_faults(function) == ["Args lacks size", "no Returns", "no Examples"]


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", list(modules_with_examples()))
def test_examples_of_docstrings_print_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name.startswith("tvmconv.torch"):
        pytest.importorskip("torch")
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
