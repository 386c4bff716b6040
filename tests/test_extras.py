"""The remedy for a missing package names that package and the extra of this project that has it."""

import re
from pathlib import Path

import pytest

from tvmconv.optional_packages import PACKAGES, format_install_command

PROJECT = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PACKAGES)
def test_remedy_names_package_and_extra(name):
    extra, package = PACKAGES[name]
    assert (
        format_install_command(name)
        == f"pip install \"{package}\" (in a clone of tvmconv: pip install -e '.[{extra}]')"
    )


@pytest.mark.parametrize("name", PACKAGES)
def test_named_extra_is_one_of_the_project(name):
    assert re.search(rf"^{PACKAGES[name][0]} = \[", PROJECT, re.MULTILINE)


def test_no_other_file_names_an_extra_in_a_hint():
    files = [
        file
        for folder in ("tvmconv", "schedules", "scripts")
        for file in Path(__file__).parents[1].glob(f"{folder}/**/*.py")
    ]
    assert not [str(file) for file in files if 'pip install "tvmconv' in file.read_text(encoding="utf-8")]
