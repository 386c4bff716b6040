"""Processes of tvmconv's own import TVM without PyTorch, which they may import afterwards."""

import subprocess
import sys

import pytest

from tvmconv.without_torch import import_tvm


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
        "from tvmconv.without_torch import import_tvm; before = [*sys.path]; import_tvm()\n"
        "print('tvm' in sys.modules, 'torch' in sys.modules, sys.path == before)\nimport torch"
    )
    assert run(code, torch) == ["True", "False", "True", "imported"]


def test_library_imports_tvm_as_it_is(torch):
    (torch / "tvm.py").write_text("import torch\nraise ImportError('enough')\n")
    code = "import tvmconv as tc\ntry: tc.schedules()\nexcept ImportError: print('error')"
    assert run(code, torch) == ["imported", "error"]


def test_search_path_is_restored_after_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm", None)
    before = [*sys.path]
    with pytest.raises(ImportError):
        import_tvm()
    assert sys.path == before
