import threading

import pytest
import tvm_ffi

from tvmconv.compiler import lowered_module
from tvmconv.compiler.lowered_module import override_cuda_compiler


@pytest.fixture
def compile_cuda():
    """What TVM's CUDA runtime calls, with b"own" as the outcome of TVM's own compiler."""
    original = tvm_ffi.get_global_func(lowered_module._CALLBACK_NAME)
    tvm_ffi.register_global_func(lowered_module._CALLBACK_NAME, lambda text: b"own", override=True)
    lowered_module._install_callback.cache_clear()
    yield lambda: tvm_ffi.get_global_func(lowered_module._CALLBACK_NAME)("text")
    tvm_ffi.register_global_func(lowered_module._CALLBACK_NAME, original, override=True)
    lowered_module._install_callback.cache_clear()


def test_the_compiler_is_ours_within_the_block(compile_cuda):
    with override_cuda_compiler(lambda text: text.upper().encode()):
        assert compile_cuda() == b"TEXT"


def test_the_compiler_is_tvms_own_after_an_error_in_the_block(compile_cuda):
    with pytest.raises(KeyError), override_cuda_compiler(lambda text: b"ours"):
        raise KeyError
    assert compile_cuda() == b"own"


def test_other_threads_keep_tvms_own_compiler(compile_cuda):
    seen = []
    with override_cuda_compiler(lambda text: b"ours"):
        thread = threading.Thread(target=lambda: seen.append(compile_cuda()))
        thread.start()
        thread.join()
    assert seen == [b"own"]
