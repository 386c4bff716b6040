"""Temporary directories that go with the process that made them, however it ends."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

# The shell waits for the end of its standard input, which comes with our own end, even by SIGKILL.
_REMOVE_AT_END = 'read -r _; rm -rf -- "$1"'


class Scratch:
    """A fresh temporary directory.

    Attributes:
        path: the directory.
    """

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._janitor = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE_AT_END, "sh", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Remove the directory now, with all that is in it; may be called twice."""
        self._janitor.communicate()
