"""What is installed is what there is, and nothing else called `schedules` hides it."""

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import tvmconv as tc

ROOT = Path(__file__).parent.parent
LIST_SCHEDULES = """
import sys
sys.path.insert(0, sys.argv[1])
import tvmconv as tc
import tvmconv.builtin
print(*(f"{s.operator}:{s.name}" for s in tc.schedules()))
print(tvmconv.builtin.__path__[0])
import schedules
print(schedules.__file__)
"""


def test_every_folder_of_modules_is_a_package_that_is_installed():
    (listed,) = re.findall(r"^packages = (\[.*?^\])", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    folders = [*packages("tvmconv", "tvmconv"), *packages("schedules", "tvmconv.builtin"), "tvmconv.shipped"]
    assert sorted(ast.literal_eval(listed)) == sorted(folders)


def packages(folder, name):
    """The packages in a folder that is itself the package of that name."""
    inits = (init.parent.relative_to(ROOT / folder) for init in (ROOT / folder).rglob("__init__.py"))
    return [".".join((name, *init.parts)) for init in inits]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return a folder that holds what a wheel installs: the schedules copied into the package."""
    site = tmp_path_factory.mktemp("site")
    only_python = shutil.ignore_patterns("__pycache__", "builtin.py")
    shutil.copytree(ROOT / "tvmconv", site / "tvmconv", ignore=only_python)
    shutil.copytree(ROOT / "schedules", site / "tvmconv" / "builtin", ignore=only_python)
    return site


def add_package(folder):
    (folder / "schedules").mkdir()
    (folder / "schedules" / "__init__.py").write_text("")


def add_module(folder):
    (folder / "schedules.py").write_text("")


@pytest.mark.parametrize(
    ("add_schedules", "is_installed"), [(add_package, False), (add_module, True)], ids=["checkout", "wheel"]
)
def test_users_own_schedules_hides_no_builtin(is_installed, add_schedules, wheel, tmp_path, python):
    add_schedules(tmp_path)
    root = wheel if is_installed else ROOT
    ran = subprocess.run(
        [*python, "-c", LIST_SCHEDULES, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    names, folder, users_file = ran.stdout.splitlines()
    assert names == " ".join(f"{s.operator}:{s.name}" for s in tc.schedules())
    assert Path(folder).is_relative_to(root)
    assert Path(users_file).is_relative_to(tmp_path)
