"""Interpreter of SASS, which executes what addresses and branches depend on, to count the memory requests."""
