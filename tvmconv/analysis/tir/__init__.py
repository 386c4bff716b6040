"""The text of a lowered kernel: its statements and accesses, and how often and where each of them is executed."""
