"""The operations of epilogues, one per file; every file in this folder is loaded."""
