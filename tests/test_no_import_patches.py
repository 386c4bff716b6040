"""Importing tvmconv changes nothing in other modules, and no thread imports TVM or PyTorch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [file for folder in ("tvmconv", "schedules", "scripts") for file in sorted((ROOT / folder).rglob("*.py"))]
IMPORT_MACHINERY = {"meta_path", "path_hooks", "path_importer_cache"}
HOOK_CLASSES = {"MetaPathFinder", "PathEntryFinder", "Loader", "LazyLoader", "InspectLoader", "SourceLoader"}
SETTINGS = {"os.environ", "sys.path", "torch.backends"}  # meant to be set
ALLOWED = {
    # A worker is a process of its own; the listener of TVM's RPC ends with an error for each session that crashes.
    ("tvmconv/measure/rpc.py", "threading.excepthook"),
    ("tvmconv/measure/rpc.py", "tempfile.tempdir"),
}


def imported_names(nodes):
    """Return the names that the imports of a file bind to modules, wherever they stand."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def written_attributes(nodes):
    """Yield `module.attribute` for each assignment to an attribute of something that was imported."""
    names = imported_names(nodes)
    for node in nodes:
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
            continue
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
        for target in targets:
            while isinstance(target, ast.Subscript):
                target = target.value
            if isinstance(target, ast.Attribute):
                text = ast.unparse(target)
                first = names.get(text.partition(".")[0], "")
                if first and not first.startswith("tvmconv"):
                    yield text


def patches(file):
    """Return what a file does that changes other modules or how they are imported, each with its line."""
    nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    path = str(file.relative_to(ROOT))
    found = [
        f"sets {text}"
        for text in written_attributes(nodes)
        if (path, text) not in ALLOWED and ".".join(text.split(".")[:2]) not in SETTINGS
    ]
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in IMPORT_MACHINERY:
            found.append(f"uses {ast.unparse(node)}")
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
        if name in HOOK_CLASSES:
            found.append(f"uses {ast.unparse(node)}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            is_of_modules = isinstance(of, ast.Attribute) and of.attr == "modules" and ast.unparse(of) == "sys.modules"
            is_of_gc = isinstance(of, ast.Name) and of.id == "gc"
            if (is_of_gc and node.func.attr == "disable") or (is_of_modules and node.func.attr != "get"):
                found.append(f"calls {ast.unparse(node.func)}")
    return found


def test_no_file_patches_a_module():
    assert {str(file.relative_to(ROOT)): found for file in FILES if (found := patches(file))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys.modules['torch'] = None",
        "import sys\ndel sys.modules['torch']",
        "import sys\nsys.modules.pop('torch')",
        "import sys\nsys.meta_path.insert(0, finder)",
        "import gc\ngc.disable()",
        "import importlib.util\nimportlib.util.LazyLoader(loader)",
        "def f():\n    from tvm.tirx.script.parser import entry\n    entry.inspect = quick",
        "from tvm.script.parser.core.parser import ScriptMacro\nScriptMacro._find_parser_def = quick",
    ],
)
def test_patch_is_found(text, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "patch.py"
    file.write_text(text)
    assert patches(file)


def test_import_of_tvm_breaks_no_import_in_another_thread(tmp_path):
    """A stand-in for TVM imports PyTorch, as TVM does, and waits until another thread has imported it, too."""
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "tvm").mkdir()
    (tmp_path / "tvm" / "__init__.py").write_text(
        "import threading\nbegun, ended = threading.Event(), threading.Event()\nbegun.set()\nended.wait(10)\n"
    )
    code = (
        "import sys, threading; sys.path.insert(0, sys.argv[1])\n"
        "import tvmconv as tc\n"
        "thread = threading.Thread(target=lambda: tc.schedules()); thread.start()\n"
        "while 'tvm' not in sys.modules or not hasattr(sys.modules['tvm'], 'ended'): pass\n"
        "try: import torch; print('imported', end='')\n"
        "finally: sys.modules['tvm'].ended.set()\n"
        "thread.join()"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert ran.stdout == "imported", ran.stderr
