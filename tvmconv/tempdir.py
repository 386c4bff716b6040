"""Temporary directories that go with the process that made them, however it ends."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tvmconv.errors import HostError

# The shell waits for the end of its standard input, which comes with our own end, even by SIGKILL.
_REMOVE_AT_END = 'read -r _; rm -rf -- "$1"'


class ProcessTempDir:
    """A fresh temporary directory.

    Attributes:
        path: the directory.

    Raises:
        HostError: no directory for temporary files is writable, or no process starts.
    """

    def __init__(self, prefix: str) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
        except OSError as error:
            raise HostError(f"cannot make a temporary directory: {error.strerror or error}") from error
        try:
            self._cleanup_process = subprocess.Popen(
                ["/bin/sh", "-c", _REMOVE_AT_END, "sh", str(self.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self.path.rmdir()
            raise HostError(f"cannot start /bin/sh: {error.strerror or error}") from error

    def close(self) -> None:
        """Remove the directory now, with all that is in it; may be called twice."""
        self._cleanup_process.communicate()
