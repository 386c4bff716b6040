"""TVM and xgboost without what they import only because it is installed: that takes seconds, and is not needed here."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator

PYTORCH, SCIKIT_LEARN = "torch", "sklearn"
_owned = False


def own_process() -> None:
    """Say that this process is the command line's: nobody else in it uses what is loaded here."""
    global _owned
    _owned = True


def load_tvm() -> None:
    """Import TVM; if PyTorch was not imported before, without it. What is imported later may import both.

    Raises:
        ImportError: TVM cannot be imported.
    """
    with _without(PYTORCH) if "tvm" not in sys.modules else contextlib.nullcontext():
        import tvm  # noqa: F401


@functools.cache
def begin_xgboost() -> None:
    """Import xgboost while this thread does something else; whoever imports it meanwhile waits.

    Where scikit-learn is installed xgboost makes classes of it, with all that this imports. In a process of the command
    line it is kept from that, elsewhere not: somebody may want these classes.
    """
    threading.Thread(target=_load_xgboost, name="xgboost").start()


def _load_xgboost() -> None:
    hidden = _without(SCIKIT_LEARN) if _owned else contextlib.nullcontext()
    with contextlib.suppress(ImportError), hidden:  # whoever needs it tells what is wrong
        import xgboost  # noqa: F401


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
