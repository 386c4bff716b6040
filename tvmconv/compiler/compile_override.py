"""TVM's CUDA compiler, replaced in those blocks of code that ask for it and left alone everywhere else.

TVM's CUDA runtime, where there is one, has each module's text compiled while it is generated, by the global function
`tvm_callback_cuda_compile`. It is process-wide; the choice of what stands behind it is made here per thread and task.
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
    """Within the block, let `compiler` make the cubin of every CUDA text that TVM generates in this thread or task.

    Args:
        compiler: from CUDA text to a cubin; b"" will do for a module that is only to be looked at, not run.
    """
    _install_callback()
    token = _active_compiler.set(compiler)
    try:
        yield
    finally:
        _active_compiler.reset(token)


@functools.cache
def _install_callback() -> None:
    import tvm  # noqa: F401  registers the function that is replaced
    import tvm_ffi

    default_compiler = tvm_ffi.get_global_func(_CALLBACK_NAME)

    def compile_cuda(text: str) -> bytes:
        return (_active_compiler.get() or default_compiler)(text)

    tvm_ffi.register_global_func(_CALLBACK_NAME, compile_cuda, override=True)
