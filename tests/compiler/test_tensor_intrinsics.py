"""What stands in for `inspect.stack` while TVM imports its tensor intrinsics."""

import inspect
import sys

import pytest

from tvmconv.compiler import tensor_intrinsics


def test_frames_are_those_of_inspect_stack():
    def describe(stack):
        return [(each.frame, each.filename, each.lineno, each.function, each.code_context) for each in stack]

    found, expected = [describe(list_frames()) for list_frames in (tensor_intrinsics.list_frames, inspect.stack)]
    assert found[1:] == expected[1:]  # the first one is the comprehension above, or this function
    assert found[0][3:] == expected[0][3:]
    assert tensor_intrinsics.list_frames(0)[0].code_context is None


def test_inspect_stack_is_itself_after_an_import_that_fails(monkeypatch):
    stack = inspect.stack
    monkeypatch.setitem(sys.modules, "tvm.s_tir.tensor_intrin", None)
    with pytest.raises(ImportError):
        tensor_intrinsics.import_tensor_intrinsics()
    assert inspect.stack is stack
