"""Nsight Compute's counters: reading them on a GPU through `ncu`, and predicting them from a kernel's machine code."""
