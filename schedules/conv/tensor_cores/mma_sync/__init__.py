"""`mma_sync`: each mma.sync instruction emitted, for all tensor cores since sm_80."""

from . import dgrad, schedule, wgrad  # noqa: F401
