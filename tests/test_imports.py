"""Imports go one way, down the list of rooms, and no two files need each other.

Every import of every file counts: inside functions and for type checkers alike; none is exempt. Python also runs a
package's `__init__` before a module of it is imported, of which the text says nothing: that is no arrow.
"""

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

BUILTIN = "builtin"  # the folder `schedules`, found by the library by its name; it knows no other rooms than
BUILTIN_MAY_IMPORT = {
    BUILTIN,
    "arithmetic",
    "library",
    "marks",
    "knobs",
    "workloads",
    "gpu",
    "tensor_map",
    "errors",
    "requirements",
}

# Each room may import those further down, and those beside it as long as that makes no circle.
ROOMS = (
    (BUILTIN,),
    ("benchmarks",),  # imported by name, for `tvmconv bench`
    ("", "__main__"),  # `import tvmconv` and `python -m tvmconv`: what users see
    ("cli",),
    ("torch",),
    ("reports",),
    ("experiments",),
    ("searching", "baselines", "export", "training"),
    ("logs",),
    ("measuring",),
    ("naive", "predicted", "untuned"),
    ("analysis",),
    ("kernel", "verify"),
    ("knowledge",),
    ("devices",),
    ("compiler",),
    ("library", "marks", "knobs", "models", "requirements"),
    ("workloads",),
    (
        *(
            "arithmetic",
            "jsonfile",
            "gpu",
            "tensor_map",
            "files",
            "errors",
            "extras",
            "user_code",
            "scratch",
            "checksummed",
            "version",
        ),
        "without_torch",
    ),
    ("deadline",),
)
# Rooms that are long have rooms of their own, to which the same applies.
ANALYSIS = (
    ("", "bounds", "estimate", "local_memory", "predicted_time", "races", "steps", "waterfall", "work"),
    ("asked",),
    ("counts", "nsight"),
    ("machine_code",),
    ("memory",),
    ("lowered", "emulation"),
    ("occupancy",),
)
EMULATION = (
    ("", "execute", "observe"),
    ("translation",),
    ("instructions",),
    ("compiled",),
    ("machine",),
    ("arguments", "synchronization", "watch"),
    ("memory",),
    ("addresses", "blocks", "errors", "threads"),
)
FOLDERS = {"tvmconv": ROOMS, "tvmconv.analysis": ANALYSIS, "tvmconv.emulator": EMULATION}
LEVELS = {
    folder: {room: level for level, rooms in enumerate(order) for room in rooms} for folder, order in FOLDERS.items()
}
# What others may import of a room of whose inside they need not know.
EMULATED = "tvmconv.emulator"
DOORS = {"addresses", "arguments", "blocks", "errors", "execute", "memory.arrays", "observe", "threads", "watch"}


def module_name(file: Path) -> str:
    """The name that a file is imported by."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "schedules":
        parts[:1] = ["tvmconv", BUILTIN]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str, folder: str = "tvmconv") -> str:
    """The room of a module: the folder, or the file, in a folder that it is in."""
    return module.removeprefix(folder).removeprefix(".").partition(".")[0]


def inside(module: str, folder: str) -> bool:
    """Whether a module is a folder's, or the folder itself."""
    return f"{module}.".startswith(f"{folder}.")


FILES = {
    module_name(file): file
    for folder in ("tvmconv", "schedules")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if file != ROOT / "tvmconv" / "builtin.py"  # stands for the folder, and imports nothing of ours
}


def imported(module: str, text: str, *, is_package: bool) -> Iterator[str]:
    """The modules of ours that a file imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: None if node.level == is_package else is_package - node.level]
            base = ".".join([*(above if node.level else ()), *([node.module] if node.module else ())])
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base for alias in node.names]
        else:
            continue
        yield from (name for name in names if name in FILES)


@functools.cache
def arrows() -> dict[str, set[str]]:
    """The modules of ours that each of them imports."""
    return {
        module: {name for name in imported(module, file.read_text(), is_package=file.name == "__init__.py")} - {module}
        for module, file in FILES.items()
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_is_in_a_room(folder):
    assert {room(module, folder) for module in FILES if inside(module, folder)} <= set(LEVELS[folder])


def test_no_two_files_need_each_other():
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        pytest.fail("a circle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_down_the_list_of_rooms(folder):
    levels = LEVELS[folder]
    against = [
        f"{module} imports {other}"
        for module, others in arrows().items()
        for other in sorted(others)
        if inside(module, folder) and inside(other, folder)
        if levels[room(other, folder)] < levels[room(module, folder)]
    ]
    assert against == []


def test_who_is_above_the_emulation_knows_its_doors_alone():
    against = [
        f"{module} imports {other}"
        for module, others in arrows().items()
        for other in sorted(others)
        if inside(other, EMULATED) and not inside(module, EMULATED) and other.removeprefix(f"{EMULATED}.") not in DOORS
    ]
    assert against == []


def test_schedules_know_workloads_knobs_and_the_library_alone():
    against = [
        f"{module} imports {other}"
        for module, others in arrows().items()
        for other in sorted(others)
        if room(module) == BUILTIN and room(other) not in BUILTIN_MAY_IMPORT
    ]
    assert against == []
