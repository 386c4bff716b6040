"""Processes of tvmconv's own import TVM without PyTorch, which they may import afterwards."""

import subprocess
import sys

import pytest

from tvmconv.errors import HostError
from tvmconv.tvm_import import import_tvm


def run(code, *arguments):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, sys.argv[1])\n{code}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def torch(tmp_path):
    """Return a folder with a module of PyTorch's name."""
    (tmp_path / "torch.py").write_text("print('imported')\n")
    return tmp_path


def test_tvm_comes_without_torch_which_may_follow(torch):
    code = (
        "from tvmconv.tvm_import import import_tvm; before = [*sys.path]; import_tvm()\n"
        "print('tvm' in sys.modules, 'torch' in sys.modules, sys.path == before)\nimport torch"
    )
    assert run(code, torch) == ["True", "False", "True", "imported"]


def test_suite_is_tuned_without_torch(torch, tmp_path):
    code = (
        "from tvmconv import cli\nstatus = cli.main(['bench', 'tune-suite', '--tune-only', '--schedule', 'none', '-o', "
        "sys.argv[2]])\nprint(status, 'tvm' in sys.modules, 'torch' in sys.modules)"
    )
    assert run(code, torch, tmp_path) == ["2", "True", "False"]


def test_library_imports_tvm_as_it_is(torch):
    (torch / "tvm.py").write_text("import torch\nraise ImportError('enough')\n")
    code = "import tvmconv as tc\ntry: tc.schedules()\nexcept tc.Error: print('error')"
    assert run(code, torch) == ["imported", "error"]


def test_search_path_is_restored_after_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm", None)
    before = [*sys.path]
    with pytest.raises(HostError, match="TVM cannot be imported"):
        import_tvm()
    assert sys.path == before


ASKED = """
import threading, _thread
from tvmconv.tvm_import import can_leave_out_torch
def tell(): print(can_leave_out_torch())
"""


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("tell()", "True"),
        ("import torch; tell()", "False"),
        ("import tvm_ffi; tell()", "False"),
        ("ended = threading.Event(); threading.Thread(target=ended.wait).start(); tell(); ended.set()", "False"),
        (
            "began = threading.Event(); lock = _thread.allocate_lock(); lock.acquire()\n"
            "def wait(): began.set(); lock.acquire()\n"
            "_thread.start_new_thread(wait, ()); began.wait(); tell(); lock.release()",
            "False",
        ),
        ("thread = threading.Thread(target=tell); thread.start(); thread.join()", "False"),
    ],
    ids=["alone", "with PyTorch", "with TVM", "with a thread", "with a raw thread", "in a thread"],
)
def test_torch_is_left_out_where_nothing_else_imports(torch, code, answer):
    (torch / "torch.py").write_text("")
    (torch / "tvm_ffi.py").write_text("")
    assert run(ASKED + code, torch) == [answer]


SEARCH = """
import os, tvmconv as tc
try: tc.tune("conv2d:1x1x2x2,1x1x1x1", "tiling", "random", trials=1, log=os.devnull, device="opencl:0", workers=1)
except tc.Error as error: print("no log", "tvm" in sys.modules, "torch" in sys.modules)
"""


@pytest.mark.slow
def test_search_of_lone_program_imports_tvm_without_torch(torch):
    assert run(SEARCH, torch) == ["no", "log", "True", "False"]
