"""The remedy for a missing package names that package and the extra of this project that has it."""

import re
from pathlib import Path

import pytest

from tvmconv.optional_packages import PACKAGES, format_install_command

PROJECT = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PACKAGES)
def test_remedy_names_the_package_and_an_extra_of_the_project(name):
    extra, package = PACKAGES[name]
    remedy = f"pip install \"{package}\" (in a clone of tvmconv: pip install -e '.[{extra}]')"
    assert format_install_command(name) == remedy
    assert re.search(rf"^{extra} = \[", PROJECT, re.MULTILINE)


def test_no_other_file_names_an_extra_in_a_hint():
    files = [
        file
        for folder in ("tvmconv", "schedules", "scripts")
        for file in Path(__file__).parents[1].glob(f"{folder}/**/*.py")
    ]
    assert not [str(file) for file in files if 'pip install "tvmconv' in file.read_text(encoding="utf-8")]
