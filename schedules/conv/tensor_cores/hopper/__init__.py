"""`hopper`: persistent blocks with TMA copies and wgmma instructions, for sm_90 only."""

from . import dgrad, schedule, wgrad  # noqa: F401
