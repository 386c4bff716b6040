"""Cache files that are written atomically and whose content is protected by a checksum."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path


def read_checked(path: Path) -> bytes | None:
    """Return the content that `write_checked` wrote; None if the file is missing, damaged or of another origin."""
    try:
        if not path.is_file():  # reading a pipe would wait for its writer
            return None
        digest, _, content = path.read_bytes().partition(b"\n")
    except (OSError, MemoryError):
        return None
    return content if digest == _hash_content(content) else None


def write_checked(path: Path, content: bytes) -> bool:
    """Write or atomically replace a file with its checksum, and return whether this succeeded. If it fails, for example
    because the disk is full or read-only, an existing file stays unchanged.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f"{path.name}.", dir=path.parent, delete=False) as temp_file:
            stack.callback(Path(temp_file.name).unlink, missing_ok=True)
            temp_file.write(_hash_content(content) + b"\n" + content)
        os.replace(temp_file.name, path)
        stack.pop_all()
        return True
    return False


def _hash_content(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
