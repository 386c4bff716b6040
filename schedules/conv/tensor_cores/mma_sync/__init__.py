"""`mma_sync`: each mma.sync instruction emitted, for all tensor cores since sm_80."""

from . import schedule  # noqa: F401  (gradients come later in the order of schedules)
