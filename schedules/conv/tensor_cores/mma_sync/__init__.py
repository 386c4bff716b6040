"""`mma_sync`: each instruction written, for any tensor core since sm_80."""

from . import schedule  # noqa: F401
