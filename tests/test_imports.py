"""Imports go one way, down the list of layers, and no two modules import each other.

Every import of every file counts: inside functions and for type checkers alike; none is exempt. Python also runs a
package's `__init__` before a module of it is imported, of which the text says nothing: that is no arrow.
"""

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_names import read_names

ROOT = Path(__file__).parent.parent

BUILTIN = "builtin"  # the folder `schedules`, which the registry imports by its name
BUILTIN_MAY_IMPORT = {
    *(BUILTIN, "registry", "annotations", "space", "workloads"),
    *("target", "fitted_latency", "tensor_map", "arithmetic", "errors", "requirements"),
}

# A package or module may import those of the layers below it, and those of its own layer if that makes no cycle.
LAYERS = (
    (BUILTIN,),
    ("benchmarks",),  # imported by name, for `tvmconv bench`
    ("", "__main__"),  # `import tvmconv` and `python -m tvmconv`: what users see
    ("cli",),
    ("plot",),
    ("torch", "relax"),
    ("reports",),
    ("experiments",),
    ("search", "baselines", "export", "training"),
    ("logs",),
    ("measure",),
    ("naive_cost", "predicted_kernel"),
    ("analysis",),
    ("emulator",),
    ("kernel", "verification"),
    ("cost_model",),
    ("devices",),
    ("compiler",),
    ("registry", "schedule_definition", "annotations", "space", "models", "requirements"),
    ("workloads",),
    ("command_text",),
    (
        *("arithmetic", "jsonfile", "target", "tensor_map", "files", "errors", "optional_packages", "user_code"),
        *("compat", "tempdir", "checksummed_file", "version", "tvm_import", "fitted_latency", "html", "palette"),
    ),
    ("deadline",),
)
# Large packages have layers of their own, to which the same applies.
ANALYSIS = (
    (
        *("", "kernel_work", "local_memory", "predicted_time", "races", "sensitivity"),
        *("speed_of_light", "waterfall"),
    ),
    ("block_accesses",),
    ("nsight",),
    ("sass",),
    ("memory",),
    ("tir",),
    ("occupancy",),
)
EMULATOR = (
    ("", "execution"),
    ("translation",),
    ("instructions",),
    ("state",),
    ("synchronization", "observers"),
    ("memory",),
    ("errors", "threads"),
)
FOLDERS = {"tvmconv": LAYERS, "tvmconv.analysis": ANALYSIS, "tvmconv.emulator": EMULATOR}
LEVELS = {
    folder: {name: level for level, names in enumerate(layers) for name in names} for folder, layers in FOLDERS.items()
}
# The emulator's public modules; other packages import no other module of it.
EMULATOR_PACKAGE = "tvmconv.emulator"
EMULATOR_PUBLIC = {"errors", "execution", "memory.arrays", "observers", "threads", "translation.arithmetic"}


def module_name(file: Path) -> str:
    """The name that a file is imported by."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "schedules":
        parts[:1] = ["tvmconv", BUILTIN]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def first_part(module: str, folder: str = "tvmconv") -> str:
    """Return the subpackage or module of a package that a module belongs to."""
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


def imported(module: str, file: Path) -> Iterator[str]:
    """The modules of ours that a file imports."""
    is_package = file.name == "__init__.py"
    for node in read_names(file).imports:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            above = module.split(".")[: None if node.level == is_package else is_package - node.level]
            base = ".".join([*(above if node.level else ()), *([node.module] if node.module else ())])
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base for alias in node.names]
        yield from (name for name in names if name in FILES)


@functools.cache
def arrows() -> dict[str, set[str]]:
    """The modules of ours that each of them imports."""
    return {module: {*imported(module, file)} - {module} for module, file in FILES.items()}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_module_has_a_layer(folder):
    assert {first_part(module, folder) for module in FILES if inside(module, folder)} <= set(LEVELS[folder])


def test_no_two_modules_import_each_other():
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        pytest.fail("a cycle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_down_the_layers(folder):
    levels = LEVELS[folder]
    against = [
        f"{module} imports {other}"
        for module, others in arrows().items()
        for other in sorted(others)
        if inside(module, folder) and inside(other, folder)
        if levels[first_part(other, folder)] < levels[first_part(module, folder)]
    ]
    assert against == []


def test_only_public_modules_of_the_emulator_are_imported():
    against = [
        f"{module} imports {other}"
        for module, others in arrows().items()
        for other in sorted(others)
        if inside(other, EMULATOR_PACKAGE)
        and not inside(module, EMULATOR_PACKAGE)
        and other.removeprefix(f"{EMULATOR_PACKAGE}.") not in EMULATOR_PUBLIC
    ]
    assert against == []


def test_schedules_import_workloads_knobs_and_registry_alone():
    against = [
        f"{module} imports {other}"
        for module, others in arrows().items()
        for other in sorted(others)
        if first_part(module) == BUILTIN and first_part(other) not in BUILTIN_MAY_IMPORT
    ]
    assert against == []
