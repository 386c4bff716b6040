"""Translation of exceptions in schedule code, which users may write, to `ScheduleFailure`."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterable, Iterator

from tvmconv.errors import Error, ScheduleFailure, describe_error

BUILT_IN = "tvmconv.builtin"


@contextlib.contextmanager
def translate_user_errors(name: str, *modules: str) -> Iterator[None]:
    """Translate exceptions of the block to `ScheduleFailure`; an `Error` and KeyboardInterrupt pass unchanged. The
    message gives the last executed line in the packages of `modules` rather than a line of a library that they call.
    """
    try:
        yield
    except (Error, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ScheduleFailure(name, describe_error(error), find_error_location(error, modules)) from error


def find_error_location(error: BaseException, modules: Iterable[str]) -> str:
    """Return the file and line, such as "bad.py:4", of the last frame in the packages of modules; "" if none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    packages = {BUILT_IN if name.startswith(f"{BUILT_IN}.") else name.partition(".")[0] for name in modules}
    location = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = f"{frame.f_globals.get('__name__')}."
        if any(module.startswith(f"{package}.") for package in packages):
            location = f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    return location
