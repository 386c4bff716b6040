"""Compilation from scheduled TIR to source, PTX, machine code and resource usage, without a GPU."""
