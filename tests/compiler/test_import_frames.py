"""Stacks of calls are the same, and are found without a search through all modules, once two modules stand for the
frames of the import system.
"""

import inspect
import json
import subprocess
import sys

# A module that another module imports, and that writes down the stack of its import.
MODULE = """
import inspect, json
stack = [[f.filename, f.lineno, f.function, f.code_context, f.index] for f in inspect.stack()]
frozen = [f for f in inspect.stack() if f.filename.startswith("<frozen importlib")]
print(json.dumps([stack, [inspect.getmodule(f.frame, f.filename) is not None for f in frozen]]))
"""


def list_frames(folder, code=""):
    command = [sys.executable, "-c", f"{code}\nimport imported_frames_test"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_stacks_stay_the_same(tmp_path):
    (tmp_path / "imported_frames_test.py").write_text(MODULE)
    before, modules_before = list_frames(tmp_path, "\n")
    code = f"import sys; sys.path.append({inspect.getfile(sys.modules['tvmconv']).rpartition('/tvmconv/')[0]!r})\n"
    code += "from tvmconv.compiler.import_frames import stand_for_frames; stand_for_frames()"
    after, modules_after = list_frames(tmp_path, code)
    assert [each[:1] + each[2:] for each in before] == [each[:1] + each[2:] for each in after]
    assert modules_before
    assert not any(modules_before)
    assert all(modules_after)
