import threading

import pytest
import tvm_ffi

from tvmconv.compiler import hook
from tvmconv.compiler.hook import compile_with


@pytest.fixture
def compile_cuda():
    """What TVM's CUDA runtime calls, with b"own" as the outcome of TVM's own compiler."""
    original = tvm_ffi.get_global_func(hook._NAME)
    tvm_ffi.register_global_func(hook._NAME, lambda text: b"own", override=True)
    hook._install.cache_clear()
    yield lambda: tvm_ffi.get_global_func(hook._NAME)("text")
    tvm_ffi.register_global_func(hook._NAME, original, override=True)
    hook._install.cache_clear()


def test_the_compiler_is_ours_within_the_block(compile_cuda):
    with compile_with(lambda text: text.upper().encode()):
        assert compile_cuda() == b"TEXT"


def test_the_compiler_is_tvms_own_after_an_error_in_the_block(compile_cuda):
    with pytest.raises(KeyError), compile_with(lambda text: b"ours"):
        raise KeyError
    assert compile_cuda() == b"own"


def test_other_threads_keep_tvms_own_compiler(compile_cuda):
    seen = []
    with compile_with(lambda text: b"ours"):
        thread = threading.Thread(target=lambda: seen.append(compile_cuda()))
        thread.start()
        thread.join()
    assert seen == [b"own"]
