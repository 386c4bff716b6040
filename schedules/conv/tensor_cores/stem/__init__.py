"""`stem`: first layers, of few input channels."""

from . import schedule  # noqa: F401
