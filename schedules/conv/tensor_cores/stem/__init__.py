"""`stem`: first layers of a network, which have few input channels."""

from . import schedule  # noqa: F401
