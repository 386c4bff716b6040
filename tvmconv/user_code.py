"""The border to the code of schedules, which anyone may write: what it raises becomes one `ScheduleFailure`."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator

from tvmconv.errors import Error, ScheduleFailure, describe

BUILT_IN = "tvmconv.builtin"


@contextlib.contextmanager
def user_code(name: str, module: str) -> Iterator[None]:
    """Raise whatever the block raises as `ScheduleFailure`; an `Error` and Ctrl-C stay what they are.

    Args:
        name: what the message begins with, such as "schedule bad".
        module: full name of the module that the code is in; the message names the last line of its package that was
            executed, rather than a line of a library that it called.

    Raises:
        ScheduleFailure: the block raised an exception, `SystemExit` included.
    """
    try:
        yield
    except (Error, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ScheduleFailure(name, describe(error), raised_at(error, module)) from error


def raised_at(error: BaseException, module: str) -> str:
    """Return file and line, such as "bad.py:4", of the last frame in a module's package; "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    package = BUILT_IN if module.startswith(f"{BUILT_IN}.") else module.partition(".")[0]
    own = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_in(frame.f_globals.get("__name__"), package):
            own = f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    return own


def _is_in(module: object, package: str) -> bool:
    return isinstance(module, str) and f"{module}.".startswith(f"{package}.")
