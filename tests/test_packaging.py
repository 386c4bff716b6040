"""What is installed is what there is."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_folder_of_modules_is_a_package_that_is_installed():
    (listed,) = re.findall(r"^packages = (\[.*?^\])", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    folders = [*packages("tvmconv", "tvmconv"), *packages("schedules", "tvmconv.builtin"), "tvmconv.shipped"]
    assert sorted(ast.literal_eval(listed)) == sorted(folders)


def packages(folder, name):
    """The packages in a folder that is itself the package of that name."""
    inits = (init.parent.relative_to(ROOT / folder) for init in (ROOT / folder).rglob("__init__.py"))
    return [".".join((name, *init.parts)) for init in inits]
