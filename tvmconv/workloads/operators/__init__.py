"""The operators; every file in this folder is loaded."""
