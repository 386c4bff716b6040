"""`stem`: first layers of a network, which have few input channels."""

from . import schedule, wgrad  # noqa: F401
