"""Traversal of a lowered kernel's TIR: its statements and memory accesses, and where and how often each is executed."""
