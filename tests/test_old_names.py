"""The library is whole whatever else bears the name of its folder, and old names of its modules still import."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tvmconv as tc
from tvmconv.moved import MOVED, TAKEN

ROOT = Path(tc.__file__).parents[1]
EVERY_SCHEDULE = " ".join(f"{s.operator}:{s.name}" for s in tc.schedules())
ASK = """
import sys
sys.path.insert(0, sys.argv[1])
import tvmconv as tc
print(*(f"{s.operator}:{s.name}" for s in tc.schedules()))
import schedules
print(schedules.__file__)
"""


def hidden_by_folder(place):
    (place / "schedules").mkdir()
    (place / "schedules" / "__init__.py").write_text("")
    (place / "schedules" / "mine.py").write_text("raise SystemExit(1)\n")


def hidden_by_namespace(place):
    (place / "schedules").mkdir()
    (place / "schedules" / "mine.py").write_text("")


def hidden_by_module(place):
    (place / "schedules.py").write_text("")


def ask(place, **environment):
    """What another Python process prints, with this folder first on its path."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", ASK, str(place)],
        cwd=place,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.splitlines()


@pytest.mark.parametrize("hide", [hidden_by_folder, hidden_by_namespace, hidden_by_module])
def test_nothing_called_schedules_hides_the_library_and_what_a_user_calls_so_is_the_users(hide, tmp_path):
    hide(tmp_path)
    listed, file = ask(tmp_path, PYTHONPATH=str(ROOT))
    assert listed == EVERY_SCHEDULE
    assert hide is hidden_by_namespace or Path(file).is_relative_to(tmp_path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder of packages as a wheel fills it: the schedules copied into the package."""
    site = tmp_path_factory.mktemp("site")
    only_python = shutil.ignore_patterns("__pycache__", "builtin.py")
    shutil.copytree(ROOT / "tvmconv", site / "tvmconv", ignore=only_python)
    shutil.copytree(ROOT / "schedules", site / "tvmconv" / "builtin", ignore=only_python)
    return site


@pytest.mark.parametrize("hide", [hidden_by_folder, hidden_by_module])
def test_an_installed_library_is_whole_beside_another_schedules(hide, installed, tmp_path):
    hide(tmp_path)
    listed, file = ask(tmp_path, PYTHONPATH=str(installed))
    assert listed == EVERY_SCHEDULE
    assert Path(file).is_relative_to(tmp_path)


def test_the_old_name_is_the_library_where_nobody_else_has_it(installed, tmp_path):
    listed, file = ask(tmp_path, PYTHONPATH=str(installed))
    assert listed == EVERY_SCHEDULE
    assert Path(file) == installed / "tvmconv" / "builtin" / "__init__.py"


@pytest.mark.parametrize("old", [name for name in MOVED if name != TAKEN])
def test_an_old_name_is_the_module_that_took_its_place(old):
    assert importlib.import_module(old) is importlib.import_module(MOVED[old])
    assert importlib.import_module(old).__spec__.name == MOVED[old]


def test_what_is_inside_a_package_of_an_old_name_is_what_took_its_place():
    old = importlib.import_module("tvmconv.tuning.tuners.xgb")
    assert old is importlib.import_module("tvmconv.searching.tuners.xgb")


def test_names_that_never_were_are_still_refused():
    with pytest.raises(ModuleNotFoundError, match=r"tvmconv\.nonsense"):
        importlib.import_module("tvmconv.nonsense")
