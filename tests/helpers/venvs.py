"""Environments of Python that lack a program which this one has, made of links to what this one has."""

import sys
import sysconfig
from pathlib import Path


def without_nvdisasm(folder):
    """Make an environment without the package of nvdisasm, and return its Python."""
    ours = Path(sysconfig.get_path("purelib"))
    packages = folder / ours.relative_to(sys.prefix)
    packages.mkdir(parents=True)
    for entry in ours.iterdir():
        if entry.name != "nvidia":
            (packages / entry.name).symlink_to(entry)
    for entry in (ours / "nvidia").rglob("*"):
        if entry.is_file() and not entry.name.startswith("nvdisasm"):
            link = packages / entry.relative_to(ours)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(entry)
    python = folder / "bin/python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    return python
