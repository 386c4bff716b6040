"""The operations of epilogues; every file in this folder is loaded."""
