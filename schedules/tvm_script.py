"""TVMScript functions, parsed without an inspection of the call stack.

`tvm.script.tirx.prim_func` calls `inspect.stack()` twice per function, which reads the source of every caller. That
takes longer than the parsing where many modules are loaded, and its result serves only functions in a class and names
that occur in annotations alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc


def prim_func(*, s_tir: bool) -> Callable[[Callable[..., Any]], PrimFunc]:
    """Return a decorator that parses a function as `tvm.script.tirx.prim_func` does.

    TVM's parser reads the name of this decorator and its arguments in the source of the function, so that it has to be
    written as `@tvm_script.prim_func(s_tir=True)`. With `from __future__ import annotations`, the annotations may use
    only global names and names that the body of the function uses as well.

    Args:
        s_tir: Whether the function has the blocks and buffers that `tvm.s_tir.Schedule` transforms.

    Example:
        >>> from tvm.script import tirx as T
        >>> from tvmconv.builtin import tvm_script
        >>> @tvm_script.prim_func(s_tir=True)
        ... def copy(X: T.Buffer((64,), "float32"), Y: T.Buffer((64,), "float32")):
        ...     for i in T.thread_binding(64, thread="threadIdx.x"):
        ...         Y[i] = X[i]
        >>> bool(copy.attrs["s_tir"])
        True
    """
    from tvm.script.parser.core import utils
    from tvm.script.parser.core.entry import parse

    def parse_function(function: Callable[..., Any]) -> PrimFunc:
        parsed = parse(function, utils.inspect_function_capture(function))
        parsed.__name__ = function.__name__
        return parsed

    parse_function.dispatch_token = "tirx"  # type: ignore[attr-defined]  # by which the parser knows the language
    return parse_function
