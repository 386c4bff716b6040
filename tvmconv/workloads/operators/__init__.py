"""The operators, one per file; every file in this folder is loaded."""
