"""TVM is loaded without PyTorch, which may be imported before and after all the same."""

import subprocess
import sys

import pytest


def run(code, path):
    """What Python prints for some code, where a module of PyTorch's name lies in a folder."""
    (path / "torch.py").write_text("print('PyTorch is imported')\n")
    code = f"import sys; sys.path.insert(0, {str(path)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")


def test_schedules_are_found_without_pytorch_which_may_come_later(tmp_path):
    printed = run(
        "from tvmconv import library; library.schedules(); print('tvm' in sys.modules, 'torch' in sys.modules)\n"
        "import torch; print('torch' in sys.modules)",
        tmp_path,
    )
    assert printed[:3] == ["True False", "PyTorch is imported", "True"]


def test_pytorch_that_is_there_stays(tmp_path):
    printed = run(
        "import types; sys.modules['tvm'] = types.ModuleType('tvm')  # which would ask a great deal of it\n"
        "import torch; from tvmconv.lean import load_tvm; load_tvm(); print(sys.modules['torch'] is torch)",
        tmp_path,
    )
    assert printed[:2] == ["PyTorch is imported", "True"]


@pytest.mark.parametrize(("first", "imported"), [("", True), ("lean.own_process(); ", False)])
def test_xgboost_comes_without_scikit_learn_only_where_nobody_else_uses_it(first, imported, tmp_path):
    (tmp_path / "sklearn.py").write_text("print('scikit-learn is imported')\n")
    printed = run(
        f"import sys, threading; from tvmconv import lean; {first}lean.begin_xgboost(); lean.begin_xgboost()\n"
        "[thread.join() for thread in threading.enumerate() if thread.name == 'xgboost']\n"
        "print('xgboost' in sys.modules)",
        tmp_path,
    )
    assert ("scikit-learn is imported" in printed) == imported
    assert "True" in printed


def test_workers_of_other_hosts_are_asked_for_without_pytorch(tmp_path):
    printed = run(
        "from tvmconv.devices import rpc\nfrom tvmconv.errors import DeviceError\n"
        "try: rpc.devices('key', ('127.0.0.1', 1))\nexcept DeviceError: print('tvm' in sys.modules)",
        tmp_path,
    )
    assert printed[0] == "True"


def test_tvms_part_for_networks_waits_until_it_is_asked_for_and_then_comes_without_pytorch_too(tmp_path):
    printed = run(
        "import tvmconv as tc; tc.build(tc.parse('conv2d:1x4x8x8,8x4x3x3,p1'), 'tiling', arch='sm_90').source\n"
        "print('tvm.relax.op' in sys.modules)\n"
        "import tvm; print(tvm.relax.op.nn.conv2d.__name__)",
        tmp_path,
    )
    assert printed == ["False", "conv2d", ""]


def test_cudas_bindings_wait_until_somebody_asks_for_them(tmp_path):
    pytest.importorskip("cuda.bindings")
    printed = run(
        "from tvmconv.lean import load_tvm; load_tvm(); print('cuda.bindings' in sys.modules)\n"
        "from cuda.bindings import driver; print(driver.CUstream.__name__)",
        tmp_path,
    )
    assert printed == ["False", "CUstream", ""]


def test_what_tvm_imports_is_not_gone_through_by_the_garbage_collector(tmp_path):
    printed = run("import gc; from tvmconv.lean import load_tvm; load_tvm(); print(len(gc.get_objects()))", tmp_path)
    assert int(printed[0]) < 10_000


def test_that_tvm_remembers_its_annotations_does_not_make_it_take_anything(tmp_path):
    printed = run(
        "from tvmconv.lean import load_tvm; load_tvm(); import tvm; from tvm import te\n"
        "x = te.placeholder((8,), name='x'); y = te.compute((8,), lambda i: x[i] + 1, name='y')\n"
        "s = tvm.s_tir.Schedule(te.create_prim_func([x, y])); (loop,) = s.get_loops(s.get_sblock('y'))\n"
        "for factors in ('ab', [2, 4.5], [2, 4]):\n"
        "    try: s.split(loop, factors); print('split')\n"
        "    except TypeError as error: print(error)",
        tmp_path,
    )
    assert ["wrong type" in line for line in printed[:2]] == [True, True]
    assert printed[2] == "split"


def test_functions_in_tvmscript_are_told_from_those_of_a_class_without_looking_up_every_caller(tmp_path):
    (tmp_path / "written.py").write_text(
        "from __future__ import annotations\n"
        "from tvmconv.lean import load_tvm; load_tvm()\n"
        "from tvm.script import ir as I, tirx as T\n"
        "def alone(n):\n"
        "    @T.prim_func\n"
        "    def main(x: T.Buffer((n,), 'float32')):\n"
        "        x[0] = x[n - 1]\n"
        "    return main\n"
        "@I.ir_module\n"
        "class Module:\n"
        "    @T.prim_func\n"
        "    def main(x: T.Buffer((8,), 'float32')):\n"
        "        x[0] = x[7]\n"
    )
    printed = run("import written; print(written.alone(8).params[0].shape, list(written.Module.functions))", tmp_path)
    assert printed[0] == '(8,) [I.GlobalVar("main")]'


def test_operators_are_named_in_texts_as_where_tvm_is_imported_by_itself(tmp_path):
    names = (
        "from tvm.ir import Op\n"
        "for name in sorted(map(str, Op.list_op_names())): print(name, Op.get(name).get_attr('TScriptPrinterName'))"
    )
    by_itself = run(f"sys.modules['torch'] = None\nimport tvm\n{names}", tmp_path)
    named = run(f"from tvmconv.lean import load_tvm; load_tvm()\n{names}", tmp_path)
    assert len(named) > 500
    assert named == by_itself
