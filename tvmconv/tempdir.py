"""Temporary directories that are removed when their process ends, even by SIGKILL."""

from __future__ import annotations

import secrets
import subprocess
import tempfile
from pathlib import Path

from tvmconv.errors import HostError

# The shell reads standard input until its end, which comes when this process ends.
_REMOVE_AT_END = 'read -r _; rm -rf -- "$1"'


class ProcessTempDir:
    """A new temporary directory; raises HostError if it or the process that removes it cannot be made."""

    def __init__(self, prefix: str) -> None:
        try:
            self.path = Path(tempfile.gettempdir(), f"{prefix}{secrets.token_hex(8)}")
        except OSError as error:
            raise HostError(f"cannot make a temporary directory: {error.strerror or error}") from error
        try:
            # The shell starts before the directory is made, so that it stays at no moment.
            self._cleanup_process = subprocess.Popen(
                ["/bin/sh", "-c", _REMOVE_AT_END, "sh", str(self.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise HostError(f"cannot start /bin/sh: {error.strerror or error}") from error
        try:
            self.path.mkdir(0o700)
        except OSError as error:
            self.close()
            raise HostError(f"cannot make a temporary directory: {error.strerror or error}") from error

    def close(self) -> None:
        """Remove the directory and its content now; a second call has no effect."""
        self._cleanup_process.communicate()
