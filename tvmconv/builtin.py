"""Built-in schedules: the folder `schedules` of the repository, imported as the package `tvmconv.builtin`.

An installed wheel contains that folder as the package `tvmconv/builtin`, in place of this file. In a checkout, on
PYTHONPATH or installed as editable, this file redirects the package to the folder.
"""

from pathlib import Path

__path__ = [str(Path(__file__).parent.parent / "schedules")]  # a module with `__path__` is a package
