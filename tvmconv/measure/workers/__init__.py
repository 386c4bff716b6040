"""The package workers."""
