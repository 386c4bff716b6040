"""`stem`: first layers of a network, which have few input channels."""

from . import dgrad, schedule, wgrad  # noqa: F401
