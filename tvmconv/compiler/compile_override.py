"""Local override of TVM's CUDA compiler.

TVM's CUDA runtime compiles the source of each module during code generation with the global function
`tvm_callback_cuda_compile`. That function is process-wide. This module selects its implementation per thread and task.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

CudaCompiler = Callable[[str], bytes]

_CALLBACK_NAME = "tvm_callback_cuda_compile"
_active_compiler: ContextVar[CudaCompiler | None] = ContextVar("_chosen", default=None)


@contextmanager
def override_cuda_compiler(compiler: CudaCompiler) -> Iterator[None]:
    """Use a compiler to cubins for all CUDA sources that TVM generates in this thread or task within the block.

    An empty cubin is sufficient for a module that is inspected but not run.
    """
    _install_callback()
    token = _active_compiler.set(compiler)
    try:
        yield
    finally:
        _active_compiler.reset(token)


@functools.cache
def _install_callback() -> None:
    import tvm  # noqa: F401  registers the original function
    import tvm_ffi

    default_compiler = tvm_ffi.get_global_func(_CALLBACK_NAME)

    def compile_cuda(text: str) -> bytes:
        return (_active_compiler.get() or default_compiler)(text)

    tvm_ffi.register_global_func(_CALLBACK_NAME, compile_cuda, override=True)
