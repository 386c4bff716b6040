"""`hopper`: TMA copies, warpgroups that multiply by wgmma, and persistent blocks, for sm_90 alone."""

from . import schedule  # noqa: F401
