"""TVM and xgboost without what they import only because it is installed: that takes seconds, and is not needed here.

And TVM without what it finds out anew each time it is asked, which takes a good part of building a kernel.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import linecache
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PYTORCH, SCIKIT_LEARN = "torch", "sklearn"
CUDA = "cuda.bindings"
SEVERAL_HOSTS = "tvm.runtime.disco"  # what it takes is not in the wheel
NAMES = "tvm.tirx.script.builder.ir"  # asks for many operators that are not there, to name them in texts
NETWORKS = "tvm.relax"  # TVM's part for whole networks: half of what it imports
_NAMED = "TScriptPrinterName"  # the attribute of an operator that names it
_DECORATED = 2  # the place in the stack of what defines a function, or the class that it is in
_owned = False


def own_process() -> None:
    """Say that this process is the command line's: nobody else in it uses what is loaded here."""
    global _owned
    _owned = True


def load_tvm() -> None:
    """Import TVM; if PyTorch was not imported before, without it. What is imported later may import both.

    TVM's part for networks is imported when somebody first looks into it, which lowering a kernel does not, and
    TVMScript does; it comes without PyTorch, too, unless that is there by then. Nothing is asked for that is known not
    to be there: to describe the first error of a process, TVM reads the symbols of all its libraries. TVM's FFI comes
    without CUDA's bindings, too, unless they were imported before: it takes their streams as arguments only then.

    Raises:
        ImportError: TVM cannot be imported.
    """
    first = "tvm" not in sys.modules  # else the import waits for the thread that is at it, if one is
    with contextlib.ExitStack() as stack:
        if first:
            for name in (PYTORCH, CUDA, SEVERAL_HOSTS):
                stack.enter_context(_without(name))
            stack.enter_context(_found_by(_Lazy(NETWORKS)))
            stack.enter_context(_operators_by_name())
            stack.enter_context(_without_garbage_collection())
        import tvm  # noqa: F401

        if first:
            _hasten()
    if first:
        gc.freeze()  # it stays: whoever collects, and every process at its end, would go through all of it


def _hasten() -> None:
    """Have TVM do with less what it does for each step of a schedule, and for each function and call in TVMScript."""
    from tvm.s_tir.schedule import _type_checker
    from tvm.script.parser.core.parser import ScriptMacro
    from tvm.tirx.script.parser import entry

    for name in ("_dispatcher", "_type2str"):  # it takes annotations apart to check arguments: let it remember
        setattr(_type_checker, name, functools.lru_cache(maxsize=1024)(getattr(_type_checker, name)))
    ScriptMacro._find_parser_def = _find_parser
    entry.inspect = types.SimpleNamespace(**{**vars(inspect), "stack": _callers})


def _callers() -> list[inspect.FrameInfo]:
    """What `inspect.stack` gives TVM's `prim_func`, with the line's text of the one frame that it reads it of.

    To find the others' takes longer than all else that a function in TVMScript takes.
    """
    frames: list[inspect.FrameInfo] = []
    frame = inspect.currentframe()
    while frame and (frame := frame.f_back):
        code, context = frame.f_code, None
        if len(frames) == _DECORATED:
            linecache.checkcache(code.co_filename)
            context = [linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals)]
        frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, context, 0))
    return frames


def _find_parser(macro: Any) -> Any:
    """What parses the text that calls a macro; TVM's own `_find_parser_def` looks up the files of all callers first.

    Raises:
        RuntimeError: nothing does.
    """
    frame = inspect.currentframe()
    while frame:
        if parser := frame.f_globals.get(macro.parser_object_name):
            return parser
        frame = frame.f_back
    raise RuntimeError(f"{macro.parser_object_name} not available")


@functools.cache
def begin_tvm() -> None:
    """Import TVM while this thread does something else that mostly waits; whoever imports it meanwhile waits."""
    threading.Thread(target=_import_quietly, args=(load_tvm,), name="tvm").start()


@functools.cache
def begin_xgboost() -> None:
    """Import xgboost while this thread does something else; whoever imports it meanwhile waits.

    Where scikit-learn is installed xgboost makes classes of it, with all that this imports. In a process of the command
    line it is kept from that, elsewhere not: somebody may want these classes.
    """
    threading.Thread(target=_import_quietly, args=(_load_xgboost,), name="xgboost").start()


def _load_xgboost() -> None:
    with _without(SCIKIT_LEARN) if _owned else contextlib.nullcontext():
        import xgboost  # noqa: F401


def _import_quietly(load: Callable[[], None]) -> None:
    with contextlib.suppress(ImportError):  # whoever needs it tells what is wrong
        load()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Within the block nothing is collected: of what importing makes nearly all stays."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _WithoutPyTorch(importlib.abc.Loader):
    """Executes a module as another loader does, and like TVM itself without garbage collection and without PyTorch."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """The module, or None for Python to make it."""
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        """Execute it."""
        with _without(PYTORCH), _without_garbage_collection():
            self._loader.exec_module(module)


class _Lazy(importlib.abc.MetaPathFinder):
    """Finds one module, which is executed when an attribute of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Where the module is, with a loader that waits; None of any other."""
        found = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname == self._name else None
        if found and found.loader:
            found.loader = importlib.util.LazyLoader(_WithoutPyTorch(found.loader))
        return found


class _Operators(importlib.abc.MetaPathFinder):
    """Finds no module, but sees one coming; from then on operators that are not there are told without TVM."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._theirs: dict[str, Any] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None, so that others find it."""
        if fullname == self._name:
            from tvm.ir import Op, _ffi_api

            self._known = frozenset(map(str, Op.list_op_names()))
            for name, ours in (("GetOp", self._get), ("RegisterOpAttr", self._register)):
                self._theirs[name] = getattr(_ffi_api, name)
                setattr(_ffi_api, name, ours)
        return None

    def restore(self) -> None:
        """TVM is asked again."""
        for name, function in self._theirs.items():
            setattr(sys.modules["tvm.ir._ffi_api"], name, function)

    def _get(self, name: str) -> Any:
        if name not in self._known:
            raise AttributeError(f"Operator {name} is not registered")  # as TVM's own error is
        return self._theirs["GetOp"](name)

    def _register(self, name: str, key: str, value: Any, level: int) -> None:
        if key == _NAMED and name in self._known and self._theirs["GetOp"](name).get_attr(key) == value:
            return  # a second time would be an error
        self._theirs["RegisterOpAttr"](name, key, value, level)


@contextlib.contextmanager
def _operators_by_name() -> Iterator[None]:
    """Within the block, in which TVM is imported, errors that it makes and ignores are made without it."""
    operators = _Operators(NAMES)
    try:
        with _found_by(operators):
            yield
    finally:
        operators.restore()


@contextlib.contextmanager
def _found_by(finder: importlib.abc.MetaPathFinder) -> Iterator[None]:
    """Within the block a finder is asked before all others."""
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """Within the block importing a module raises ImportError, unless it was imported before."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
