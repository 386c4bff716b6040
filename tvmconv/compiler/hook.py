"""TVM's CUDA compiler, replaced in those blocks of code that ask for it and left alone everywhere else.

TVM's CUDA runtime, where there is one, has each module's text compiled while it is generated, by the global function
`tvm_callback_cuda_compile`. It is process-wide; the choice of what stands behind it is made here per thread and task.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Compiler = Callable[[str], bytes]

_NAME = "tvm_callback_cuda_compile"
_chosen: ContextVar[Compiler | None] = ContextVar("_chosen", default=None)


@contextmanager
def compile_with(compiler: Compiler) -> Iterator[None]:
    """Within the block, let `compiler` make the cubin of every CUDA text that TVM generates in this thread or task.

    Args:
        compiler: from CUDA text to a cubin; b"" will do for a module that is only to be looked at, not run.
    """
    _install()
    token = _chosen.set(compiler)
    try:
        yield
    finally:
        _chosen.reset(token)


@functools.cache
def _install() -> None:
    import tvm  # noqa: F401  registers the function that is replaced
    import tvm_ffi

    own = tvm_ffi.get_global_func(_NAME)

    def compile_cuda(text: str) -> bytes:
        return (_chosen.get() or own)(text)

    tvm_ffi.register_global_func(_NAME, compile_cuda, override=True)
