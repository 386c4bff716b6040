"""A new operator, epilogue or schedule is one new file: put into the package's folder, it is there everywhere."""

import importlib
import sys

import numpy as np
import pytest

import tvmconv as tc
from tvmconv import registry
from tvmconv.workloads import epilogue
from tvmconv.workloads import registry as operator_registry

SQUASH = '''
"""`squash`: what is large becomes nearly one."""

import numpy as np

from tvmconv.workloads.epilogue import EpilogueOp, register_op


def compute(value):
    from tvm import te

    return te.tanh(value)


register_op(EpilogueOp("squash", compute, np.tanh))
'''


PATCH = '''
"""A convolution of images without overlap, as vision transformers begin with."""

from dataclasses import dataclass
from typing import ClassVar

from tvmconv.workloads.operators.convolutions import Conv2d
from tvmconv.workloads.registry import operator


@operator
@dataclass(frozen=True)
class Patch(Conv2d):
    """A convolution whose stride is its kernel."""

    operator: ClassVar[str] = "patch"
    EXAMPLE: ClassVar[str] = "patch:1x3x8x8,16x3x4x4,s4"
'''

ROWS = '''
"""One block a row."""

from tvmconv.registry import schedule


@schedule("conv2d", "patch")
def rows(s, w, k):
    """One thread an output of a row."""
    for view in ("padded", "weight"):
        s.compute_inline(s.get_sblock(view))
    total = s.get_sblock("sum")
    store = s.cache_write(total, 0, "local")
    s.reverse_compute_inline(s.get_sblock("Y"))
    n, g, o, p, q, *_ = s.get_loops(total)
    s.bind(s.fuse(n, g, o, p), "blockIdx.x")
    s.bind(q, "threadIdx.x")
    s.reverse_compute_at(store, q)
'''


@pytest.fixture
def new_file(tmp_path, monkeypatch, schedule_registry):
    """Adds a file to a package, whose folder it need not lie in, as if it had always been there."""
    for owner, load in LOADERS[:2]:
        load()
        monkeypatch.setattr(owner, "_registry", dict(owner._registry))
    before = set(sys.modules)

    def add(package, name, text):
        folder = tmp_path / package
        folder.mkdir()
        (folder / f"{name}.py").write_text(text)
        module = importlib.import_module(package)
        monkeypatch.setattr(module, "__path__", [*module.__path__, str(folder)])
        importlib.invalidate_caches()
        forget()

    yield add
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    forget()


LOADERS = (
    (epilogue, epilogue._load_op_modules),
    (operator_registry, operator_registry._load_operators),
    (registry, registry._load_schedule_packages),
)


def forget():
    """Let packages be searched again for what they have."""
    for _, load in LOADERS:
        load.cache_clear()


def run(workload, schedule="default", device="opencl:0"):
    return tc.build(workload, schedule, device=device).verify()


def test_an_epilogue_is_one_new_file(new_file):
    new_file("tvmconv.workloads.epilogues", "squash", SQUASH)
    workload = tc.parse("conv2d:1x3x5x5,4x3x3x3,p1,bias,squash")
    assert workload.text.endswith(",bias,squash")
    x = np.full((1, 3, 5, 5), 100, "float32")
    assert workload.reference(x, np.ones((4, 3, 3, 3), "float32"), np.zeros(4, "float32")).max() == 1.0
    for schedule in ("default", "conflict_free", "direct"):
        assert run(workload, schedule).ok


def test_an_operator_is_one_new_file(new_file):
    new_file("tvmconv.workloads.operators", "patch", PATCH)
    workload = tc.parse("patch:1x3x8x8,16x3x4x4,s4,relu")
    assert (workload.operator, workload.output_shape) == ("patch", (1, 16, 2, 2))
    assert tc.parse(workload.text) == workload
    assert tc.schedules(workload) == []
    assert "patch" in operator_registry.operators()


def test_a_schedule_is_one_new_file(new_file):
    new_file("tvmconv.builtin.conv", "rows", ROWS)
    assert registry.find_schedule(tc.parse("conv2d:1x3x5x5,4x3x3x3"), "rows").summary == "One block a row."
    assert run(tc.parse("conv2d:2x4x7x5,6x2x3x3,s1x2,p1,g2,bias,silu"), "rows").ok


def test_an_operator_and_its_schedule_are_two(new_file):
    new_file("tvmconv.workloads.operators", "patch", PATCH)
    new_file("tvmconv.builtin.conv", "rows", ROWS)
    workload = tc.parse("patch:1x3x8x8,16x3x4x4,s4,nhwc")
    assert [s.name for s in tc.schedules(workload)] == ["rows"]
    assert run(workload, "rows").ok


@pytest.mark.parametrize(
    ("package", "text", "said"),
    [
        ("tvmconv.workloads.epilogues", SQUASH.replace('"squash"', '"relu"'), "epilogue 'relu' is registered already"),
        ("tvmconv.workloads.operators", PATCH.replace('"patch"', '"conv3d"'), "operator 'conv3d' is defined in"),
    ],
)
def test_a_name_that_is_taken_is_refused(new_file, package, text, said):
    new_file(package, "another", text)
    with pytest.raises(tc.WorkloadError, match=said):
        tc.parse("conv2d:1x3x5x5,4x3x3x3,relu")
