"""The schedules of this project: the folder `schedules` beside this package, under a name that nothing else bears.

In an installation the folder is copied here as the package `tvmconv.builtin`, which then takes this file's place; in a
checkout, also one that is only on PYTHONPATH or installed as editable, this file stands for it.
"""

from pathlib import Path

__path__ = [str(Path(__file__).parent.parent / "schedules")]  # what makes a module a package
